# SPDX-License-Identifier: Apache-2.0
"""What does it cost that the deep store is away for a while, under a steady load of rows and queries?

Two servers, segments of seconds, STORE_BEST_EFFORT. The store's directory goes away (something else stands in its
place), and comes back after `--minutes`. In the last third the disk of one server is wiped, too: it fetches all its
segments from the other one, while rows and queries go on. At the end all rows are counted and added up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.cluster import ClusterError, Rest
from bench.commit import best_effort, copies, incarnation, servers_of
from bench.context import Context, Driven, percentile, table_config
from bench.steady import PARTITIONS, RATE_PER_S, SteadyRows, schema
from bench.watch import Watch, gaps_ms, wait_for_rows

TABLE = "outage"
FLUSH_ROWS = 50_000
UPLOAD_WAIT_MS = 2_000
TOTALS = f"SELECT part, COUNT(*), SUM(number) FROM {TABLE} GROUP BY part ORDER BY part LIMIT 100"
_ASK_EVERY_S = 0.1
_LOOK_EVERY_S = 0.5
_DEADLINE_S = 600.0
Span = tuple[float, float]


class Asker:
    """A thread that asks for the totals, ten times a second: when, how long it took, and what went wrong."""

    def __init__(self, rest: Rest) -> None:
        self._rest = Rest(rest.controller, rest.broker)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.asked: list[tuple[float, float]] = []
        self.failed: list[str] = []
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._rest.close()

    def p99_ms(self, span: Span) -> float:
        return percentile([ms for at_s, ms in self.asked if span[0] <= at_s <= span[1]] or [0.0], 0.99)

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                self._rest.rows(TOTALS)
                self.asked.append((began_s, (time.monotonic() - began_s) * 1000))
            except (httpx.HTTPError, ClusterError) as error:
                self.failed.append(str(error)[:300])
            self._stop.wait(max(0.0, began_s + _ASK_EVERY_S - time.monotonic()))


class Safety:
    """A thread that looks how long new segments are of one copy only."""

    def __init__(self, rest: Rest) -> None:
        self._rest = Rest(rest.controller, rest.broker)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._since: dict[str, float] = {}
        #: Seconds from the commit until it was safe, by segment.
        self.took_s: dict[str, float] = {}
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._rest.close()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S / 2):
            with contextlib.suppress(httpx.HTTPError):  # the next look says it
                now_s = time.monotonic()
                for name, segment in copies(self._rest, TABLE).items():
                    since_s = self._since.setdefault(name, now_s)
                    if segment["safety"] == "safe":
                        self.took_s.setdefault(name, now_s - since_s)


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    minutes = context.minutes or (1.0 if context.quick else 10.0)
    warm_s, before_s = (20.0, 20.0) if context.quick else (40.0, 60.0)
    with tempfile.TemporaryDirectory(prefix="cremant-bench-store-") as directory:
        store = Path(directory) / "store"
        store.mkdir()
        with context.cluster(servers=2, options=("--store-uri", str(store))) as driven:
            if driven.local is None:
                raise ClusterError("outage takes its own store away: leave --controller and --broker away")
            metrics = _measure(context, driven, store, warm_s, before_s, minutes * 60)
    parameters = {
        "minutes": minutes, "rate_per_s": RATE_PER_S, "partitions": PARTITIONS, "replication": 2,
        "flush_rows": FLUSH_ROWS, "upload_wait_ms": UPLOAD_WAIT_MS,
    }  # fmt: skip
    return parameters, metrics


def _measure(
    context: Context, driven: Driven, store: Path, warm_s: float, before_s: float, away_s: float
) -> dict[str, Any]:
    topic = f"{TABLE}-{time.time_ns() // 1_000_000}"
    driven.stream.create(topic, PARTITIONS)
    config = table_config(TABLE, driven.stream.properties(topic), flush_rows=FLUSH_ROWS, replication=2)
    context.create_table(driven, schema(TABLE), best_effort(config, UPLOAD_WAIT_MS))
    spans: dict[str, Span] = {}
    with (
        Watch(servers_of(driven), TABLE, incarnation(driven.rest, TABLE), PARTITIONS) as watch,
        SteadyRows(driven.stream, topic) as rows,
    ):
        wait_for_rows(watch, [FLUSH_ROWS] * PARTITIONS, 180)
        context.show(f"warming up {warm_s:.0f} s")
        time.sleep(warm_s)
        wait_for_rows(watch, list(rows.rows), 180)
        asker, safety = Asker(driven.rest), Safety(driven.rest)
        context.show(f"{before_s:.0f} s with the store")
        spans["before"] = _span(lambda: time.sleep(before_s))
        with away(store):
            context.show(f"{away_s:.0f} s without it")
            spans["outage"] = _span(lambda: time.sleep(away_s * 2 / 3))
            context.show("the disk of one server is wiped")
            spans["fetching"] = _span(lambda: _wipe(driven, "server-2"))
            time.sleep(max(0.0, spans["before"][1] + away_s - time.monotonic()))
            backlog = _lacking(driven.rest)
        context.show(f"the store is back, {backlog} segments lack an object")
        spans["draining"] = _span(lambda: _wait(lambda: not _lacking(driven.rest), "all segments are stored"))
        rows.stop()
        asker.stop()
        safety.stop()
        if rows.failure is not None:
            raise rows.failure
        context.show("counting")
        lost, wrong = _count(driven.rest, rows)
    seen = list(safety.took_s.values())
    unsafe = len(copies(driven.rest, TABLE)) - len(seen)
    metrics: dict[str, Any] = {
        "rows": sum(rows.rows), "rows_lost": lost, "sums_wrong": wrong, "queries": len(asker.asked),
        "failed": len(asker.failed), "segments": len(seen), "unsafe_at_the_end": max(0, unsafe),
        "safe_p50_s": percentile(seen, 0.5), "safe_max_s": max(seen),
        "refetched_s": spans["fetching"][1] - spans["fetching"][0], "backlog": backlog,
        "drained_s": spans["draining"][1] - spans["draining"][0],
    }  # fmt: skip
    for name, span in spans.items():
        gaps = [gap for times in watch.partitions() for gap in gaps_ms(times, *span)]
        metrics |= {
            f"gap_p99_{name}": percentile(gaps, 0.99), f"gap_max_{name}": max(gaps),
            f"query_p99_{name}": asker.p99_ms(span),
        }  # fmt: skip
    for failure in asker.failed[:3]:
        context.show(f"failed: {failure}")
    return metrics


def _span(act: Callable[[], None]) -> Span:
    began_s = time.monotonic()
    act()
    return began_s, time.monotonic()


@contextlib.contextmanager
def away(store: Path) -> Iterator[None]:
    """A mount that went away, and something else stands in its place: nothing can be written or read below it."""
    moved = store.with_name(f"{store.name}.away")
    store.mkdir(exist_ok=True)
    store.rename(moved)
    store.write_text("no directory", encoding="utf-8")
    try:
        yield
    finally:
        store.unlink()
        moved.rename(store)


def _wipe(driven: Driven, server: str) -> None:
    """Kills it without its files, the supervisor starts it anew; until it has again all that was sealed by then."""
    local = driven.local
    assert local is not None
    pid, sealed = local.pids()[server], set(copies(driven.rest, TABLE))
    os.kill(pid, signal.SIGSTOP)  # nothing is written while its files go
    for name in ("segments", "scratch"):
        shutil.rmtree(local.data_dir / server / name, ignore_errors=True)
    os.kill(pid, signal.SIGKILL)
    url = servers_of(driven)[server]
    _wait(lambda: sealed <= _held(url), "the wiped server has fetched its segments")


def _held(url: str) -> set[str]:
    """What a server serves; nothing while it does not answer."""
    try:
        return set(httpx.get(f"{url}/tables/{TABLE}_REALTIME/segments", trust_env=False).json()["segments"])
    except (httpx.HTTPError, KeyError):
        return set()


def _lacking(rest: Rest) -> int:
    return sum(segment["store"]["state"] != "stored" for segment in copies(rest, TABLE).values())


def _wait(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > until_s:
            raise ClusterError(f"{what}: not within {_DEADLINE_S:.0f} s")
        time.sleep(_LOOK_EVERY_S)


def _count(rest: Rest, rows: SteadyRows) -> tuple[int, int]:
    """Rows that were appended and do not arrive within a minute, and partitions whose sum is not that of their rows."""
    until_s = time.monotonic() + 60
    while True:
        found = {int(part): (int(count), int(total)) for part, count, total in rest.rows(TOTALS)}
        lost = sum(abs(sent - found.get(part, (0, 0))[0]) for part, sent in enumerate(rows.rows))
        if not lost or time.monotonic() > until_s:
            break
        time.sleep(_LOOK_EVERY_S)
    sums = [sent * (sent - 1) // 2 for sent in rows.rows]
    return lost, sum(found.get(part, (0, -1))[1] != total for part, total in enumerate(sums))
