# SPDX-License-Identifier: Apache-2.0
"""Does anything grow that should not? A steady load of rows and queries, segments sealing, retention at work, and every
few seconds the anonymous memory, open files and threads of every process, and the files on disk.

Growth is judged by the Theil-Sen slope (the median of the slopes of all pairs of samples: a spike moves it little) over
what comes after the warm-up. A server's tail is a sawtooth; segments are small enough for many teeth.

Files are judged at rest: how much log lies about under load says how late the rounds of trimming and retention are,
which a busy machine delays. Once the load has ended they must catch up, whatever was delayed.

The JVM is reported, not judged: its heap grows to its limit by design.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from bench.cluster import ClusterError, LocalCluster, Rest, descendants
from bench.context import Context, Driven, LogStream, Stream, table_config
from bench.dataset import SCHEMA, rows_of

PARTITIONS = 2
RATE_PER_S = 2_000
FLUSH_ROWS = 12_000
SAMPLE_EVERY_S = 2.0
#: Share of the run that counts as warm-up.
WARM_SHARE = 0.4
#: What may be left once nothing is written any more: of each partition the epoch log from the newest sealed segment on
#: (two segments, 4 MB at most) and the active file of its stream (1 MB). A minute of load makes about 30 MB of log.
RESTING_LOG_BYTES = 24_000_000
#: Segments are past their retention when they are sealed, so none stays for long; each has a replica's worth of files.
RESTING_SEALED_FILES = 4
#: Trimming and retention run once a minute each, one behind the other; a busy machine may take several times that.
REST_DEADLINE_S = 420.0
_BATCHES_PER_S = 20
#: What looking at a process says that ends meanwhile; one that is not yet waited for has no memory any more.
_GONE = (OSError, ValueError, KeyError)
#: Log files small and short-lived, so that retention has work within minutes.
SEGMENT_BYTES = 1_000_000
OPTIONS = ("--set", f"log_segment_bytes={SEGMENT_BYTES}", "--set", "log_retention_ms=60000")
QUERIES = (
    "SELECT COUNT(*), SUM(amount) FROM bench",
    "SELECT country, COUNT(*), SUM(amount) FROM bench GROUP BY country ORDER BY country LIMIT 100",
    "SELECT id, country, amount FROM bench ORDER BY ts DESC LIMIT 10",
    "SELECT DISTINCTCOUNT(userId) FROM bench WHERE quantity < 50",
)


class Process(NamedTuple):
    """One process at one moment."""

    role: str
    rss_anon_kib: int
    files: int
    threads: int


class Sample(NamedTuple):
    at_s: float
    roles: dict[str, Process]
    log_bytes: int
    sealed_files: int
    role_files: int


class Leftover(NamedTuple):
    """What lies about `after_s` the last row was written."""

    after_s: float
    log_bytes: int
    sealed_files: int

    @property
    def is_small(self) -> bool:
        return self.log_bytes <= RESTING_LOG_BYTES and self.sealed_files <= RESTING_SEALED_FILES


class Soak(NamedTuple):
    samples: list[Sample]
    queries: int
    failed: list[str]
    restarted: list[str]
    rows: int
    #: Files once the load had ended and what was due had been deleted, or at the deadline.
    rest: Leftover

    def warm(self) -> list[Sample]:
        return self.samples[int(len(self.samples) * WARM_SHARE) :]

    def slope_per_hour(self, role: str, what: str) -> float:
        """Of `rss_anon_kib`, `files` or `threads`."""
        points = [(s.at_s, getattr(s.roles[role], what)) for s in self.warm() if role in s.roles]
        return theil_sen(points) * 3_600

    def roles(self) -> list[str]:
        return sorted({role for sample in self.samples for role in sample.roles})

    def median(self, role: str, what: str) -> float:
        return median(getattr(s.roles[role], what) for s in self.warm() if role in s.roles)


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Slope per second; of 200 points at most, evenly chosen."""
    chosen = points[:: max(1, len(points) // 200)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(chosen, 2) if b[0] > a[0]]
    return median(slopes) if slopes else 0.0


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    minutes = context.minutes or (5.0 if context.quick else 60.0)
    with context.cluster(servers=2, options=OPTIONS) as driven:
        if driven.local is None:
            raise ClusterError("soak looks into processes: leave --controller and --broker away")
        soak = run_soak(context, driven.local, _small_files(driven), minutes * 60)
    metrics: dict[str, Any] = {"queries": soak.queries, "failed": len(soak.failed), "rows": soak.rows}
    for role in soak.roles():
        metrics[f"{role}_mib"] = soak.median(role, "rss_anon_kib") / 1024
        metrics[f"{role}_mib_per_hour"] = soak.slope_per_hour(role, "rss_anon_kib") / 1024
        metrics[f"{role}_files_per_hour"] = soak.slope_per_hour(role, "files")
        metrics[f"{role}_threads_per_hour"] = soak.slope_per_hour(role, "threads")
    metrics["log_mib_max"] = max(sample.log_bytes for sample in soak.samples) / 2**20
    metrics["log_mib_at_rest"] = soak.rest.log_bytes / 2**20
    metrics["at_rest_s"] = soak.rest.after_s
    return {"minutes": minutes, "rate_per_s": RATE_PER_S, "partitions": PARTITIONS}, metrics


def _small_files(driven: Driven) -> Stream:
    """The embedded log is written by us, so its files are rolled by us."""
    if driven.local is None or not isinstance(driven.stream, LogStream):
        return driven.stream
    return LogStream(Path(driven.local.ready["logDir"]), SEGMENT_BYTES)


def run_soak(context: Context, local: LocalCluster, stream: Stream, seconds: float) -> Soak:
    topic = f"soak-{time.time_ns() // 1_000_000}"
    stream.create(topic, PARTITIONS)
    config = table_config("bench", stream.properties(topic), flush_rows=FLUSH_ROWS, replication=2)
    # Rows are of 2025: their segments are older than this when they are sealed, so retention takes each of them.
    config["segmentsConfig"] |= {"retentionTimeUnit": "DAYS", "retentionTimeValue": "1"}
    context.create_table(Driven(local.rest, stream, local), SCHEMA, config)
    stop = threading.Event()
    sent = [0]
    counted = [0]
    failed: list[str] = []
    threads = [
        threading.Thread(target=_produce, args=(stream, topic, stop, sent), daemon=True),
        *(threading.Thread(target=_ask, args=(local.rest, n, stop, counted, failed), daemon=True) for n in range(2)),
    ]
    _wait_for_rows(local.rest, stream, topic, sent)
    before = local.pids()
    for thread in threads:
        thread.start()
    samples = []
    started = shown = time.monotonic()
    while (at_s := time.monotonic() - started) < seconds:
        samples.append(take_sample(local, at_s))
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            sizes = ", ".join(f"{role} {seen.rss_anon_kib // 1024}" for role, seen in samples[-1].roles.items())
            context.show(f"{sent[0]:,} rows, {counted[0]:,} queries, {len(failed)} failed; MiB: {sizes}")
        time.sleep(SAMPLE_EVERY_S)
    stop.set()
    for thread in threads:
        thread.join(60)
    context.show("the load has ended; what is due is deleted")
    rest = wait_for_rest(lambda: files_of(local.data_dir), REST_DEADLINE_S)
    restarted = [name for name, pid in local.pids().items() if before[name] != pid]
    return Soak(samples, counted[0], failed, restarted, sent[0], rest)


def wait_for_rest(
    look: Callable[[], tuple[int, int]],
    deadline_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Leftover:
    """Looks (`log_bytes`, `sealed_files`) until little is left or the deadline passes."""
    started = clock()
    while True:
        left = Leftover(clock() - started, *look())
        if left.is_small or left.after_s >= deadline_s:
            return left
        sleep(SAMPLE_EVERY_S)


def files_of(data: Path) -> tuple[int, int]:
    """Bytes of all logs, and sealed segments in the deep store."""
    return (
        sum(size for _, size in _files(data / "log")),
        sum(1 for name, _ in _files(data / "store") if name.endswith(".parquet")),
    )


def _wait_for_rows(rest: Rest, stream: Stream, topic: str, sent: list[int]) -> None:
    for partition in range(PARTITIONS):
        stream.append(topic, partition, rows_of(sent[0], 100))
        sent[0] += 100
    stream.flush()
    rest.wait_for("SELECT COUNT(*) FROM bench", [[sent[0]]], deadline_s=120)


def _produce(stream: Stream, topic: str, stop: threading.Event, sent: list[int]) -> None:
    size = RATE_PER_S // _BATCHES_PER_S
    started, batch = time.monotonic(), 0
    while not stop.is_set():
        stream.append(topic, batch % PARTITIONS, rows_of(sent[0], size))
        sent[0] += size
        batch += 1
        time.sleep(max(0.0, started + batch / _BATCHES_PER_S - time.monotonic()))


def _ask(rest: Rest, number: int, stop: threading.Event, counted: list[int], failed: list[str]) -> None:
    own = Rest(rest.controller, rest.broker)
    while not stop.is_set():
        number += 1
        try:
            own.rows(QUERIES[number % len(QUERIES)])
            counted[0] += 1
        except (httpx.HTTPError, ClusterError) as error:
            failed.append(str(error)[:300])
        stop.wait(0.05)
    own.close()


def take_sample(local: LocalCluster, at_s: float) -> Sample:
    roles: dict[str, Process] = {}
    for name, pid in local.pids().items():
        with contextlib.suppress(*_GONE):
            roles[name] = _look(name, pid)
        if name == "pipeline":
            for child, part in _parts_of_pipeline(pid):
                with contextlib.suppress(*_GONE):
                    found = _look(part, child)
                    old = roles.get(part)
                    roles[part] = found if old is None else _sum(old, found)
    data = local.data_dir
    log_bytes, sealed_files = files_of(data)
    return Sample(
        at_s=at_s,
        roles=roles,
        log_bytes=log_bytes,
        sealed_files=sealed_files,
        role_files=sum(1 for part in ("controller", "broker", "pipeline") for _ in _files(data / part)),
    )


def _parts_of_pipeline(pid: int) -> Iterator[tuple[int, str]]:
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            command = (Path("/proc") / str(child) / "cmdline").read_bytes()
            yield child, "jvm" if b"PythonGatewayServer" in command else "workers"


def _look(role: str, pid: int) -> Process:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Process(role, int(status["RssAnon"].split()[0]), files, int(status["Threads"]))


def _sum(a: Process, b: Process) -> Process:
    return Process(a.role, a.rss_anon_kib + b.rss_anon_kib, a.files + b.files, a.threads + b.threads)


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                yield path.name, path.stat().st_size
