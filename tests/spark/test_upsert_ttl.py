# SPDX-License-Identifier: Apache-2.0
"""Keys past their time, with a real Spark and a controller whose clock moves when it is told to: the daily rebuild
hides them and shrinks the state, also if it dies half-way; later rows of them are new keys; deleted keys stay deleted.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from control import StillClock
from pipelines import World, wait_for
from upsert_model import History, UpsertModel
from upsert_pipeline import add_upsert_table, check_upserts, history_of, read_upserts

from cremant.log.api import Message

Session = Callable[[], Any]
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
PARTITIONS = 4


class ModelBroker:
    """Answers the pages of a seed out of the reference model, at the epoch that is asked for; nothing while `down`."""

    def __init__(self, world: World, model: UpsertModel, expired: dict[int, float]) -> None:
        self.down = False
        self.asked = 0
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sql = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["sql"]
                broker.asked += 1
                body = b"" if broker.down else broker._page(sql)
                self.send_response(503 if broker.down else 200)
                self.send_header("Content-Type", "application/vnd.apache.arrow.stream")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._world, self._model, self._expired = world, model, expired
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _page(self, sql: str) -> bytes:
        found = re.search(
            r'asOfEpoch = (\d+).*"\$partition" = (\d+) AND "\$offset" >= (\d+) AND "\$offset" < (\d+)', sql, re.DOTALL
        )
        assert found is not None, sql
        assert "SET skipUpsertDelete = true" in sql
        epoch, partition, first, following = (int(text) for text in found.groups())
        history = History(self._model, PARTITIONS)
        for _, _, so_far in history_of(read_upserts(self._world), self._model, up_to=epoch, expired=self._expired):
            history = so_far
        rows = [
            row for row in history.winners.values() if row.partition == partition and first <= row.offset < following
        ]
        columns: dict[str, Any] = {
            "id": pa.array([row.key for row in rows], pa.int64()),
            "ts": pa.array([row.comparison[0] for row in rows], pa.int64()),
            "gone": pa.array([row.deleted for row in rows], pa.bool_()),
            "$offset": pa.array([row.offset for row in rows], pa.int64()),
            "$subRow": pa.array([0] * len(rows), pa.int32()),
            "$validFrom": pa.array([history.versions[row.location].valid_from for row in rows], pa.int64()),
        }
        table = pa.table(columns).replace_schema_metadata({b"cremant.response": json.dumps({"epoch": epoch}).encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())


class Keys:
    """A table whose rows are kept for two days, and the model of it."""

    def __init__(self, directory: Path) -> None:
        self.clock = StillClock()
        self.world = World(directory, clock=self.clock)
        self.model = UpsertModel()
        #: Epoch of a seed -> the oldest time that it kept.
        self.expired: dict[int, float] = {}
        self.rows = 0
        self._next = [0] * PARTITIONS
        segments = {"timeColumnName": "ts", "retentionTimeUnit": "DAYS", "retentionTimeValue": "2"}
        add_upsert_table(self.world, segmentsConfig=segments)
        # Tomorrow its open segments are older than the retention, and its rows may be.
        self.clock.advance(36 * HOUR_MS)
        self.world.entered("events", PARTITIONS)
        self.broker = ModelBroker(self.world, self.model, self.expired)

    def close(self) -> None:
        self.broker.close()
        self.world.close()

    def produce(self, keys: range, *, age_ms: int, gone: bool = False) -> None:
        """A row of each key, in any partition."""
        waiting: list[list[Message]] = [[] for _ in range(PARTITIONS)]
        for key in keys:
            partition, ts = (key + self.rows // 7) % PARTITIONS, self.clock.now_ms() - age_ms
            row = {"id": key, "gone": gone, "v": self.rows, "ts": ts}
            waiting[partition].append(Message(msgspec.json.encode(row)))
            self.model.apply(partition, self._next[partition], 0, key, ts, gone, self.rows)
            self._next[partition] += 1
            self.rows += 1
        for partition, messages in enumerate(waiting):
            if messages:
                self.world.stream.append("events", partition, messages)

    def settle(self) -> None:
        wait_for(lambda: self.world.closed_rows() == self.rows)

    def seeded(self) -> bool:
        """The seed that is begun is closed; then the model knows of it."""
        expiry = self.world.view().pipeline_record.expiry
        if expiry is None or expiry.epoch not in {mark.epoch for mark in read_upserts(self.world)[0].marks}:
            return False
        self.expired[expiry.epoch] = expiry.before_ms
        return True

    def check(self) -> History:
        return check_upserts(read_upserts(self.world), self.model, self.rows, self.expired)


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    made = Keys(tmp_path)
    yield made
    made.close()


def test_keys_past_the_retention_go_once_a_day_and_what_is_deleted_stays_so(keys: Keys, session: Session) -> None:
    old, fresh, deleted, long_deleted = range(300), range(300, 500), range(500, 600), range(600, 700)
    keys.produce(old, age_ms=30 * HOUR_MS)
    keys.produce(fresh, age_ms=HOUR_MS)
    for each, age_ms in ((deleted, 2 * HOUR_MS), (long_deleted, 40 * HOUR_MS)):
        keys.produce(each, age_ms=age_ms)
        keys.produce(each, age_ms=age_ms - HOUR_MS, gone=True)
    query = keys.world.query(session, brokers=(keys.broker.url,))
    keys.settle()
    wait_for(lambda: 700 <= (query.report().keys or 0) < 720, what="the coordinator says how many keys it has")
    assert (query.report().state_bytes or 0) > 700

    # A day later; nothing is asked for before.
    chores = keys.world.controller._housekeeping[1]
    chores.run_due()
    assert keys.world.view().pipeline_record.rebuilds_asked == 0
    keys.broker.down = True
    keys.clock.advance(DAY_MS)
    keys.world.beat()
    chores.run_due()
    assert keys.world.view().pipeline_record.rebuilds_asked == 1
    query.update(keys.world.view())
    wait_for(lambda: keys.broker.asked and query.report().rebuilding, what="the seed is planned")
    assert not keys.seeded()

    # The pipeline ends before the seed is closed: the next one begins anew, and rows of the stream wait for it.
    query.stop()
    assert query.join(60)
    assert not keys.seeded()
    keys.broker.down = False
    keys.produce(range(700, 750), age_ms=0)
    query = keys.world.query(session, brokers=(keys.broker.url,))
    wait_for(keys.seeded, what="the seed is closed")
    keys.settle()
    history = keys.check()
    assert {row.key for row in history.winners.values()} == {*fresh, *deleted, *range(700, 750)}
    wait_for(lambda: 350 <= (query.report().keys or 0) < 370, what="the state has shrunk")
    assert keys.world.view().pipeline_record.rebuilds_asked == 1, "the one that was begun is enough"

    # What comes later: new rows of expired keys, late rows of deleted ones, and of those that are forgotten.
    keys.produce(range(100), age_ms=0)
    keys.produce(deleted, age_ms=DAY_MS + 3 * HOUR_MS)
    keys.produce(range(600, 650), age_ms=0)
    keys.settle()
    history = keys.check()
    shown = {row.key for row in history.at(history.epochs[-1]).values()}
    assert shown == {*range(100), *fresh, *range(600, 650), *range(700, 750)}
