# SPDX-License-Identifier: Apache-2.0
"""How long does a new user wait? Seconds from `cremant quickstart` in an installed environment to the first answer, in
an empty directory and again in the directory that the first run left. On Kafka: from `cremant up` to the rows of a
table that is created as soon as it is up, and again in the directory that the first run left."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster import ClusterError, LocalCluster, command
from bench.context import Context, KafkaStream, table_config
from bench.dataset import SCHEMA, fill

_ROWS = 10_000
_FREE_PORTS = [f"--{role}-port=0" for role in ("controller", "broker", "server", "pipeline")]


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    if not context.drives_own_cluster:
        raise ClusterError("start measures its own cluster: leave --controller and --broker away")
    rounds = 1 if context.quick else 5
    first: list[float] = []
    again: list[float] = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory:
            if context.log == "kafka":
                with context.brokers(Path(directory)) as brokers:
                    cold, warm = _on_kafka(Path(directory) / "data", brokers)
            else:
                cold, warm = _first_answer_s(directory), _first_answer_s(directory)
        first.append(cold)
        again.append(warm)
        context.show(f"round {number + 1}: first {first[-1]:.1f} s, restart {again[-1]:.1f} s")
    return {"rounds": rounds}, {"first_answer_s": median(first), "restart_s": median(again)}


def _first_answer_s(directory: str) -> float:
    done = subprocess.run(
        command("quickstart", "--data-dir", directory, *_FREE_PORTS, "--stop-after-s", "1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"First answer after ([\d.]+) s", done.stderr)
    if done.returncode or not found:
        raise ClusterError(f"quickstart failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return float(found.group(1))


def _on_kafka(directory: Path, brokers: str) -> tuple[float, float]:
    stream = KafkaStream(brokers)
    topic = f"start-{time.time_ns() // 1_000_000}"
    stream.create(topic, 4)
    fill(stream, topic, 4, _ROWS)
    cluster = LocalCluster(directory, servers=2, options=("--kafka", brokers))
    took = []
    for attempt in range(2):
        started = time.monotonic()
        with cluster:
            if not attempt:
                cluster.rest.add_table(SCHEMA, table_config("bench", stream.properties(topic)))
            cluster.rest.wait_for("SELECT COUNT(*) FROM bench", [[_ROWS]], deadline_s=180)
            took.append(time.monotonic() - started)
    return took[0], took[1]
