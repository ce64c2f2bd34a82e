# SPDX-License-Identifier: Apache-2.0
"""How long does a table stand still when its pipeline dies and another one is on standby? Seconds from kill -9 of the
leader to the next closed epoch, as the epoch log has it, while rows arrive; of an upsert and of an append table
(`--only upsert`, `--only append`), each in a cluster of its own. Nobody restarts the leader meanwhile.

    lease   until the standby has the lease: the rest of the leader's, and asking for it
    start   fences, reading back, the checkpoint, until Spark's query runs
    epoch   the first batch: what waits in the stream, and the end of its epoch
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.cluster import ClusterError, LocalCluster, second_pipeline
from bench.context import Context, LogStream, table_config
from bench.dataset import SCHEMA, rows_of
from cremant.epoch.format import peek
from cremant.epoch.records import EpochMark
from cremant.log.embedded import EmbeddedLog
from cremant.model.names import epoch_topic

TABLES: dict[str, dict[str, Any]] = {
    "upsert": {"upsertConfig": {"mode": "FULL", "comparisonColumns": ["ts"]}},
    "append": {},
}
PARTITIONS = 4
_DEADLINE_S = 240.0
#: From a warm standby to the end of its leader.
_SETTLED_S = 2.0
_KEYS = 50_000
#: Rows of a feed come in bursts, one partition after the other.
_BURST_ROWS, _BURST_EVERY_S = 100, 0.05


class Takeover(NamedTuple):
    lease_s: float
    start_s: float
    epoch_s: float

    @property
    def all_s(self) -> float:
        return sum(self)


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    if not context.drives_own_cluster or context.log == "kafka":
        raise ClusterError("takeover reads the embedded log of a cluster of its own")
    rounds, figures = 1 if context.quick else 3, dict[str, Any]()
    for table in [context.only] if context.only else TABLES:
        if table not in TABLES:
            raise ClusterError(f"takeover has no table {table!r}; there are {', '.join(TABLES)}")
        found = [_takeover(context, table) for _ in range(rounds)]
        figures[f"{table}_takeover_s"] = median(one.all_s for one in found)
        for name in Takeover._fields:
            figures[f"{table}_{name}"] = median(getattr(one, name) for one in found)
    return {"rounds": rounds, "rows_per_s": round(_BURST_ROWS / _BURST_EVERY_S)}, figures


def _takeover(context: Context, table: str) -> Takeover:
    with (
        tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory,
        LocalCluster(Path(directory) / "data", servers=1) as cluster,
    ):
        stream = LogStream(Path(cluster.ready["logDir"]))
        stream.create(table, PARTITIONS)
        schema = {**SCHEMA, "schemaName": table} | ({"primaryKeyColumns": ["id"]} if table == "upsert" else {})
        cluster.rest.add_table(schema, table_config(table, stream.properties(table)) | TABLES[table])
        beside = Path(directory) / "beside"
        options = ("--standby", "--set", f"checkpoint_dir={cluster.data_dir / 'pipeline'}")
        with _fed(stream, table), second_pipeline(cluster, beside, *options):
            _until(lambda: _answers(cluster, table), "the first rows")
            _until(lambda: _events(beside / "log.jsonl", "warmed up"), "a warm standby")
            time.sleep(_SETTLED_S)
            found = _kill_the_leader(cluster, table, beside / "log.jsonl")
    parts = ", ".join(f"{name} {value:.1f}" for name, value in found._asdict().items())
    context.show(f"{table}: {found.all_s:.1f} s ({parts})")
    return found


def _kill_the_leader(cluster: LocalCluster, table: str, standby: Path) -> Takeover:
    """`standby`: its log file."""
    next_epoch_s = _epoch_of_another(cluster, table)
    os.kill(cluster.ready["pid"], signal.SIGSTOP)
    try:
        killed_s = time.time()
        cluster.kill("pipeline")
        closed_s = next_epoch_s()
    finally:
        os.kill(cluster.ready["pid"], signal.SIGCONT)
    starting = [at for at, event in _events(standby, "table state") if event["state"] == "starting"]
    started = [at for at, _ in _events(standby, "query started")]
    return Takeover(starting[-1] - killed_s, started[-1] - starting[-1], closed_s - started[-1])


@contextlib.contextmanager
def _fed(stream: LogStream, topic: str) -> Iterator[None]:
    """Versions of the same keys, at a steady rate."""
    stop = threading.Event()

    def feed() -> None:
        for number in itertools.count():
            first = number * _BURST_ROWS
            ids = [n % _KEYS for n in range(first, first + _BURST_ROWS)]
            stream.append(topic, number % PARTITIONS, rows_of(first, _BURST_ROWS, ids=ids))
            if stop.wait(_BURST_EVERY_S):
                return

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def _epoch_of_another(cluster: LocalCluster, table: str) -> Callable[[], float]:
    """Waits until a later generation than the present one has closed an epoch; when (wall clock, seconds)."""
    view = cluster.rest.call("GET", "/internal/v1/view")["tables"][table]
    incarnation, generation = str(view["record"]["incarnation"]), int(view["pipelineRecord"]["generation"])
    topic, log = epoch_topic(table, incarnation), EmbeddedLog(Path(cluster.ready["logDir"]))
    reader = log.reader(topic, 0, log.latest(topic, 0))

    def next_epoch_s() -> float:
        with contextlib.closing(log), contextlib.closing(reader):
            ends_s = time.monotonic() + _DEADLINE_S
            while time.monotonic() < ends_s:
                batch = reader.read(max_messages=500, max_bytes=1 << 24)
                if batch is None:
                    time.sleep(0.02)
                    continue
                for value, at_ms in zip(batch.values, batch.timestamps_ms.tolist(), strict=True):
                    head = peek(value.as_buffer(), incarnation)
                    if isinstance(head, EpochMark) and head.generation > generation:
                        return float(at_ms) / 1000
        raise ClusterError(f"{table}: no epoch of another pipeline within {_DEADLINE_S:g} s")

    return next_epoch_s


def _answers(cluster: LocalCluster, table: str) -> bool:
    with contextlib.suppress(ClusterError):
        return bool(cluster.rest.rows(f"SELECT COUNT(*) FROM {table}")[0][0])
    return False


def _events(log: Path, name: str) -> list[tuple[float, dict[str, Any]]]:
    """(wall clock in seconds, event) of those of this name in a log file."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event.get("event") == name:
                found.append((datetime.fromisoformat(event["at"]).timestamp(), event))
    return found


def _until(condition: Callable[[], object], what: str) -> None:
    ends_s = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > ends_s:
            raise ClusterError(f"{what}: not within {_DEADLINE_S:g} s")
        time.sleep(0.2)
