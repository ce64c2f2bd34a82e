# SPDX-License-Identifier: Apache-2.0
"""Minutes of steady load: rows, queries, segments sealing, retention. Nothing grows that should not.

Five minutes here (`CREMANT_SOAK_MINUTES` changes it); `python -m bench soak --minutes 60` shows the same for longer.
What is allowed is judged after the warm-up, by a slope that single spikes do not move, and generously: a leak
of a kilobyte per query or a file per segment is far above it. Logs and sealed segments are judged when the load has
ended: little may be left of them then, however late a busy machine was in deleting what was due.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.cluster import LocalCluster
from bench.context import Context, LogStream
from bench.soak import (
    OPTIONS,
    RATE_PER_S,
    RESTING_LOG_BYTES,
    RESTING_SEALED_FILES,
    SEGMENT_BYTES,
    Soak,
    run_soak,
)

MINUTES = float(os.environ.get("CREMANT_SOAK_MINUTES") or 5)
#: The JVM's heap grows to its limit by design: what it may not do is go past it.
JVM_MIB_MAX = 1_024 + 600
JUDGED = ("broker", "controller", "pipeline", "server-1", "server-2", "workers")


def growth(soak: Soak, role: str, what: str) -> float:
    """What the slope adds over the time it was measured in."""
    warm = soak.warm()
    return soak.slope_per_hour(role, what) * (warm[-1].at_s - warm[0].at_s) / 3_600


@pytest.mark.timeout(MINUTES * 60 + 900)
def test_minutes_of_load_leave_memory_files_and_threads_where_they_were(
    tmp_path: Path, phase: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="soak-"))  # short: sockets of Spark's workers are in it
    monkeypatch.setenv("TMPDIR", str(temporary))
    with LocalCluster(tmp_path / "data", servers=2, options=OPTIONS) as cluster:
        stream = LogStream(Path(cluster.ready["logDir"]), SEGMENT_BYTES)
        phase(f"{MINUTES:g} minutes at {RATE_PER_S} rows/s")
        context = Context(quick=True)
        context.show = lambda text: phase(text)  # type: ignore[method-assign]
        soak = run_soak(context, cluster, stream, MINUTES * 60)
        cluster.stop()
    phase(f"{soak.rows:,} rows, {soak.queries:,} queries, {len(soak.failed)} failed")
    assert soak.restarted == []
    assert soak.failed[:3] == []
    assert soak.queries > 20 * MINUTES
    assert soak.rows > RATE_PER_S * MINUTES * 60 * 0.5

    for role in JUDGED:
        size_mib = soak.median(role, "rss_anon_kib") / 1024
        grown_mib = growth(soak, role, "rss_anon_kib") / 1024
        phase(
            f"{role}: {size_mib:.0f} MiB {grown_mib:+.1f}, files {growth(soak, role, 'files'):+.1f}, "
            f"threads {growth(soak, role, 'threads'):+.1f}"
        )
        assert grown_mib < max(40, 0.2 * size_mib), f"{role} grew by {grown_mib:.0f} MiB at {size_mib:.0f} MiB"
        assert growth(soak, role, "files") < 15, f"{role} keeps opening files"
        assert growth(soak, role, "threads") < 10, f"{role} keeps starting threads"
    assert soak.median("jvm", "rss_anon_kib") / 1024 < JVM_MIB_MAX

    warm = soak.warm()
    early = max(sample.role_files for sample in warm[: len(warm) // 2])
    late = max(sample.role_files for sample in warm[len(warm) // 2 :])
    assert late <= 1.4 * early + 60, f"files of controller, broker and pipeline grew from {early:,} to {late:,}"
    rest = soak.rest
    phase(f"{rest.after_s:.0f} s after the load: {rest.log_bytes:,} bytes of log, {rest.sealed_files} sealed files")
    assert rest.log_bytes <= RESTING_LOG_BYTES, f"{rest.log_bytes:,} bytes of log are left {rest.after_s:.0f} s later"
    assert rest.sealed_files <= RESTING_SEALED_FILES, f"{rest.sealed_files} sealed segments are past their retention"
    assert list(temporary.iterdir()) == []
    shutil.rmtree(temporary)
