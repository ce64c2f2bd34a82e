# SPDX-License-Identifier: Apache-2.0
"""Compaction of an upsert table on real processes (but for Spark: the epoch log is written by hand, so that what is
right is known at every epoch): replaced rows go while servers and the controller are killed, rows come all the time,
and every answer that is complete is that of its epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lanes import WRONG
from server_kit import Cluster, Kit
from versions_kit import UpsertLog
from versions_world import peers_only, schema_json, table_json

from cremant.model.offsets import Position
from cremant.wire.codec import decode, encode
from cremant.wire.messages import BaseRequest, GenerationReply, GenerationRequest, LeaseRequest

COMPACTION: dict[str, Any] = {
    "task": {
        "taskTypeConfigsMap": {
            "UpsertCompactionTask": {"bufferTimePeriod": "0d", "invalidRecordsThresholdPercent": "30"},
        }
    },
    "cremant": {"upsert": {"historyMs": 1_000}},
}
SQL = "SELECT count(*), coalesce(sum(driver), 0), coalesce(sum(ts), 0) FROM trips"
#: Of one epoch, per partition.
ROWS = 60


class World:
    """Two servers, a controller, a broker; a table of 60 keys in two partitions, and one thread that asks."""

    def __init__(self, root: Path) -> None:
        self.cluster = cluster = Cluster(root)
        self.http = httpx.Client(timeout=15, trust_env=False)
        cluster.servers += [cluster.add("server", f"server-{number}") for number in range(2)]
        self.broker = cluster.add("broker", "broker")
        cluster.log.create_topic("trips", 2)
        Kit.eventually(lambda: len([one for one in cluster.view().instances if one.live]) >= 3)
        self._post("/schemas", json=schema_json())
        self._post("/tables", json=table_json(2, peers_only()) | COMPACTION)
        incarnation = Kit.eventually(lambda: cluster.view().tables.get("trips")).record.incarnation
        self._begin_pipeline(incarnation)
        self.epochs = UpsertLog(cluster.log, incarnation=incarnation, partitions=2, keys=60)
        start = Position(log_offset=0, epoch=0, generation=0, next_offset=0)
        self.epochs.positions = [{0: start} for _ in range(2)]
        self.epochs.start()
        #: What was right as of each epoch; answers that were, and what was wrong with the first that was not.
        self.right: dict[int, list[int]] = {}
        self.complete, self.wrong = 0, ""
        self._ended = threading.Event()
        self._asking = threading.Thread(target=self._ask_forever, daemon=True)

    def _post(self, path: str, **body: Any) -> bytes:
        answer = self.http.post(f"{self.cluster.controller.url}{path}", **body)
        assert answer.status_code == 200, answer.text
        return answer.content

    def _begin_pipeline(self, incarnation: str) -> None:
        """The table has keys from its first epoch on: so a pipeline would say when it begins."""
        holder = "Pipeline_test"
        lease = LeaseRequest(holder=holder, table="trips", incarnation=incarnation)
        self._post("/internal/v1/pipeline/lease", content=encode(lease))
        asked = GenerationRequest(holder=holder, table="trips", incarnation=incarnation)
        granted = decode(self._post("/internal/v1/pipeline/generation", content=encode(asked)), GenerationReply)
        base = BaseRequest(
            table="trips", incarnation=incarnation, generation=granted.generation, base=1, checkpoint="c",
            first_epoch=1, keyed=True,
        )  # fmt: skip
        self._post("/internal/v1/pipeline/base", content=encode(base))

    def write(self, epochs: int, pause_s: float = 0.05) -> None:
        for _ in range(epochs):
            for partition in range(2):
                self.epochs.block(partition, ROWS)
            # Known before anybody can see it.
            closing, model = self.epochs.epoch + 1, self.epochs.model
            alive = model.at(self.epochs.ends).values()
            self.right[closing] = [len(alive), sum(row.key for row in alive), sum(row.value for row in alive)]
            self.epochs.mark()
            time.sleep(pause_s)

    def query(self, sql: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.post(f"{self.broker.url}/query/sql", json={"sql": sql}).json()
        return found

    def ask(self) -> int | None:
        """The epoch of a complete answer, which is right; None: it is not complete, and says so."""
        answer = self.query(SQL)
        if answer.get("exceptions") or answer.get("partialResult"):
            return None
        epoch, found = answer["epoch"], answer["resultTable"]["rows"][0]
        expected = self.right.get(epoch, [0, 0, 0])
        if [int(value) for value in found] != expected and not self.wrong:
            self.wrong = f"{WRONG}: epoch {epoch}: {found}, expected {expected}: {answer}"
        self.complete += 1
        return int(epoch)

    def start_asking(self) -> None:
        self._asking.start()

    def _ask_forever(self) -> None:
        while not self._ended.wait(0.02):
            try:
                self.ask()
            except httpx.HTTPError as error:
                self.wrong = self.wrong or f"the broker does not answer: {error}"

    def check(self) -> None:
        assert not self.wrong, self.wrong

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{self.cluster.controller.url}/tables/trips/upsert").json()
        return found

    def until(self, condition: Callable[[], Any], deadline_s: float = 120) -> None:
        until_s = time.monotonic() + deadline_s
        while not condition():
            self.check()
            assert time.monotonic() < until_s, self.state()
            time.sleep(0.1)

    def removed(self) -> int:
        try:
            return int(self.state()["compaction"]["rowsRemoved"])
        except (httpx.HTTPError, KeyError):  # a controller that starts
            return 0

    def is_settled(self) -> bool:
        """Nothing is under way, and both servers have let go of the same rows."""
        found, written = self.state(), sum(self.epochs.ends)
        servers = found["servers"].values()
        left = written - found["compaction"]["rowsRemoved"]
        return not found["compaction"]["pending"] and all(server["rows"] == left for server in servers)

    def close(self) -> None:
        self._ended.set()
        if self._asking.is_alive():
            self._asking.join(20)
        self.broker.close()
        self.cluster.close()
        self.http.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_replaced_rows_go_under_kills_and_answers_stay(world: World, phase: Callable[[str], None]) -> None:
    world.write(16)
    world.until(lambda: world.ask() == world.epochs.epoch)
    world.start_asking()
    world.until(lambda: world.removed() > 0)
    phase("rows go")
    one, other = world.cluster.servers
    for process in (one, world.cluster.controller, other):
        world.write(6)
        time.sleep(1)  # what is due begins
        process.kill()
        world.write(4)
        process.start()
        world.check()
    before = world.complete
    world.write(6)
    world.until(lambda: world.removed() > 0.5 * sum(world.epochs.ends))
    world.until(world.is_settled)
    world.until(lambda: world.complete > before + 20)
    found = world.state()
    phase(f"{found['compaction']['rowsRemoved']} of {sum(world.epochs.ends)} rows are gone, {world.complete} answers")

    left = sum(world.epochs.ends) - found["compaction"]["rowsRemoved"]
    assert world.query("SET skipUpsert = true; SELECT count(*) FROM trips")["resultTable"]["rows"] == [[left]]
    oldest = found["compaction"]["epoch"]
    at = world.query(f"SET asOfEpoch = {oldest}; {SQL}")
    assert [int(value) for value in at["resultTable"]["rows"][0]] == world.right[oldest], at
    below = world.query(f"SET asOfEpoch = {oldest - 1}; {SQL}")
    assert "epoch" in str(below["exceptions"]), below
    names = [segment.name for segment in world.cluster.view().tables["trips"].segments if segment.compacted_at]
    url = f"{world.cluster.controller.url}/segments/trips"
    told = {event["event"] for name in names for event in world.http.get(f"{url}/{name}/story").json()["events"]}
    assert {"segment is to be compacted", "segment was compacted", "segment compacted"} <= told
    world.check()
