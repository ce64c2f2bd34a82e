# SPDX-License-Identifier: Apache-2.0
"""Sketches against their definitions: hashes and registers as stream-lib computes them value by value, theta and CPC as
Apache DataSketches makes them, quantiles within the error they state - however the rows lie on servers and in groups.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from typing import Any

import datasketches
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.exec.agg_hash import murmur2_32, murmur3_128
from cremant.exec.engine import Engine
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.segment.layout import scan_schema
from cremant.segment.scan import Piece
from cremant.sql.binder import TableInfo
from cremant.sql.planner import Planner

M = 0x5BD1E995
MASK = 0xFFFFFFFF


def murmur2_of_bytes(data: bytes) -> int:
    """stream-lib's hash of bytes, one value at a time."""
    h = (MASK ^ len(data)) & MASK
    whole = len(data) // 4
    for index in range(whole):
        k = int.from_bytes(data[4 * index : 4 * index + 4], "little") * M & MASK
        k = (k ^ k >> 24) * M & MASK
        h = (h * M & MASK) ^ k
    rest = [byte - 256 if byte > 127 else byte for byte in data[4 * whole :]]
    if rest:
        for distance, shift in ((3, 16), (2, 8), (1, 0)):
            if len(rest) >= distance:
                h ^= (rest[-distance] << shift) & MASK
        h = h * M & MASK
    h = (h ^ h >> 13) * M & MASK
    return h ^ h >> 15


def murmur2_of_long(value: int) -> int:
    def half(word: int) -> int:
        k = word * M & MASK
        return (k ^ k >> 24) * M & MASK

    unsigned = value % 2**64
    h = (half(unsigned & MASK) * M & MASK) ^ half(unsigned >> 32)
    h = (h ^ h >> 13) * M & MASK
    return h ^ h >> 15


def registers_of(hashes: list[int], log2m: int) -> list[int]:
    registers = [0] * (1 << log2m)
    for value in hashes:
        rest = (value << log2m & MASK) | ((1 << (log2m - 1)) + 1)
        place = value >> (32 - log2m)
        registers[place] = max(registers[place], 32 - rest.bit_length() + 1)
    return registers


def cardinality_of(registers: list[int]) -> int:
    m = len(registers)
    alpha = {16: 0.673, 32: 0.697, 64: 0.709}.get(m, 0.7213 / (1 + 1.079 / m))
    estimate = alpha * m * m / math.fsum(2.0**-value for value in registers)
    zeros = registers.count(0)
    if estimate <= 2.5 * m and zeros:
        estimate = m * math.log(m / zeros)
    return math.floor(estimate + 0.5)


@given(st.lists(st.text(max_size=40), max_size=30))
def test_texts_hash_as_one_by_one(texts: list[str]) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    array = pa.array(texts, pa.string())
    assert murmur2_32(array).tolist() == [murmur2_of_bytes(text.encode()) for text in texts]
    assert murmur2_32(array.cast(pa.string_view())).tolist() == murmur2_32(array).tolist()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_numbers_hash_as_one_by_one(numbers: list[int]) -> None:
    assert murmur2_32(pa.array(numbers, pa.int64())).tolist() == [murmur2_of_long(number) for number in numbers]


def test_floats_hash_by_their_bits() -> None:
    doubles, floats = [0.0, -1.5, 1e300, math.inf], [0.0, -1.5, 3.25]
    bits = [struct.unpack("<q", struct.pack("<d", value))[0] for value in doubles]
    assert murmur2_32(pa.array(doubles)).tolist() == [murmur2_of_long(value) for value in bits]
    bits = [struct.unpack("<i", struct.pack("<f", value))[0] for value in floats]
    assert murmur2_32(pa.array(floats, pa.float32())).tolist() == [murmur2_of_long(value) for value in bits]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -5, 2**62, 0, -(2**63)], pa.int64()),
        ([1.5, -0.0, 0.0, math.nan, 1e300, -math.inf], pa.float64()),
        (["a", "ab", "é" * 9, "x" * 15, "y" * 16, "z" * 17, "q" * 33], pa.string()),
    ],
)
def test_hashes_of_datasketches_are_its_own(values: list[Any], kind: pa.DataType) -> None:
    hashes = (murmur3_128(pa.array(values, kind))[0] >> np.uint64(1)).tolist()
    for value, found in zip(values, hashes, strict=True):
        sketch = datasketches.update_theta_sketch(12)
        sketch.update(value)
        assert list(sketch.compact()) == [found]


SCHEMA = Schema(
    name="events",
    fields=(
        FieldSpec(name="g", data_type=DataType.INT, field_type=FieldType.DIMENSION),
        FieldSpec(name="id", data_type=DataType.LONG, field_type=FieldType.DIMENSION),
        FieldSpec(name="word", data_type=DataType.STRING, field_type=FieldType.DIMENSION),
        FieldSpec(name="x", data_type=DataType.DOUBLE, field_type=FieldType.METRIC),
        FieldSpec(name="ids", data_type=DataType.LONG, field_type=FieldType.DIMENSION, single_value=False),
    ),
)
SCAN = scan_schema(SCHEMA)
ROWS = 60_000


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(threads=2, memory_bytes=512 * 1024 * 1024)
    yield made
    made.close()


def batch(seed: int, rows: int) -> pa.RecordBatch:
    dice = np.random.default_rng(seed)
    ids = dice.integers(0, 40_000, rows)
    columns = {
        "$offset": np.arange(rows), "$subRow": np.zeros(rows, np.int32), "$ingestionTime": np.zeros(rows, np.int64),
        "g": dice.integers(0, 5, rows).astype(np.int32), "id": ids, "x": dice.normal(100, 15, rows),
        "word": pa.array([f"w{number}" for number in ids.tolist()]).cast(pa.string_view()),
        "ids": pa.ListArray.from_arrays(np.arange(0, 2 * rows + 1, 2, dtype=np.int32), pa.array(np.repeat(ids, 2))),
    }  # fmt: skip
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCAN]
    return pa.RecordBatch.from_arrays(arrays, schema=SCAN)


@pytest.fixture(scope="module")
def parts() -> list[pa.RecordBatch]:
    """What servers hold; one has nothing."""
    return [batch(1, ROWS), batch(2, 0), batch(3, ROWS // 2)]


def ask(engine: Engine, sql: str, parts: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    plan = Planner().plan(sql, "", lambda name: TableInfo("events", SCHEMA), 0)
    deadline_s = time.monotonic() + 60
    partials = []
    for index, part in enumerate(parts):
        pieces = [Piece(f"p{index}", 0, "s", (part,), part.num_rows, None, True)] if part.num_rows else []
        partials.append(engine.run(plan.server_sql, pieces, plan.columns, SCAN, deadline_s=deadline_s).table)
    assert plan.reduce_sql is not None
    table = engine.reduce(plan.reduce_sql, partials, deadline_s=deadline_s)
    return [tuple(row.values()) for row in table.to_pylist()]


def column(parts: list[pa.RecordBatch], name: str, group: int | None = None) -> list[Any]:
    values: list[Any] = []
    for part in parts:
        kept = part.column("g").to_pylist() if group is not None else [None] * part.num_rows
        values += [value for value, key in zip(part.column(name).to_pylist(), kept, strict=True) if key == group]
    return values


@pytest.mark.parametrize("log2m", [4, 8, 12])
@pytest.mark.parametrize(("name", "mv"), [("id", ""), ("word", ""), ("ids", "mv")])
def test_a_distinct_count_is_that_of_the_registers(
    engine: Engine, parts: list[pa.RecordBatch], log2m: int, name: str, mv: str
) -> None:
    one = murmur2_of_bytes if name == "word" else murmur2_of_long
    source = "id" if name == "ids" else name

    def expected(group: int | None) -> int:
        values = set(column(parts, source, group))
        hashes = [one(value.encode() if isinstance(value, str) else value) for value in values]
        return cardinality_of(registers_of(hashes, log2m))

    call = f"distinctcounthll{mv}({name}, {log2m})"
    assert ask(engine, f"select {call} from events", parts) == [(expected(None),)]
    assert ask(engine, f"select {call}, distinctcount(g) from events", parts) == [(expected(None), 5)]
    grouped = ask(engine, f"select g, {call} from events group by g order by g", parts)
    assert grouped == [(group, expected(group)) for group in range(5)]


def test_raw_bytes_are_stream_libs(engine: Engine, parts: list[pa.RecordBatch]) -> None:
    [(text,)] = ask(engine, "select distinctcountrawhll(id) from events", parts)
    log2m, size, *words = struct.unpack(">ii43I", bytes.fromhex(text))
    found = [words[index // 6] >> 5 * (index % 6) & 31 for index in range(256)]
    assert (log2m, size) == (8, 43 * 4)
    assert found == registers_of([murmur2_of_long(value) for value in set(column(parts, "id"))], 8)


def test_the_larger_hyperloglog_is_within_its_error(engine: Engine, parts: list[pa.RecordBatch]) -> None:
    exact = len(set(column(parts, "id")))
    for call in ("distinctcounthllplus(id)", "distinctcounthllplus(word)", "distinctcountull(id)"):
        [(found,)] = ask(engine, f"select {call} from events", parts)
        assert abs(found / exact - 1) < 4 * 1.04 / 2**7, call
    few = [batch(9, 40)]
    assert ask(engine, "select distinctcounthllplus(id) from events", few) == [(len(set(column(few, "id"))),)]


@pytest.mark.parametrize("k", [64, 4096])
def test_a_theta_sketch_is_that_of_datasketches(engine: Engine, parts: list[pa.RecordBatch], k: int) -> None:
    query = f"select distinctcountrawthetasketch(id, 'nominalEntries={k}') from events"
    union = datasketches.theta_union(int(math.log2(k)))
    for part in parts:
        sketch = datasketches.update_theta_sketch(int(math.log2(k)))
        for value in set(part.column("id").to_pylist()):
            sketch.update(value)
        union.update(sketch)
    expected = union.get_result()
    [(text,)] = ask(engine, query, parts)
    found = datasketches.compact_theta_sketch.deserialize(bytes.fromhex(text))
    assert found.num_retained == k
    assert abs(found.get_estimate() / expected.get_estimate() - 1) < 8 / math.sqrt(k)
    [(grouped,)] = ask(engine, query.replace("from events", "from events group by g having g = 2"), parts)
    found = datasketches.compact_theta_sketch.deserialize(bytes.fromhex(grouped))
    exact = len(set(column(parts, "id", 2)))
    assert found.get_lower_bound(3) <= exact <= found.get_upper_bound(3)


def test_theta_and_cpc_counts_are_within_their_error_in_each_group(engine: Engine, parts: list[pa.RecordBatch]) -> None:
    calls = "distinctcountthetasketch(word), distinctcountcpcsketch(word), distinctcountcpcsketch(id)"
    for group, *found in ask(engine, f"select g, {calls} from events group by g order by g", parts):
        exact = len(set(column(parts, "id", group)))
        assert all(abs(value / exact - 1) < 0.08 for value in found), (group, found, exact)
    assert len(set(ask(engine, "select distinctcountcpcsketch(id) from events", parts))) == 1


@settings(deadline=None, max_examples=15)
@given(p=st.sampled_from([0, 1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100]))
def test_quantiles_are_within_their_rank_error(engine: Engine, parts: list[pa.RecordBatch], p: float) -> None:
    calls = f"percentiletdigest(x, {p}), percentilekll(x, {p}), percentiletdigest(x, {p}, 400)"
    answers = [(None, *ask(engine, f"select {calls} from events", parts)[0])]
    answers += ask(engine, f"select g, {calls} from events group by g order by g", parts)
    for group, *found in answers:
        values = np.sort(column(parts, "x", group))
        for value, error in zip(found, (0.012, 0.03, 0.004), strict=True):
            low, high = (np.searchsorted(values, value, side=side) / len(values) for side in ("left", "right"))
            assert low - error <= p / 100 <= high + error, (group, p, value)


def test_estimated_percentiles_of_few_values_are_exact(engine: Engine) -> None:
    few = [batch(4, 30), batch(5, 21)]
    ordered = sorted(column(few, "id"))
    for p in (0, 10, 50, 80.01, 99, 100):
        expected = ordered[-1] if p == 100 else ordered[int(len(ordered) * p / 100)]
        assert ask(engine, f"select percentileest(id, {p}) from events", few) == [(expected,)], p
