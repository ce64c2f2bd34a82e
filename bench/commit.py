# SPDX-License-Identifier: Apache-2.0
"""Does a commit hold up the rows that arrive meanwhile?

Rows arrive at a steady rate; on both replicas the visible end of each partition is looked at every 20 ms
(`bench/watch.py`). Spans in which all partitions commit a segment take turns with spans in which none does, on the same
cluster and table, while the deep store answers, hangs, and refuses connections: with segments of the rows of a few
seconds, and with segments whose build takes seconds. Spans are compared in slices of equal length: the longest gap of a
slice is a figure per replica and partition.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.cluster import ClusterError, Rest
from bench.context import Context, Driven, percentile, table_config
from bench.s3 import S3Server
from bench.steady import PARTITIONS, RATE_PER_S, SteadyRows, schema
from bench.watch import Watch, gaps_ms, wait_for_rows

SLICE_S = 4.0
#: What a commit waits for an upload.
UPLOAD_WAIT_MS = 2_000
STORES = ("healthy", "hanging", "failing")
_COMMIT_DEADLINE_S = 300.0
_LOOK_EVERY_S = 0.25
_SETTLE_S = 3.0
_FILL_DEADLINE_S = 240.0
_STORE_NICE = 19
#: Segments end when they are told to.
_FLUSH_ROWS = 50_000_000
_FLUSH_SIZE = {"realtime.segment.flush.threshold.segment.size": "100G"}


class Size(NamedTuple):
    """`fill`: rows that a segment gets per partition before its commit, beside the steady ones."""

    name: str
    fill: int
    rounds: int


class Case(NamedTuple):
    """Gaps in ms of one store and one size: all of them, and the longest of each slice, replica and partition."""

    gaps: dict[bool, list[float]]
    longest: dict[bool, list[float]]
    #: Per round: slices of each of its two spans, commits per partition.
    slices: list[int]
    commits: list[int]
    build_ms: list[float]


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = (
        (Size("small", 0, 3), Size("large", 200_000, 1)) if context.quick
        else (Size("small", 0, 8), Size("large", 1_000_000, 2))
    )  # fmt: skip
    metrics: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="cremant-bench-s3-") as directory,
        S3Server(nice=_STORE_NICE) as store,
        context.cluster(servers=2, options=_options(store.settings(Path(directory), prefix="segments"))) as driven,
    ):
        if driven.local is None:
            raise ClusterError("commit stops its own store: leave --controller and --broker away")
        for size in sizes:
            for state, case in measure(context, driven, store, size).items():
                metrics |= {f"{size.name}_{state}_{name}": value for name, value in figures(case).items()}
    print(table(metrics, [size.name for size in sizes]))
    parameters = {
        "rate_per_s": RATE_PER_S, "partitions": PARTITIONS, "replication": 2, "slice_s": SLICE_S,
        "upload_wait_ms": UPLOAD_WAIT_MS, "sizes": [size._asdict() for size in sizes],
    }  # fmt: skip
    return parameters, metrics


def measure(context: Context, driven: Driven, store: S3Server, size: Size) -> dict[str, Case]:
    """All states of the store, one after the other. The last one kills it: it is started again at the end."""
    assert driven.local is not None
    name = f"commit_{size.name}"
    topic = f"{name}-{time.time_ns() // 1_000_000}"
    driven.stream.create(topic, PARTITIONS)
    stream = driven.stream.properties(topic) | _FLUSH_SIZE
    config = table_config(name, stream, flush_rows=_FLUSH_ROWS, replication=2)
    context.create_table(driven, schema(name), best_effort(config, UPLOAD_WAIT_MS))
    servers = servers_of(driven)
    cases: dict[str, Case] = {}
    with (
        Watch(servers, name, incarnation(driven.rest, name), PARTITIONS) as watch,
        SteadyRows(driven.stream, topic) as rows,
    ):
        wait_for_rows(watch, [1_000] * PARTITIONS, 120)
        context.show(f"{name}: warming up")
        for _ in range(2):
            _round(driven, watch, rows, name, Size("warm", 0, 1), _no_case())
        for state, enter, leave in (
            ("healthy", _nothing, _nothing), ("hanging", store.hang, store.answer), ("failing", store.kill, store.start)
        ):  # fmt: skip
            enter()
            try:
                cases[state] = _no_case()
                for number in range(size.rounds):
                    _round(driven, watch, rows, name, size, cases[state])
                    context.show(f"{name}, store {state}, round {number + 1}: {_told(cases[state])}")
            finally:
                leave()
        if rows.failure is not None:
            raise rows.failure
    driven.rest.call("DELETE", f"/tables/{name}")
    return cases


def _options(settings: dict[str, str]) -> tuple[str, ...]:
    """Of `cremant up`."""
    return ("--store-uri", settings["store_uri"], "--set", f"store_properties={settings['store_properties']}")


def _nothing() -> None:
    pass


def _no_case() -> Case:
    return Case({True: [], False: []}, {True: [], False: []}, [], [], [])


def _round(driven: Driven, watch: Watch, rows: SteadyRows, name: str, size: Size, case: Case) -> None:
    """A span with commits and one without, in turns the one or the other first."""
    if size.fill:
        rows.fill(size.fill)
        wait_for_rows(watch, list(rows.rows), _FILL_DEADLINE_S)
        time.sleep(_SETTLE_S)
    before = set(copies(driven.rest, name))
    if quiet_first := len(case.slices) % 2 == 1:
        _quiet(driven, watch, name, case)
    began_s = time.monotonic()
    driven.rest.call("POST", f"/tables/{name}/forceCommit")
    took_s = _watch_copies(driven.rest, name, before, began_s)
    case.slices.append(max(1, int(took_s / SLICE_S)))
    _take(watch, began_s, case, commits=True)
    made = set(copies(driven.rest, name)) - before
    case.commits.append(len(made) // PARTITIONS)
    case.build_ms.extend(_build_ms(driven, made))
    if not quiet_first:
        _quiet(driven, watch, name, case)


def _quiet(driven: Driven, watch: Watch, name: str, case: Case) -> None:
    """As long as the last span with commits, with the same questions to the controller."""
    time.sleep(_LOOK_EVERY_S)
    began_s, before = time.monotonic(), set(copies(driven.rest, name))
    while time.monotonic() < began_s + case.slices[-1] * SLICE_S:
        time.sleep(_LOOK_EVERY_S)
        if made := set(copies(driven.rest, name)) - before:
            raise ClusterError(f"{name}: {sorted(made)} ended in a span that is to be without commits")
    _take(watch, began_s, case, commits=False)


def _watch_copies(rest: Rest, name: str, before: set[str], began_s: float) -> float:
    """Until both servers hold a new segment of each partition, and a slice at least. Returns the seconds they took."""
    done_s: float | None = None
    while done_s is None or time.monotonic() < began_s + SLICE_S:
        made = [segment for key, segment in copies(rest, name).items() if key not in before]
        if done_s is None and len(made) >= PARTITIONS and all(len(segment["holders"]) == 2 for segment in made):
            done_s = time.monotonic() - began_s
        if time.monotonic() - began_s > _COMMIT_DEADLINE_S:
            raise ClusterError(f"{name}: a forced commit is not done after {_COMMIT_DEADLINE_S:.0f} s: {made}")
        time.sleep(_LOOK_EVERY_S)
    return done_s


def _take(watch: Watch, began_s: float, case: Case, *, commits: bool) -> None:
    for number in range(case.slices[-1]):
        from_s = began_s + number * SLICE_S
        for times in watch.replicas():
            found = gaps_ms(times, from_s, from_s + SLICE_S)
            case.gaps[commits] += found
            case.longest[commits].append(max(found))


def _build_ms(driven: Driven, segments: set[str]) -> list[float]:
    assert driven.local is not None
    lines = [
        line
        for log in driven.local.data_dir.glob("server-*/log.jsonl")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    built = (json.loads(line) for line in lines if '"segment built"' in line)
    return [float(entry["elapsed_ms"]) for entry in built if entry["segment"] in segments]


# --- shared with `outage` ---------------------------------------------------------------------------------------------


def best_effort(config: dict[str, Any], upload_wait_ms: int) -> dict[str, Any]:
    completion = {"storePolicy": "STORE_BEST_EFFORT", "uploadWaitMs": upload_wait_ms}
    config["segmentsConfig"] |= {"peerSegmentDownloadScheme": "http", "completionConfig": completion}
    return config


def servers_of(driven: Driven) -> dict[str, str]:
    assert driven.local is not None
    return {name: url for name, url in driven.local.ready["roles"].items() if name.startswith("server")}


def incarnation(rest: Rest, table: str) -> str:
    return str(rest.call("GET", "/internal/v1/view")["tables"][table]["record"]["incarnation"])


def copies(rest: Rest, table: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = rest.call("GET", f"/tables/{table}/copies")["segments"]
    return found


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(case: Case) -> dict[str, float]:
    """`longest`: the median of the longest gaps of the slices."""
    found: dict[str, float] = {}
    measures: dict[str, Callable[[bool], float]] = {
        "gap_p50": lambda commits: percentile(case.gaps[commits], 0.5),
        "gap_p99": lambda commits: percentile(case.gaps[commits], 0.99),
        "gap_max": lambda commits: max(case.gaps[commits]),
        "longest": lambda commits: median(case.longest[commits]),
    }
    for name, measure_of in measures.items():
        found[name], found[f"{name}_without"] = measure_of(True), measure_of(False)
        found[f"{name}_ratio"] = found[name] / found[f"{name}_without"]
    found["commits"] = sum(case.commits)
    found["build"] = median(case.build_ms) if case.build_ms else 0.0
    return found


def table(metrics: dict[str, Any], sizes: list[str]) -> str:
    """Markdown, as in bench/README.md; with commits / without."""
    lines = [
        "| Segments, store | Build | Commits | Gap p50 | p99 | longest of a slice | longest | Ratios p99, slice |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        for state in STORES:
            of = {key: metrics[f"{size}_{state}_{key}"] for key in _TABLE}
            pairs = " | ".join(f"{of[name]:.0f} / {of[f'{name}_without']:.0f} ms" for name in _PAIRS)
            lines.append(
                f"| {size}, {state} | {of['build'] / 1000:.1f} s | {of['commits']:.0f} | {pairs} "
                f"| {of['gap_p99_ratio']:.2f}, {of['longest_ratio']:.2f} |"
            )
    return "\n".join(lines)


_PAIRS = ("gap_p50", "gap_p99", "longest", "gap_max")
_TABLE = (
    "build", "commits", "gap_p99_ratio", "longest_ratio", *_PAIRS, *(f"{name}_without" for name in _PAIRS)
)  # fmt: skip


def _told(case: Case) -> str:
    found = figures(case)
    return (
        f"p99 {found['gap_p99']:.0f} / {found['gap_p99_without']:.0f} ms, longest {found['longest']:.0f} / "
        f"{found['longest_without']:.0f} ms, max {found['gap_max']:.0f} / {found['gap_max_without']:.0f} ms, "
        f"builds {found['build']:.0f} ms"
    )
