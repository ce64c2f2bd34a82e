# SPDX-License-Identifier: Apache-2.0
"""`python -m bench all`: the benchmarks that have figures elsewhere to stand beside, each in a process of its own, and
one table at the end, in the form of `bench/README.md`."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pinot import FIGURES

NAMES = ("start", "freshness", "ingest", "query")
_DEADLINE_S = 1_800.0
#: What a benchmark that is interrupted has to stop its cluster.
_STOP_S = 60.0
#: Metrics that are not milliseconds.
_UNITS = {
    "rate_per_s": "1/s", "rows_per_s": "1/s", "steady_rows_per_s": "1/s", "qps4_point": "1/s", "qps4_group_low": "1/s",
    "first_answer_s": "s", "restart_s": "s", "first_rows_s": "s", "cpu_s_per_million_rows": "s",
}  # fmt: skip
#: Of those that there are several of, by the ends of their names.
_UNITS_BY_END = {"rate_per_s": "1/s", "_us": "µs", "segments": "", "epochs": "", "optimistic": ""}


def run_all(arguments: argparse.Namespace, names: Sequence[str] = NAMES, *, deadline_s: float = _DEADLINE_S) -> int:
    """A benchmark that fails, or does not end, costs its own figures only."""
    reports: list[dict[str, Any]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory:
        for name in names:
            if name == "start" and arguments.controller:
                continue  # it measures its own
            file = Path(directory) / f"{name}.json"
            command = [sys.executable, "-m", "bench", name, "--json", str(file), *_passed_on(arguments)]
            if problem := _run(command, deadline_s):
                failed.append(f"{name} ({problem})")
            else:
                reports.append(json.loads(file.read_text(encoding="utf-8")))
    print(table(reports))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    if failed:
        print(f"bench all: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(command: list[str], deadline_s: float) -> str:
    """Empty, or what went wrong. At the deadline it is interrupted as by Ctrl-C, so that its cluster stops, too."""
    process = subprocess.Popen(command)
    try:
        status = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"not done after {deadline_s:.0f} s"
    return f"exit status {status}" if status else ""


def _passed_on(arguments: argparse.Namespace) -> list[str]:
    options = ["--quick"] if arguments.quick else []
    for name in ("log", "controller", "broker", "kafka"):
        if value := getattr(arguments, name):
            options += [f"--{name}", value]
    return options


def table(reports: list[dict[str, Any]]) -> str:
    """Markdown: benchmark, metric, figure, Apache Pinot's."""
    lines = ["| Benchmark | Metric | Figure | Apache Pinot |", "|---|---|---|---|"]
    for report in reports:
        first = f"{report['name']}, {report['parameters']['log']} log"
        for metric, value in report["metrics"].items():
            pinot = FIGURES.get(report["name"], {}).get(metric, "")
            lines.append(f"| {first} | `{metric}` | {told(metric, value)} | {pinot} |")
            first = ""
    return "\n".join(lines)


def told(metric: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    digits = 0 if value >= 100 else 1
    by_end = (unit for end, unit in _UNITS_BY_END.items() if metric.endswith(end))
    return f"{value:,.{digits}f} {_UNITS.get(metric) or next(by_end, 'ms')}".rstrip()
