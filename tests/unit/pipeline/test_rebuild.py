# SPDX-License-Identifier: Apache-2.0
"""The seed of the key coordinator's state: pages of the table, whole answers only, what expired."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.ingest.candidates import Candidates
from cremant.model.cluster import TableRecord
from cremant.model.errors import InvariantViolation, Unavailable
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.plan import SeedPlan, SeedShare, Wanted, initial_plan, is_initial, seed_plan, seed_shares
from cremant.pipeline.rebuild import Brokers, deletes, page_sql, read_page, without_expired
from cremant.pipeline.seeding import _with_retention

SHARE = SeedShare(1, 100, 200)
SEED = SeedPlan(epoch=7)


def record(*, nulls: bool = False, delete: str | None = None) -> TableRecord:
    fields = (
        FieldSpec(name="id", data_type=DataType.STRING, field_type=FieldType.DIMENSION),
        FieldSpec(name="at", data_type=DataType.TIMESTAMP, field_type=FieldType.DIMENSION),
        FieldSpec(name="gone", data_type=DataType.BOOLEAN, field_type=FieldType.DIMENSION),
    )
    config = TableConfig(
        name="t", time_column="at", replication=1, stream=StreamConfig(stream_type="embedded", topic="t"),
        flush=FlushConfig(), null_handling=nulls,
        upsert=UpsertConfig(comparison_columns=("at",), delete_column=delete),
    )  # fmt: skip
    schema = Schema(name="t", fields=fields, primary_key_columns=("id",))
    return TableRecord(config=config, table_schema=schema, incarnation="0" * 16)


def answer(ids: list[str | None], *, since: list[int | None] | None = None, epoch: int = 7, **more: object) -> bytes:
    count = len(ids)
    table = pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "at": pa.array(range(1_000, 1_000 + count), pa.int64()).cast(pa.timestamp("ms")),
            "gone": pa.array([number % 2 == 1 for number in range(count)]),
            "$offset": pa.array(range(100, 100 + count), pa.int64()),
            "$subRow": pa.array([0] * count, pa.int32()),
            "$validFrom": pa.array(since if since is not None else [3] * count, pa.int64()),
        }
    ).replace_schema_metadata({b"cremant.response": json.dumps({"epoch": epoch, **more}).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@contextmanager
def broker(reply: Callable[[str], tuple[str, bytes]]) -> Iterator[str]:
    """An HTTP server whose answer to a query is (content type, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["sql"]
            kind, body = reply(asked)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


ARROW = "application/vnd.apache.arrow.stream"


def test_a_page_asks_for_the_rows_in_force_tombstones_too() -> None:
    sql = page_sql(record(delete="gone"), SEED, SHARE)
    assert "SET asOfEpoch = 7; SET skipUpsertDelete = true;" in sql
    assert '"$partition" = 1 AND "$offset" >= 100 AND "$offset" < 200' in sql
    assert 'SELECT "id", "at", "gone", "$offset", "$subRow", "$validFrom" FROM "t"' in sql
    assert "SET skipUpsert = true;" in page_sql(record(), SeedPlan(epoch=7, all_rows=True), SHARE)


def test_rows_of_a_page_become_the_candidates_that_ingestion_made_of_them() -> None:
    """Same key bytes, same order, under the epoch in which they came into force."""
    made = record(delete="gone")
    upsert = made.config.upsert
    assert upsert is not None
    with broker(lambda sql: (ARROW, answer(["a", "b", "c"], since=[3, 5, 7]))) as url, Brokers([url]) as brokers:
        rows = read_page(brokers, made, SEED, SHARE)
    found = Candidates(made.table_schema, upsert)
    found.add(rows.drop_columns(["$validFrom"]), 1, rows.column("$validFrom").to_numpy())
    ingested = Candidates(made.table_schema, upsert)
    block = {
        "$offset": pa.array([100, 101, 102], pa.int64()), "$subRow": pa.array([0, 0, 0], pa.int32()),
        "id": pa.array(["a", "b", "c"]), "at": pa.array([1_000, 1_001, 1_002], pa.int64()),
        "gone": pa.array([False, True, False]),
    }  # fmt: skip
    ingested.add(pa.RecordBatch.from_pydict(block), 1, np.array([3, 5, 7]))
    assert found.finish() == ingested.finish()


def test_null_cells_are_told_from_defaults() -> None:
    with broker(lambda sql: (ARROW, answer(["a", None]))) as url, Brokers([url]) as brokers:
        rows = read_page(brokers, record(nulls=True), SEED, SHARE)
    assert rows.column("id").to_pylist() == ["a", "null"]
    assert rows.column("$isNull.id").to_pylist() == [False, True]


@pytest.mark.parametrize(
    "reply",
    [
        lambda sql: (ARROW, answer(["a"], partialResult=True)),
        lambda sql: (ARROW, answer(["a"], exceptions=[{"errorCode": 305}])),
        lambda sql: (ARROW, answer(["a"], epoch=8)),
        lambda sql: (ARROW, answer(["a"])[:200]),
        lambda sql: ("application/json", b'{"exceptions": [{"message": "no"}]}'),
    ],
    ids=["partial", "exceptions", "another epoch", "torn", "refused"],
)  # fmt: skip
def test_an_answer_that_is_not_whole_is_none(reply: Callable[[str], tuple[str, bytes]]) -> None:
    with broker(reply) as url, Brokers([url], deadline_ms=1) as brokers, pytest.raises(Unavailable, match="rebuilt"):
        read_page(brokers, record(), SEED, SHARE)


def test_another_broker_is_asked_where_one_does_not_answer() -> None:
    with broker(lambda sql: (ARROW, answer(["a"]))) as url, Brokers(["http://127.0.0.1:1", url]) as brokers:
        assert read_page(brokers, record(), SEED, SHARE).num_rows == 1


def test_a_row_in_force_says_since_when() -> None:
    for since in ([None, 3], [3, 8], [0, 3], [3, 2**63 - 1]):
        with (
            broker(lambda sql, since=since: (ARROW, answer(["a", "b"], since=since))) as url,  # type: ignore[misc]
            Brokers([url]) as brokers,
            pytest.raises(InvariantViolation, match="since when"),
        ):
            read_page(brokers, record(), SEED, SHARE)


def test_what_expired_is_left_out_and_deleted() -> None:
    seed = SeedPlan(epoch=7, expired_below=1_002.0, deleted_below=1_004.0)
    with broker(lambda sql: (ARROW, answer(["a", "b", "c", "d", "e", "f"]))) as url, Brokers([url]) as brokers:
        rows = read_page(brokers, record(delete="gone"), seed, SHARE)
    stays, expired = without_expired(rows, record(delete="gone"), seed)
    assert stays.column("id").to_pylist() == ["c", "e", "f"]
    assert expired.column("id").to_pylist() == ["a", "b", "d"], "d is a tombstone"
    updates = deletes(expired, 1)
    assert updates.offset.tolist() == [100, 101, 103]
    assert set(updates.partition.tolist()) == {1}


def test_bounds_of_keys_are_in_units_of_the_time_column() -> None:
    made = record(delete="gone")
    for written, below in (("TIMESTAMP", 86_400_000.0), ("1:SECONDS:EPOCH", 86_400.0), ("EPOCH|DAYS|1", 1.0)):
        at = FieldSpec(name="at", data_type=DataType.LONG, field_type=FieldType.DATE_TIME, format=written)
        schema = msgspec.structs.replace(made.table_schema, fields=(made.table_schema.fields[0], at))
        seed = _with_retention(SEED, msgspec.structs.replace(made, table_schema=schema), 86_400_000)
        assert (seed.expired_below, seed.deleted_below) == (below, below)


@pytest.mark.parametrize("written", ["TIMESTAMP", "1:MICROSECONDS:EPOCH", "1:SECONDS:EPOCH", "EPOCH|DAYS|1"])
def test_a_timestamp_is_in_ms_whatever_its_format_says_of_the_stream(written: str) -> None:
    """As where segments go by it: else all keys expire, or none while their segments go."""
    made = record()
    at = FieldSpec(name="at", data_type=DataType.TIMESTAMP, field_type=FieldType.DATE_TIME, format=written)
    schema = msgspec.structs.replace(made.table_schema, fields=(made.table_schema.fields[0], at))
    seed = _with_retention(SEED, msgspec.structs.replace(made, table_schema=schema), 86_400_000)
    assert seed.expired_below == 86_400_000


def test_times_that_a_double_cannot_hold_exactly_expire_too() -> None:
    rows = pa.RecordBatch.from_pydict({"at": pa.array([1_700_000_000_000_000_001, 1_800_000_000_000_000_001])})
    stays, expired = without_expired(rows, record(), SeedPlan(epoch=7, expired_below=1.75e18))
    assert (stays.num_rows, expired.num_rows) == (1, 1)


@pytest.mark.parametrize(
    "values", [["false", "TRUE", "null", "1", "no", ""], [0, 1, 7, 1, 0, 0], [0.0, 1.5, 2.0, 1.0, 0.0, -1.0]]
)
def test_tombstones_expire_whatever_type_says_deleted(values: list[object]) -> None:
    """As servers read the column when they hide rows."""
    rows = pa.RecordBatch.from_pydict({"at": pa.array([1_000] * 6, pa.int64()), "gone": pa.array(values)})
    _, expired = without_expired(rows, record(delete="gone"), SeedPlan(epoch=7, deleted_below=1_004.0))
    assert expired.column("gone").to_pylist() == [values[1], values[3]]


@given(
    starts=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), min_size=1, max_size=5),
    tasks=st.integers(1, 4), page=st.integers(1, 40),
)  # fmt: skip
def test_pages_cover_every_offset_once(starts: list[tuple[int, int]], tasks: int, page: int) -> None:
    firsts = [first for first, _ in starts]
    ends = [first + rows for first, rows in starts]
    groups = seed_shares(firsts, ends, tasks, page)
    assert 1 <= len(groups) <= tasks
    seen = sorted((s.partition, offset) for group in groups for s in group for offset in range(s.first, s.next))
    assert seen == [(p, offset) for p, (first, rows) in enumerate(starts) for offset in range(first, first + rows)]


def test_a_seed_is_planned_once_and_takes_nothing_of_the_stream() -> None:
    before = initial_plan("abc", (5, 9))
    seeded = seed_plan(before, Wanted(config_version=3, starts=(5, 9), max_rows=10), SEED)
    assert is_initial(before)
    assert not is_initial(seeded)
    assert (seeded.starts, seeded.ends, seeded.seed, seeded.config_version) == ((5, 9), (5, 9), SEED, 3)
    assert type(seeded).from_offset(json.loads(json.dumps(seeded.to_offset()))) == seeded
