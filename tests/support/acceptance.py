# SPDX-License-Identifier: Apache-2.0
"""`scripts/acceptance`: acceptance suites on a fresh cluster, judged against the list of expected failures.

The suites and their runner are somebody else's (`DIR/run-all`, `DIR/suites`): this starts a cluster from the real
command line on free ports, tells the runner how to fill a stream of it, reads its reports, and decides. Strict all
ways: a query that fails and is not listed, one that is listed and passes, and one that is listed and that no suite has,
fail the run.

One table at a time is in the cluster: a table that cannot be loaded fails its own queries, not its suite's. That costs
half a minute of the two that all suites take.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from bench.cluster import LocalCluster, command

EXPECTED_FAILURES = Path(__file__).resolve().parents[1] / "acceptance-expected-failures.txt"
WHOLE = "*"
RUN_DEADLINE_S = 1_500.0
#: Replace the Kafka properties of the suites' table configs (null removes one).
EMBEDDED_STREAM: dict[str, str | None] = {
    "streamType": "embedded",
    "stream.embedded.topic.name": "${TOPIC}",
    "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
    "stream.kafka.topic.name": None,
    "stream.kafka.broker.list": None,
    "stream.kafka.consumer.prop.auto.offset.reset": None,
    "stream.kafka.consumer.factory.class.name": None,
    "stream.kafka.consumer.type": None,
    "stream.kafka.decoder.class.name": None,
}


class Verdict(NamedTuple):
    """What became of the queries of one suite."""

    suite: str
    passed: int
    expected: list[str]
    failed: list[tuple[str, str, str]]  # id, SQL, first problem
    unexpected_passes: list[str]
    unknown: list[str]  # listed, but not among the suite's queries
    load_s: float


def read_expected(path: Path) -> dict[str, dict[str, str]]:
    """suite -> id (or WHOLE) -> reason."""
    expected: dict[str, dict[str, str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, reason = line.partition(" ")
        suite, slash, query = name.partition("/")
        if not slash or not reason.strip():
            sys.exit(f"{path.name}:{number}: expected `suite/id  reason`, found {line!r}")
        expected.setdefault(suite, {})[query] = reason.strip()
    return expected


def judge(report: dict[str, Any], expected: dict[str, str]) -> Verdict:
    """A query asked more than once (before and after a forced commit) passes if it passed each time."""
    problems: dict[str, tuple[str, list[str]]] = {}
    for query in report["queries"]:
        _, known = problems.setdefault(query["id"], (query["sql"], []))
        known.extend(f"[{query['phase']}] {text}" if query["phase"] else text for text in query["problems"])
    failed = [(name, sql, found[0]) for name, (sql, found) in problems.items() if found and name not in expected]
    return Verdict(
        suite=report["suite"],
        passed=sum(1 for _, found in problems.values() if not found),
        expected=[name for name, (_, found) in problems.items() if found and name in expected],
        failed=failed,
        unexpected_passes=[name for name, (_, found) in problems.items() if not found and name in expected],
        unknown=[name for name in expected if name not in problems],
        load_s=float(report["load_seconds"]),
    )


def unknown_suites(root: Path, expected: dict[str, dict[str, str]]) -> list[str]:
    """Suites that are listed and do not exist."""
    return sorted(expected.keys() - {path.name for path in (root / "suites").iterdir() if path.is_dir()})


def accepted_tables(suite: Path, controller: str) -> Iterator[str]:
    """Names of a suite's tables that the controller would take, although the whole suite is listed."""
    for table in sorted(suite.rglob("table.json")):
        config = json.loads(table.read_text(encoding="utf-8"))
        streams = config.get("tableIndexConfig", {}).get("streamConfigs", {})
        merged = {**streams, **EMBEDDED_STREAM, "stream.embedded.topic.name": "any"}
        config["tableIndexConfig"]["streamConfigs"] = {key: value for key, value in merged.items() if value is not None}
        schema = json.loads((table.parent / "schema.json").read_text(encoding="utf-8"))
        document = {"tableName": config["tableName"], "schema": schema, "realtime": config}
        answer = httpx.post(f"{controller}/tableConfigs/validate", json=document, timeout=30.0)
        if answer.status_code == 200:
            yield str(config["tableName"])


def run_suites(root: Path, suites: list[str], cluster: LocalCluster, reports: Path, options: list[str]) -> float:
    """Calls the suites' runner; its progress goes to our output. Returns the seconds it took."""
    stream = reports / "stream.json"
    stream.write_text(json.dumps(EMBEDDED_STREAM), encoding="utf-8")
    ours = ["--data-dir", str(cluster.data_dir)]
    commands = {
        "--create-topic": [*command("topic", "create"), "{topic}", "--partitions", "{partitions}", *ours],
        "--delete-topic": [*command("topic", "delete"), "{topic}", *ours],
        "--produce": [*command("produce"), "{topic}", "{keyed}", "--keyed", *ours],
    }
    arguments = [str(root / "run-all"), "--controller", cluster.rest.controller, "--broker", cluster.rest.broker]
    arguments += ["--stream-config", str(stream), "--one-by-one"]
    for option, words in commands.items():
        arguments += [option, " ".join(word if word.startswith("{") else shlex.quote(word) for word in words)]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ACCEPTANCE_SUITES": " ".join(suites),
        "ACCEPTANCE_REPORTS": str(reports),
    }
    started = time.monotonic()
    subprocess.run([*arguments, *options], env=environment, check=False, timeout=RUN_DEADLINE_S)
    return time.monotonic() - started


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster is stopped
    parser = argparse.ArgumentParser(prog="scripts/acceptance", description="Acceptance suites on a fresh cluster.")
    parser.add_argument("directory", type=Path, help="has `run-all` and `suites/`")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--expected", type=Path, default=EXPECTED_FAILURES, help="list of expected failures")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the cluster")
    arguments, options = parser.parse_known_args()
    root = arguments.directory.resolve()
    if not (root / "run-all").is_file():
        parser.error(f"{root} has no run-all")
    expected = read_expected(arguments.expected)
    chosen = os.environ.get("ACCEPTANCE_SUITES", "").split()
    named = chosen or sorted(path.name for path in (root / "suites").iterdir() if path.is_dir())
    refused = [name for name in named if WHOLE in expected.get(Path(name).name, {})]
    suites = [name for name in named if name not in refused]
    # A run of some suites knows nothing of the others, which may lie elsewhere.
    unknown = [] if chosen else unknown_suites(root, expected)

    with tempfile.TemporaryDirectory(prefix="cremant-acceptance-") as scratch:
        reports = Path(os.environ.get("ACCEPTANCE_REPORTS") or Path(scratch) / "reports").resolve()
        reports.mkdir(parents=True, exist_ok=True)
        for old in reports.glob("*.json"):
            old.unlink()
        settings = Path(scratch) / "settings.toml"
        settings.write_text("\n".join(map(_toml, arguments.set)) + "\n", encoding="utf-8")
        started = time.monotonic()
        with LocalCluster(
            Path(scratch) / "data", servers=arguments.servers, options=("--config", str(settings))
        ) as cluster:
            print(f"cluster up after {time.monotonic() - started:.1f} s", flush=True)
            taken = {name: list(accepted_tables(root / "suites" / name, cluster.rest.controller)) for name in refused}
            took = run_suites(root, suites, cluster, reports, options) if suites else 0.0
        verdicts = [
            judge(report, expected.get(report["suite"], {}))
            for path in sorted(reports.glob("*.json"))
            if path.name != "stream.json"
            for report in json.loads(path.read_text(encoding="utf-8"))
        ]
    if any(option.startswith("--only") for option in options):
        verdicts = [verdict._replace(unknown=[]) for verdict in verdicts]  # the other queries were not asked
    return conclude(verdicts, expected, suites, taken, unknown, took)


def conclude(
    verdicts: list[Verdict],
    expected: dict[str, dict[str, str]],
    suites: list[str],
    taken: dict[str, list[str]],
    unknown: list[str],
    took_s: float,
) -> int:
    """Prints the summary; returns the exit status."""
    print(f"\n== acceptance: {took_s:.0f} s\n\n{'suite':<18}{'passed':>8}{'expected':>10}{'FAILED':>8}{'load':>9}")
    wrong: list[str] = []
    for verdict in verdicts:
        print(
            f"{verdict.suite:<18}{verdict.passed:>8}{len(verdict.expected):>10}{len(verdict.failed):>8}"
            f"{verdict.load_s:>7.1f} s"
        )
        wrong += [
            f"failed: {verdict.suite}/{name}\n    {sql[:300]}\n    {why[:300]}" for name, sql, why in verdict.failed
        ]
        wrong += [
            f"passes, although listed as failing ({expected[verdict.suite][name]}): {verdict.suite}/{name}"
            for name in verdict.unexpected_passes
        ]
        wrong += [f"listed, but the suite has no such query: {verdict.suite}/{name}" for name in verdict.unknown]
    for name, tables in taken.items():
        print(f"{name:<18}not loaded: {expected[name][WHOLE]}")
        wrong += [f"{name} is listed as refused, but its table {table} is accepted" for table in tables]
        idle = expected[name].keys() - {WHOLE}
        wrong += [f"{name} is listed as refused: {name}/{query} says nothing" for query in sorted(idle)]
    wrong += [f"listed, but there is no such suite: {name}" for name in unknown]
    wrong += [f"suite {name} did not run" for name in suites if Path(name).name not in {v.suite for v in verdicts}]
    print("\n" + "\n".join(wrong) if wrong else "\nall as expected")
    if wrong:
        print(f"\n{len(wrong)} not as expected ({EXPECTED_FAILURES.name} lists what is)")
    return 1 if wrong else 0


def _toml(text: str) -> str:
    name, _, value = text.partition("=")
    return f"{name} = {value if value.lstrip('-').isdigit() else json.dumps(value)}"


if __name__ == "__main__":
    sys.exit(main())
