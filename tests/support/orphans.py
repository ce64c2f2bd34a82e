# SPDX-License-Identifier: Apache-2.0
"""Pipelines that were believed dead and go on, and checkpoints from the past, made on purpose with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cluster import LocalCluster, command


@contextlib.contextmanager
def second_pipeline(cluster: LocalCluster, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another pipeline process on the same log, with a disk of its own: what an operator starts on a second machine."""
    directory.mkdir(parents=True)
    with (directory / "log.jsonl").open("wb") as log:
        process = subprocess.Popen(
            command(
                "start", "pipeline", "--data-dir", str(directory), "--port", "0",
                "--controller", cluster.rest.controller, "--log-dir", cluster.ready["logDir"],
                "--store-uri", str(cluster.data_dir / "store"), *options,
            ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def pipeline_of(cluster: LocalCluster) -> dict[str, Any]:
    """Who holds the table's lease, the generation in force, and what the holder reports."""
    (table,) = json.loads(cluster.run("status", "--json").stdout)["tables"]
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
