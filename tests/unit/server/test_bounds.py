# SPDX-License-Identifier: Apache-2.0
"""Queries that want too much, at once and for real: they fail alone and say why, while lookups go on being answered."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cremant.exec.admission import SHORT_ROWS
from cremant.exec.engine import Engine
from cremant.model.errors import QueryError
from cremant.model.limits import QUERIES_RUNNING_MAX
from cremant.model.query_codes import QueryCode
from cremant.segment.layout import stored_columns
from cremant.segment.rows import take_column
from cremant.segment.tail import SpillQuota
from cremant.server.catching_up import EndedBy
from cremant.server.partition import Partition, PartitionId
from cremant.server.query import QueryService, pack_rows
from cremant.server.table import HostedTable
from cremant.wire.codec import decode
from cremant.wire.messages import PruneTerm, ServerAnswer, ServerQuery, TailRequest

INCARNATION = "00000000000000aa"
ROWS = 2 * SHORT_ROWS
MEMORY_BYTES = 128 * 1024 * 1024

#: Each would take minutes or gigabytes if it were let.
RUNAWAYS = {
    "groups": "SELECT fare * 7 + CAST(random() * 1000000 AS BIGINT) AS k, array_agg(city || CAST(ts AS VARCHAR)) AS l "
    "FROM t GROUP BY 1",
    "sort": "SELECT city, fare, ts, random() AS r FROM t ORDER BY r, fare DESC",
    "regex": "SELECT count(*) AS n FROM t "
    "WHERE regexp_like(repeat(city || CAST(fare AS VARCHAR), 40), '(.*a.*b|c)*x{40}')",
    "texts": "SELECT count(DISTINCT repeat(city || CAST(random() AS VARCHAR), 20)) AS n FROM t",
    "window": "SELECT sum(fare) OVER (PARTITION BY city ORDER BY ts) AS s, sum(ts) OVER (ORDER BY fare) AS q FROM t",
}  # fmt: skip
POINT = "SELECT city, fare FROM t WHERE fare = 777"
POINT_TERMS = (PruneTerm(column="fare", op="=", values=(777,)),)


@pytest.fixture(scope="module")
def tables(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, HostedTable]]:
    table = HostedTable(kit.table_record())
    directory = tmp_path_factory.mktemp("tail")
    partition = Partition(PartitionId("trips", INCARNATION, 0), kit.START, directory, SpillQuota())
    for first in range(0, ROWS, 250_000):
        partition.tail.append(_rows(kit, first, 250_000), first + 250_000)
    partition.catching_up.ended_by = EndedBy.END
    table.partitions[0] = partition
    yield {"trips": table}
    partition.close()


def _rows(kit: Any, first: int, count: int) -> pa.RecordBatch:
    offsets = np.arange(first, first + count)
    schema = stored_columns(kit.SCHEMA)
    columns = {
        "$offset": pa.array(offsets), "$subRow": pa.array(np.zeros(count, np.int32)),
        "$ingestionTime": pa.array(offsets), "fare": pa.array(offsets), "ts": pa.array(offsets * 3),
        "city": pa.array(np.array(["Berlin", "Ulm", "Köln"], dtype=object)[offsets % 3]),
    }  # fmt: skip
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=MEMORY_BYTES)
    yield made
    made.close()


@pytest.fixture
def service(tables: Any, engine: Engine) -> Iterator[QueryService]:
    made = QueryService(tables, engine)
    yield made
    made.close()


def query(name: str, sql: str, budget_ms: int = 60_000, **changes: Any) -> ServerQuery:
    known: dict[str, Any] = {
        "request_id": name, "table": "trips", "incarnation": INCARNATION, "sql": sql, "columns": ("city", "fare", "ts"),
        "segments": (), "tails": (TailRequest(partition=0, from_offset=0),), "budget_ms": budget_ms,
    }  # fmt: skip
    return ServerQuery(**(known | changes))


def header(body: bytes) -> ServerAnswer:
    return decode(body[4 : 4 + int.from_bytes(body[:4], "big")], ServerAnswer)


async def points(service: QueryService, over: asyncio.Event) -> list[ServerAnswer]:
    answers: list[ServerAnswer] = []
    while not over.is_set():
        name = f"point-{len(answers)}"
        answers.append(header(await service.answer(query(name, POINT, 20_000, prune=POINT_TERMS))))
    return answers


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident size while it is watched."""

    def __enter__(self) -> Peak:
        self.bytes = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("name", RUNAWAYS)
def test_a_runaway_query_fails_alone_with_its_code_while_lookups_are_answered(service: QueryService, name: str) -> None:
    async def run() -> tuple[ServerAnswer, list[ServerAnswer]]:
        over = asyncio.Event()
        runaway = asyncio.create_task(service.answer(query("runaway", RUNAWAYS[name], 2_000)))
        runaway.add_done_callback(lambda _: over.set())
        body, answered = await asyncio.gather(runaway, points(service, over))
        return header(body), answered

    before = resident_bytes()
    with Peak() as peak:
        began_s = time.monotonic()
        runaway, answered = asyncio.run(run())
        elapsed_s = time.monotonic() - began_s
    assert runaway.error_code in (0, QueryCode.EXECUTION_TIMEOUT, QueryCode.SERVER_RESOURCE_LIMIT)
    assert elapsed_s < 20
    assert answered
    assert [answer.error_code for answer in answered] == [0] * len(answered)
    assert {answer.docs_scanned for answer in answered} == {1}
    # The pool, answers being packed, and what allocators keep.
    assert peak.bytes - before < 4 * MEMORY_BYTES


def test_an_answer_that_is_too_large_is_refused_before_it_is_packed(
    service: QueryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed(table: pa.Table) -> pa.Table:
        assert table.num_rows == 10
        return table

    monkeypatch.setattr("cremant.server.query.QUERY_ANSWER_BYTES_MAX", 8 * 1024 * 1024)
    monkeypatch.setattr("cremant.server.query.compacted", packed)
    refused = header(asyncio.run(service.answer(query("wide", "SELECT city FROM t LIMIT 500000"))))
    assert refused.error_code == QueryCode.SERVER_RESOURCE_LIMIT
    assert re.search(
        r"500000 rows of 103333\d\d bytes, an answer has at most 8388608 \(lower LIMIT", refused.error or ""
    )
    answered = header(asyncio.run(service.answer(query("few", "SELECT city FROM t LIMIT 10"))))
    assert answered.error_code == 0


def test_wide_rows_are_measured_by_what_they_would_be_not_by_what_they_point_at() -> None:
    text = pa.array(["x" * 1024 * 1024]).cast(pa.string_view())
    rows = pa.table([take_column(text, np.zeros(1_024, np.int64))], ["text"])
    before = resident_bytes()
    with Peak() as peak, pytest.raises(QueryError, match="1024 rows of 1073758208 bytes") as raised:
        pack_rows(rows)
    assert raised.value.code == QueryCode.SERVER_RESOURCE_LIMIT
    assert peak.bytes - before < 256 * 1024 * 1024
    assert pa.ipc.open_stream(pack_rows(rows.slice(0, 3))).read_all() == rows.slice(0, 3)


def test_a_cancel_ends_a_running_query_and_frees_its_slot(service: QueryService) -> None:
    async def run() -> list[ServerAnswer]:
        tasks = [
            asyncio.create_task(service.answer(query(f"sort-{number}", RUNAWAYS["regex"])))
            for number in range(QUERIES_RUNNING_MAX)
        ]
        await asyncio.sleep(0.5)
        for number in range(QUERIES_RUNNING_MAX):
            assert service.cancel(f"sort-{number}")
        answers = [header(await task) for task in tasks]
        # All slots are free again, or this would wait for ever.
        answers.append(header(await service.answer(query("count", "SELECT count(*) AS n FROM t"))))
        return answers

    *cancelled, counted = asyncio.run(run())
    assert {answer.error_code for answer in cancelled} <= {0, QueryCode.QUERY_CANCELLED}
    assert QueryCode.QUERY_CANCELLED in {answer.error_code for answer in cancelled}
    assert counted.error_code == 0
    assert not service.cancel("sort-0")


def test_a_query_that_waits_for_its_turn_can_be_cancelled(service: QueryService) -> None:
    async def run() -> tuple[ServerAnswer, list[ServerAnswer]]:
        running = [
            asyncio.create_task(service.answer(query(f"long-{number}", RUNAWAYS["texts"], 30_000)))
            for number in range(QUERIES_RUNNING_MAX)
        ]
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(service.answer(query("waiting", "SELECT count(*) AS n FROM t")))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert service.cancel("waiting")
        answer = header(await waiting)
        for number in range(QUERIES_RUNNING_MAX):
            service.cancel(f"long-{number}")
        return answer, [header(await task) for task in running]

    answer, _ = asyncio.run(run())
    assert answer.error_code == QueryCode.QUERY_CANCELLED


def test_lookups_do_not_wait_for_as_many_scans_as_there_are_slots(service: QueryService) -> None:
    async def run() -> tuple[bool, ServerAnswer, list[ServerAnswer]]:
        scans = [
            asyncio.create_task(service.answer(query(f"scan-{number}", RUNAWAYS["regex"], 30_000)))
            for number in range(QUERIES_RUNNING_MAX + 3)
        ]
        await asyncio.sleep(0.3)
        point = header(await service.answer(query("point", POINT, prune=POINT_TERMS)))
        waited = any(not task.done() for task in scans)
        for number in range(QUERIES_RUNNING_MAX + 3):
            service.cancel(f"scan-{number}")
        return waited, point, [header(await task) for task in scans]

    scans_under_way, point, _ = asyncio.run(run())
    assert point.error_code == 0
    assert scans_under_way


def test_an_answer_comes_in_time_even_if_a_thread_cannot_be_interrupted(
    service: QueryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a function written in Python that does not return."""
    leave = threading.Event()
    monkeypatch.setattr(service, "_prepare", lambda query, stop: leave.wait(30))
    answer = header(asyncio.run(service.answer(query("stuck", "SELECT 1 FROM t", 200))))
    leave.set()
    assert answer.error_code == QueryCode.EXECUTION_TIMEOUT
