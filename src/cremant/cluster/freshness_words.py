# SPDX-License-Identifier: Apache-2.0
"""What is the matter with a stage that holds a partition back, in words. Pure."""

from __future__ import annotations

from cremant.cluster.stages import SILENT_AFTER_MS
from cremant.model.cluster import BLOCKED, CATCHING_UP, TableRecord, TailReport
from cremant.wire.freshness import Upstream


def reason(record: TableRecord, upstream: Upstream | None, stage: str, tail: TailReport, *, responds: bool) -> str:
    """Why `stage` holds back what a replica, whose word is `tail`, shows of a partition."""
    match stage:
        case "stream":
            return f"the stream does not answer: {stream_error(upstream)}"
        case "pipeline":
            return _of_pipeline(record, upstream)
        case "log":
            return f"the epoch log does not answer the server{': ' + tail.error if tail.error else ''}"
        case "server":
            if not responds:
                return "the server does not answer"
            if tail.error is not None:
                return tail.error
            if tail.state == CATCHING_UP:
                done, total = tail.log_records
                return f"it catches up: {done:,} of {total:,} records of its log"
            if tail.watermark.freshness_ms is None:
                return "it has no row yet whose time is known"
            if tail.state in BLOCKED or tail.state in ("waiting", "stopped"):
                return f"it takes no rows ({tail.state})"
            behind = (tail.log_end or 0) - tail.log_offset
            return f"it reads {behind:,} records of the epoch log" if behind > 0 else "it applies what the log has"
        case _:
            if upstream is None:
                return "the controller does not answer"
            if tail.watermark.freshness_ms is None:
                return "nothing came yet whose time is known"
            return "reports on it are older than that"


def stream_error(upstream: Upstream | None) -> str | None:
    """Why the stream could not be read, as the controller or the pipeline found it."""
    if upstream is None:
        return None
    return upstream.stream_error or (upstream.pipeline.stream_error if upstream.pipeline is not None else None)


def _of_pipeline(record: TableRecord, upstream: Upstream | None) -> str:
    if not record.enabled:
        return "the table is disabled"
    if record.paused:
        comment = record.pause_comment
        return f"the table is paused{': ' + comment if comment else ''}"
    if upstream is None or upstream.pipeline is None:
        return "no pipeline has said anything of the table"
    if (upstream.age_ms or 0) > SILENT_AFTER_MS:
        return f"the pipeline was last heard {(upstream.age_ms or 0) / 1000:.1f} s ago"
    report = upstream.pipeline
    if report.state != "running":
        return f"the pipeline is {report.state}{': ' + report.error if report.error else ''}"
    if report.rebuilding:
        return "the pipeline rebuilds the keys"
    return "the pipeline reads, decodes and closes epochs"
