# SPDX-License-Identifier: Apache-2.0
"""Pipelines that were believed dead and go on, and checkpoints from the past, made on purpose with real processes."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from bench.cluster import LocalCluster
from bench.cluster import second_pipeline as second_pipeline


def pipeline_of(cluster: LocalCluster) -> dict[str, Any]:
    """Who holds the table's lease, the generation in force, and what the holder reports."""
    (table,) = cluster.rest.call("GET", "/status")["tables"]
    pipeline: dict[str, Any] = table["pipeline"]
    return pipeline


def wait_for_another_holder(cluster: LocalCluster, old: str, deadline_s: float) -> dict[str, Any]:
    """Until another pipeline holds the lease and runs (its report is of the generation in force)."""
    until = time.monotonic() + deadline_s
    while True:
        pipeline = pipeline_of(cluster)
        report = pipeline["report"] or {}
        is_new = pipeline["holder"] not in (None, old)
        if is_new and report.get("state") == "running" and report["generation"] == pipeline["generation"]:
            return pipeline
        assert time.monotonic() < until, f"nobody took over from {old} within {deadline_s} s: {pipeline}"
        time.sleep(0.25)


def told(pipeline: dict[str, Any]) -> str:
    return f"{pipeline['holder']} of generation {pipeline['generation']}"


def copy_while_it_runs(source: Path, target: Path) -> None:
    """A directory of a running process. Spark deletes old files of its checkpoint meanwhile: they are not part of the
    copy."""
    shutil.copytree(source, target, ignore_dangling_symlinks=True, copy_function=_copy_if_there)


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)
