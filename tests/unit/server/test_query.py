# SPDX-License-Identifier: Apache-2.0
"""The query endpoint's service: real engine, real tail; what it counts, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cremant.exec.engine import Engine
from cremant.log.memory import MemoryLog
from cremant.model.query_codes import QueryCode
from cremant.segment.tail import SpillQuota
from cremant.server.partition import Partition, PartitionId
from cremant.server.query import QueryService
from cremant.server.table import HostedTable
from cremant.wire.codec import decode
from cremant.wire.messages import PruneTerm, ServerAnswer, ServerQuery, TailRequest

INCARNATION = "00000000000000aa"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=256 * 1024 * 1024)
    yield made
    made.close()


@pytest.fixture
def tables(kit: Any, tmp_path: Path) -> Iterator[dict[str, HostedTable]]:
    log = MemoryLog(lambda: int(time.time() * 1000))
    epochs = kit.EpochLog(log).create()
    epochs.write(20_000)
    epochs.write(20_000)
    table = HostedTable(kit.table_record())
    partition = Partition(PartitionId("trips", INCARNATION, 0), kit.START, tmp_path / "tail", SpillQuota())
    while partition.turn(log, 1):
        pass
    table.partitions[0] = partition
    table.open[0] = kit.open_segment_metadata(0, 0, kit.START, ("me",))
    yield {"trips": table}
    partition.close()


def query(sql: str, **changes: Any) -> ServerQuery:
    known: dict[str, Any] = {
        "request_id": "q", "table": "trips", "incarnation": INCARNATION, "sql": sql, "columns": ("city", "fare"),
        "segments": (), "tails": (TailRequest(partition=0, from_offset=0),), "budget_ms": 10_000,
    }  # fmt: skip
    return ServerQuery(**(known | changes))


def ask(service: QueryService, *queries: ServerQuery) -> list[tuple[ServerAnswer, pa.Table | None]]:
    async def all_at_once() -> list[bytes]:
        return await asyncio.gather(*(service.answer(one) for one in queries))

    answers = []
    for body in asyncio.run(all_at_once()):
        length = int.from_bytes(body[:4], "big")
        header = decode(body[4 : 4 + length], ServerAnswer)
        rows = body[4 + length :]
        answers.append((header, pa.ipc.open_stream(rows).read_all() if rows else None))
    return answers


def test_an_answer_brings_rows_watermarks_and_pinots_counters(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    [(header, rows)] = ask(
        service, query("SELECT city, sum(fare) s FROM t WHERE fare < 10 GROUP BY city ORDER BY city")
    )
    assert rows is not None
    assert rows.to_pylist()[0] == {"city": "Berlin", "s": 12}
    assert header.docs_total == 40_000
    assert header.docs_scanned == 10
    assert header.segments_queried == header.segments_processed == header.segments_matched == 1
    [partition] = header.partitions
    assert (partition.covered.first, partition.covered.next) == (0, 40_000)
    assert partition.watermark.epoch == 2
    service.close()


def test_pruned_rows_count_as_documents_but_are_not_scanned(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    term = PruneTerm(column="fare", op=">=", values=(30_000,))
    [(header, rows)] = ask(service, query("SELECT count(*) c FROM t WHERE fare >= 30000", prune=(term,)))
    assert rows is not None
    assert rows["c"].to_pylist() == [10_000]
    assert header.docs_total == 40_000
    assert header.entries_scanned_in_filter == 20_000
    nothing = PruneTerm(column="fare", op="<", values=(0,))
    [(header, rows)] = ask(service, query("SELECT count(*) c FROM t WHERE fare < 0", prune=(nothing,)))
    assert rows is not None
    assert rows["c"].to_pylist() == [0]
    assert (header.segments_pruned, header.segments_processed, header.docs_total) == (1, 0, 40_000)
    assert not header.partitions[0].processed
    service.close()


def test_another_incarnation_is_refused_and_everything_named_as_missing(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    [(header, rows)] = ask(service, query("SELECT 1 FROM t", incarnation="0" * 16, segments=("s",)))
    assert rows is None
    assert header.error_code == QueryCode.SERVER_TABLE_MISSING
    assert header.missing_segments == ("s",)
    assert header.behind_partitions == (0,)
    service.close()


def test_a_query_that_cannot_run_fails_alone_with_pinots_code(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    good, bad = ask(service, query("SELECT count(*) c FROM t"), query("SELECT nosuch FROM t"))
    assert good[0].error_code == 0
    assert bad[0].error_code == QueryCode.QUERY_EXECUTION
    assert bad[1] is None
    service.close()


def test_a_slow_query_ends_at_its_deadline(tables: Any, engine: Engine) -> None:
    service = QueryService(tables, engine)
    began_s = time.monotonic()
    sql = "SELECT count(*) c FROM t a, t b, t c WHERE a.fare + b.fare * c.fare > 7"
    [(header, _)] = ask(service, query(sql, budget_ms=300))
    assert header.error_code in (QueryCode.EXECUTION_TIMEOUT, QueryCode.SERVER_RESOURCE_LIMIT)
    assert time.monotonic() - began_s < 5
    service.close()


def test_past_the_queue_a_query_is_refused_at_once(
    tables: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.server.query.QUERIES_WAITING_MAX", 2)
    monkeypatch.setattr("cremant.server.query.QUERIES_RUNNING_MAX", 1)
    service = QueryService(tables, engine)
    answers = ask(service, *[query("SELECT city, count(*) c FROM t GROUP BY city") for _ in range(10)])
    codes = [header.error_code for header, _ in answers]
    assert set(codes) <= {0, QueryCode.SERVER_OUT_OF_CAPACITY}
    assert codes.count(0) >= 2
    assert QueryCode.SERVER_OUT_OF_CAPACITY in codes
    service.close()
