# SPDX-License-Identifier: Apache-2.0
"""What do keys cost? Upsert tables whose stream is not keyed: how fast versions come in, how old the newest visible one
is, what validity costs a query, what a key and a row cost in bytes, how long a server needs to come back.

Parts, each with a cluster of its own (`--only PART`; `--rows`, `--keys` for other sizes):

    preloaded  a topic with five versions per key, from the creation of the table until the right answer
    freshness  as the benchmark of that name, versions of 100,000 keys at 10,000/s
    query      shapes over a table of which a tenth of the rows is superseded, and over an append table of the same
               topic, in turns; the ratio of the medians
    restart    kill -9 of the only server until every shape is answered again; its epochs are written without Spark
    keys       the cost of a version as the table has more keys
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Self

import httpx
import numpy as np

from bench import freshness
from bench.cluster import ClusterError, Rest
from bench.context import Context, Driven, cpu_seconds, table_config
from bench.dataset import BATCH, SCHEMA, rows_of
from bench.keyed import KeyedLog
from bench.query import SHAPES

PARTITIONS = 4
#: Of the table whose server is restarted.
SEGMENTS, EPOCHS = 20, 100
DEADLINE_S = 1_200.0
#: Asking takes cores from what is measured.
ASK_EVERY_S = 0.25
TELL_EVERY_S = 20.0
UPSERT = {"upsertConfig": {"mode": "FULL", "comparisonColumns": ["ts"]}}
Figures = dict[str, Any]


class Feed:
    """A topic of rows whose `id`s the caller chooses; batches go to partitions at random, so a key is in any of them.
    The greatest `ts` (the last row) of a key is in force."""

    def __init__(self, driven: Driven) -> None:
        self.topic = f"upsert-{time.time_ns() // 1_000_000}"
        self.rows = 0
        self._stream = driven.stream
        self._stream.create(self.topic, PARTITIONS)
        self._dice = np.random.default_rng(3)
        #: By id the number of its last row, -1 without any.
        self._last = np.zeros(0, dtype=np.int64)

    def made(self, ids: np.ndarray) -> tuple[int, list[bytes]]:
        """A batch, and the partition it is for."""
        more = int(ids.max()) + 1 - len(self._last)
        if more > 0:
            self._last = np.append(self._last, np.full(max(more, len(self._last)), -1))
        self._last[ids] = np.arange(self.rows, self.rows + len(ids))  # of equal ids the last one stays
        values = rows_of(self.rows, len(ids), dice=self._dice, ids=ids.tolist())
        self.rows += len(ids)
        return int(self._dice.integers(0, PARTITIONS)), values

    def append(self, batches: Iterable[tuple[int, list[bytes]]]) -> None:
        for partition, values in batches:
            self._stream.append(self.topic, partition, values)
        self._stream.flush()

    def fill(self, context: Context, chunks: Iterable[np.ndarray]) -> Self:
        told = time.monotonic()
        for ids in chunks:
            partition, values = self.made(ids)
            self._stream.append(self.topic, partition, values)
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                context.show(f"{self.rows:,} rows in the topic")
        self._stream.flush()
        return self

    @property
    def keys(self) -> int:
        return int((self._last >= 0).sum())

    @property
    def answer(self) -> list[list[Any]]:
        """COUNT(*) and SUM(quantity) of the rows in force."""
        live = self._last[self._last >= 0]
        return [[len(live), int((live * 31 % 100).sum())]]


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    chosen = [context.only] if context.only else list(PARTS)
    metrics: dict[str, Any] = {}
    for part in chosen:
        if part not in PARTS:
            raise ClusterError(f"upsert has no part {part!r}; there are {', '.join(PARTS)}")
        context.show(f"part {part}")
        figures = PARTS[part](context)
        for name, value in figures.items():
            context.show(f"{name} = {value:,.3f}" if isinstance(value, float) else f"{name} = {value:,}")
        metrics |= figures
    return {"partitions": PARTITIONS, "parts": chosen}, metrics


# --- rows ---


def versions_of(rows: int, keys: int) -> Iterator[np.ndarray]:
    """Any key each time."""
    dice = np.random.default_rng(5)
    for first in range(0, rows, BATCH):
        yield dice.integers(0, keys, min(BATCH, rows - first))


def mostly_in_force(rows: int) -> Iterator[np.ndarray]:
    """Nine tenths new keys, a tenth versions of them, mixed."""
    dice = np.random.default_rng(5)
    keys = rows * 9 // 10
    again = np.zeros(rows, dtype=bool)
    again[dice.choice(np.arange(BATCH, rows), rows - keys, replace=False)] = True
    made = np.cumsum(~again)
    ids = np.where(again, (dice.random(rows) * made).astype(np.int64), made - 1)
    yield from (ids[first : first + BATCH] for first in range(0, rows, BATCH))


def create(context: Context, driven: Driven, table: str, loaded: Feed, *, upsert: bool, flush_rows: int) -> None:
    schema = {**SCHEMA, "schemaName": table, **({"primaryKeyColumns": ["id"]} if upsert else {})}
    config = table_config(table, driven.stream.properties(loaded.topic), flush_rows=flush_rows)
    context.create_table(driven, schema, config | (UPSERT if upsert else {}))


def wait_for(context: Context, rest: Rest, table: str, expected: list[list[Any]]) -> None:
    """Until the table is right."""
    started = told = time.monotonic()
    last: object = None
    while last != expected:
        now = time.monotonic()
        if now - started > DEADLINE_S:
            raise ClusterError(f"{table}: expected {expected} within {DEADLINE_S:g} s, last {last!r}")
        if now - told > TELL_EVERY_S:
            told = now
            context.show(f"{table}: {last}, waiting for {expected}")
        time.sleep(ASK_EVERY_S)
        try:
            last = rest.rows(f"SELECT COUNT(*), SUM(quantity) FROM {table}")
        except (httpx.HTTPError, ClusterError) as error:
            last = error


# --- parts ---


def preloaded(context: Context) -> Figures:
    rows, keys = _sized(context, quick=(1_000_000, 200_000), full=(5_000_000, 1_000_000))
    with context.cluster() as driven:
        context.show(f"filling the topic with {rows:,} versions of {keys:,} keys")
        loaded = Feed(driven).fill(context, versions_of(rows, keys))
        context.show("creating the table")
        cpu_before = cpu_seconds(driven.local) if driven.local else 0.0
        started = time.monotonic()
        create(context, driven, "bench", loaded, upsert=True, flush_rows=1_000_000)
        first, first_s = _first_rows(driven.rest, "bench")
        wait_for(context, driven.rest, "bench", loaded.answer)
        took = time.monotonic() - started
        context.show(f"right after {took:.1f} s")
        figures: Figures = {"preloaded_rows_per_s": rows / took, "preloaded_first_rows_s": first_s}
        if first < rows:
            figures["preloaded_steady_rows_per_s"] = (rows - first) / (took - first_s)
        if driven.local:
            figures["cpu_s_per_million_rows"] = (cpu_seconds(driven.local) - cpu_before) / rows * 1e6
            figures |= _sizes(driven, loaded)
    return figures


def _sized(context: Context, *, quick: tuple[int, int], full: tuple[int, int]) -> tuple[int, int]:
    """Rows and keys of a part."""
    rows, keys = quick if context.quick else full
    return context.rows or rows, context.keys or keys


def _first_rows(rest: Rest, table: str) -> tuple[int, float]:
    """How many versions the first answer with any had, and after how long."""
    started = time.monotonic()
    while time.monotonic() - started < DEADLINE_S:
        try:
            if count := rest.rows(f"SET skipUpsert = true; SELECT COUNT(*) FROM {table}")[0][0]:
                return count, time.monotonic() - started
        except (httpx.HTTPError, ClusterError):
            pass
        time.sleep(0.1)
    raise ClusterError(f"no row of {table} within {DEADLINE_S} s")


def _sizes(driven: Driven, loaded: Feed) -> Figures:
    """What the coordinator's state takes per key on disk, and what servers keep per row for versions."""
    assert driven.local is not None
    time.sleep(15)  # state files are written with a checkpoint, counts reported with a heartbeat
    told = driven.rest.call("GET", "/tables/bench/upsert")
    state = [path for path in (driven.local.data_dir / "pipeline").rglob("state/**/*") if path.is_file()]
    figures: Figures = {"state_disk_bytes_per_key": sum(path.stat().st_size for path in state) / loaded.keys}
    if told["coordinator"]["stateBytes"]:
        figures["state_bytes_per_key"] = told["coordinator"]["stateBytes"] / loaded.keys
    if told["sizeBytes"]:
        figures["validity_bytes_per_row"] = told["sizeBytes"] / loaded.rows
    return figures


def lag(context: Context) -> Figures:
    dice = random.Random(4)

    def row(partition: int, number: int, now_ms: int) -> bytes:
        return b'{"id":%d,"part":%d,"device":"device-%d","note":"a version of the usual length, %d","ts":%d}' % (
            dice.randrange(100_000), partition, number % 5_000, number, now_ms,
        )  # fmt: skip

    schema = {
        "schemaName": "fresh",
        "primaryKeyColumns": ["id"],
        "dimensionFieldSpecs": [
            {"name": "id", "dataType": "LONG"},
            {"name": "part", "dataType": "INT"},
            {"name": "device", "dataType": "STRING"},
            {"name": "note", "dataType": "STRING"},
        ],
        "dateTimeFieldSpecs": SCHEMA["dateTimeFieldSpecs"],
    }
    with context.cluster() as driven:
        _, found = freshness.measure(context, driven, "fresh", schema, row, UPSERT)
    return {key: found[key] for key in ("lag_p50", "lag_p90", "lag_p99", "lag_max", "rate_per_s")}


def query(context: Context) -> Figures:
    rows, rounds = context.rows or (1_000_000 if context.quick else 5_000_000), 9 if context.quick else 21
    with context.cluster() as driven:
        context.show(f"filling the topic with {rows:,} rows, a tenth of them superseded")
        loaded = Feed(driven).fill(context, mostly_in_force(rows))
        flush_rows = rows // PARTITIONS // 5
        create(context, driven, "bench", loaded, upsert=True, flush_rows=flush_rows)
        wait_for(context, driven.rest, "bench", loaded.answer)
        create(context, driven, "plain", loaded, upsert=False, flush_rows=flush_rows)
        quantities = int((np.arange(rows) * 31 % 100).sum())
        wait_for(context, driven.rest, "plain", [[rows, quantities]])
        _wait_until_sealed(driven.rest, ("bench", "plain"))
        context.show(f"both tables are right and sealed; {rounds} rounds")
        return _ratios(context, driven.rest, rows, rounds)


def _ratios(context: Context, rest: Rest, rows: int, rounds: int) -> Figures:
    """Shape by shape: with validity, without, and the ratio; of the ratios the median and the worst."""
    dice = random.Random(11)
    times: dict[tuple[str, str], list[float]] = {(name, table): [] for name in SHAPES for table in ("bench", "plain")}
    for number in range(rounds + 2):
        for name, shape in SHAPES.items():
            sql = shape(dice, rows)
            for table in ("bench", "plain") if number % 2 else ("plain", "bench"):
                started = time.perf_counter()
                rest.rows(sql.replace("FROM bench", f"FROM {table}"))
                if number > 1:
                    times[name, table].append((time.perf_counter() - started) * 1000)
    figures: Figures = {}
    ratios = []
    for name in SHAPES:
        with_it, without = (median(times[name, table]) for table in ("bench", "plain"))
        ratios.append(with_it / without)
        figures |= {f"{name}": with_it, f"{name}_without": without, f"{name}_ratio": ratios[-1]}
        context.show(f"{name}: {with_it:.1f} ms, without validity {without:.1f} ms, ratio {ratios[-1]:.2f}")
    return figures | {"query_ratio_median": median(ratios), "query_ratio_worst": max(ratios)}


def _wait_until_sealed(rest: Rest, tables: Sequence[str], deadline_s: float = 300.0) -> None:
    """Until the number of rows in sealed segments has not changed for fifteen seconds."""
    started = changed = time.monotonic()
    last = -1
    while time.monotonic() - changed < 15 and time.monotonic() - started < deadline_s:
        view = rest.call("GET", "/internal/v1/view")["tables"]
        sealed = sum(segment["rows"] for table in tables for segment in view[table]["segments"])
        if sealed != last:
            last, changed = sealed, time.monotonic()
        time.sleep(0.5)


def restart(context: Context) -> Figures:
    rows, keys = _sized(context, quick=(2_000_000, 500_000), full=(20_000_000, 5_000_000))
    with context.cluster() as driven:
        if driven.local is None:
            raise ClusterError("restart kills a server of its own cluster: leave --controller and --broker away")
        create(context, driven, "bench", Feed(driven), upsert=True, flush_rows=rows // SEGMENTS)
        context.show(f"writing the epochs of {rows:,} rows of {keys:,} keys")
        log, dice = KeyedLog(driven.local, "bench", keys), np.random.default_rng(5)
        for number in range(EPOCHS):
            log.write(dice.integers(0, keys, rows // EPOCHS))
            if not (number + 1) % 20:
                context.show(f"{log.rows:,} rows in the epoch log")
        wait_for(context, driven.rest, "bench", log.answer)
        context.show("the table is right; sealing, and a round of snapshots")
        _wait_until_saved(driven.rest, "bench")
        shapes = random.Random(2)
        asked = ["SELECT COUNT(*), SUM(quantity) FROM bench", *(shape(shapes, keys) for shape in SHAPES.values())]
        before = [driven.rest.rows(sql) for sql in asked]
        warm_s = max(_until(driven.rest, asked, before))
        context.show(f"these {len(asked)} queries take {warm_s:.1f} s, one after the other")
        took = []
        for attempt in range(1 if context.quick else 2):
            time.sleep(15 if attempt else 0)  # what has not lived for ten seconds is restarted after a pause
            driven.local.kill("server-1")
            times = list(_until(driven.rest, asked, before))
            took.append(times[-1])
            context.show(f"{attempt + 1}: first answer {times[0]:.1f} s after kill -9, all {times[-1]:.1f} s")
    figures: Figures = {"restart_rows": rows, "restart_keys": log.keys, "restart_queries_s": warm_s}
    return figures | {"server_restart_s": median(took)}


def _wait_until_saved(rest: Rest, table: str, deadline_s: float = 300.0) -> None:
    """Until all segments are sealed, and the versions of each are on the disk as of the last epoch."""
    started = time.monotonic()
    while time.monotonic() - started < deadline_s:
        segments = rest.call("GET", "/internal/v1/view")["tables"][table]["segments"]
        told = rest.call("GET", f"/tables/{table}/upsert")
        partitions = [one for server in told["servers"].values() for one in server["partitions"].values()]
        saved = all(one is not None and one["snapshotEpoch"] == told["epoch"] for one in partitions)
        if saved and sum(segment["status"] == "DONE" for segment in segments) >= SEGMENTS:
            return
        time.sleep(0.5)
    raise ClusterError(f"{table}: versions are not on the disk {deadline_s:g} s after the last epoch: {told}")


def _until(rest: Rest, asked: Sequence[str], before: Sequence[list[list[Any]]]) -> Iterator[float]:
    """Seconds until each query is answered as before, one after the other. (Doubles are summed in any order.)"""
    started = time.monotonic()
    for sql, expected in zip(asked, before, strict=True):
        exact = "amount" not in sql
        while True:
            if time.monotonic() - started > DEADLINE_S:
                raise ClusterError(f"{sql}: not answered {DEADLINE_S} s after the restart")
            try:
                rows = rest.rows(sql)
                if rows == expected or (not exact and len(rows) == len(expected)):
                    break
            except (httpx.HTTPError, ClusterError):
                pass
            time.sleep(0.05)
        yield time.monotonic() - started


def by_keys(context: Context) -> Figures:
    """A table gets all its keys; then versions of any of them are timed."""
    figures: Figures = {}
    sizes = (10_000, 100_000, 1_000_000) if context.quick else (100_000, 1_000_000, 10_000_000)
    for keys in (context.keys,) if context.keys else sizes:
        updates = context.rows or (500_000 if context.quick else 2_000_000)
        with context.cluster() as driven:
            context.show(f"{keys:,} keys")
            once = (np.arange(first, min(first + BATCH, keys)) for first in range(0, keys, BATCH))
            feed = Feed(driven).fill(context, once)
            create(context, driven, "bench", feed, upsert=True, flush_rows=2_000_000)
            wait_for(context, driven.rest, "bench", feed.answer)
            context.show(f"{keys:,} keys are there; {updates:,} versions of them")
            batches = [feed.made(ids) for ids in versions_of(updates, keys)]
            cpu_before = cpu_seconds(driven.local) if driven.local else 0.0
            started = time.monotonic()
            feed.append(batches)
            wait_for(context, driven.rest, "bench", feed.answer)
            took = time.monotonic() - started
            figures[f"updates_per_s_{keys}"] = updates / took
            if driven.local:
                figures[f"cpu_us_per_update_{keys}"] = (cpu_seconds(driven.local) - cpu_before) / updates * 1e6
            context.show(f"{keys:,} keys: {updates / took:,.0f} updates/s")
    return figures


PARTS: dict[str, Callable[[Context], Figures]] = {
    "preloaded": preloaded, "freshness": lag, "query": query, "restart": restart, "keys": by_keys,
}  # fmt: skip
