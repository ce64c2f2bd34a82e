# SPDX-License-Identifier: Apache-2.0
"""How long does a new user wait? Seconds from `cremant quickstart` in an installed environment to the first answer, in
an empty directory and again in the directory that the first run left."""

from __future__ import annotations

import re
import subprocess
import tempfile
from statistics import median
from typing import Any

from bench.cluster import ClusterError, command
from bench.context import Context

_FREE_PORTS = [f"--{role}-port=0" for role in ("controller", "broker", "server", "pipeline")]


def run(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    if not context.drives_own_cluster:
        raise ClusterError("start measures its own cluster: leave --controller and --broker away")
    rounds = 1 if context.quick else 5
    first: list[float] = []
    again: list[float] = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cremant-bench-") as directory:
            first.append(_first_answer_s(directory))
            again.append(_first_answer_s(directory))
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
