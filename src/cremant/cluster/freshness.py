# SPDX-License-Identifier: Apache-2.0
"""How fresh a table is, replica by replica, in which state each is, and where its lag is spent. Pure.

A partition is as fresh as the freshest of its replicas that answer: one of those would be asked. A table is as fresh as
its least fresh partition; a partition that nobody answers for makes it unknown (states and stages: stages.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cremant.cluster.freshness_words import reason, stream_error
from cremant.cluster.stages import (
    LOG_SILENT_AFTER_MS,
    SILENT_AFTER_MS,
    Pipe,
    Server,
    greatest,
    promise,
    stages,
    state_of,
)
from cremant.model.cluster import PartitionView, PipelineReport, StreamProgress, TableView, TailReport
from cremant.model.offsets import weakest
from cremant.wire.freshness import (
    PartitionFreshness,
    PipelineFreshness,
    ReplicaFreshness,
    TableFreshness,
    Upstream,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What there is to judge a table by. `tails`: partition -> server -> its last word; `responding`: servers of which
    it is of now; `serving`: (partition, server) that queries would be answered by; `live`: servers that the cluster
    believes alive. `moved_ms`: when the visible offset of (partition, server)
    was last seen to move. `upstream`: of the controller; None: it did not answer. `ends_read_ms`: when its ends of the
    stream were read."""

    table: TableView
    now_ms: int
    tails: Mapping[int, Mapping[str, TailReport]]
    responding: Collection[str]
    serving: Collection[tuple[int, str]]
    live: Collection[str]
    upstream: Upstream | None
    ends_read_ms: int
    moved_ms: Mapping[tuple[int, str], int]
    observer: str


def freshness_of_table(seen: Observed) -> TableFreshness:
    table, sla = seen.table, seen.table.record.config.freshness_sla
    partitions = tuple(_partition(seen, view) for view in table.partitions)
    lags = [one.freshness_lag_ms for one in partitions]
    lag_ms = None if not lags or None in lags else max(lag for lag in lags if lag is not None)
    ages = [one.last_event_age_ms for one in partitions if one.last_event_age_ms is not None]
    rows = [one.lag_rows for one in partitions]
    worst = max(partitions, key=badness, default=None)
    sla_state, alert = promise(
        lag_ms, min(ages, default=None), seen.now_ms, sla.max_lag_ms, sla.max_event_age_ms, _why(worst)
    )
    return TableFreshness(
        table=table.name,
        observer=seen.observer,
        time_ms=seen.now_ms,
        state=max((one.state for one in partitions), key=_STATES.index, default="unknown"),
        freshness_lag_ms=lag_ms,
        min_fresh_time_ms=None if lag_ms is None else seen.now_ms - lag_ms,
        last_event_age_ms=min(ages, default=None),
        freshness_source=weakest(_best(one).freshness_source for one in partitions if one.replica is not None),
        lag_rows=None if None in rows else sum(one for one in rows if one is not None),
        num_partitions_expected=len(partitions),
        num_partitions_reporting=sum(one.replica is not None for one in partitions),
        freshness_sla_ms=sla.max_lag_ms,
        max_event_age_ms=sla.max_event_age_ms,
        sla_state=sla_state,
        alert=alert,
        worst_partition=None if worst is None else worst.partition,
        servers_not_responding=tuple(sorted(_replicas(table) - set(seen.responding))),
        pipeline=_pipeline(seen),
        partitions=partitions,
    )


#: From harmless to bad, as a table's state sums its partitions' up.
_STATES = ("idle", "caughtUp", "paused", "behind", "unknown", "stuck")


def badness(one: PartitionFreshness) -> tuple[bool, int]:
    """Greater: it holds its table back more."""
    return one.freshness_lag_ms is None, one.freshness_lag_ms or 0


def _why(worst: PartitionFreshness | None) -> str:
    if worst is None:
        return "the table has no partitions"
    return f"partition {worst.partition}, {worst.held_back_by or 'nothing'}: {worst.reason or 'all is well'}"


def _best(one: PartitionFreshness) -> ReplicaFreshness:
    return next(replica for replica in one.replicas if replica.instance == one.replica)


def _replicas(table: TableView) -> set[str]:
    return {instance for view in table.partitions for instance in view.record.replicas}


def _partition(seen: Observed, view: PartitionView) -> PartitionFreshness:
    record = view.record
    progress = _progress(seen.upstream, record.partition)
    end, read_ms = _stream_end(seen, record.partition, progress)
    said = seen.tails.get(record.partition, {})
    replicas = tuple(
        _replica(seen, record.partition, name, said.get(name), progress, _ahead(said.get(name), end, read_ms))
        for name in sorted({*record.replicas, *said})
    )
    best = max((one for one in replicas if one.serves), key=_freshest, default=None)
    held = best if best is not None else max(replicas, key=_freshest, default=None)
    return PartitionFreshness(
        partition=record.partition,
        replica=None if best is None else best.instance,
        state="unknown" if best is None else best.state,
        freshness_lag_ms=None if best is None else best.freshness_lag_ms,
        fresh_time_ms=None if best is None else best.fresh_time_ms,
        last_event_age_ms=None if held is None else held.last_event_age_ms,
        visible_offset=None if held is None else held.visible_offset,
        stream_end=end,
        stream_read_age_ms=None if read_ms is None else max(0, seen.now_ms - read_ms),
        lag_rows=None if best is None else best.lag_rows,
        stages_ms=None if best is None else best.stages_ms,
        held_back_by="server" if best is None else best.held_back_by,
        reason="no server answers for it" if best is None else best.reason,
        replicas=replicas,
    )


def _freshest(one: ReplicaFreshness) -> tuple[int, int]:
    return one.fresh_time_ms or -1, one.visible_offset or -1


def _replica(
    seen: Observed, partition: int, name: str, tail: TailReport | None, progress: StreamProgress | None,
    lag_rows: int | None,
) -> ReplicaFreshness:  # fmt: skip
    now_ms, responds = seen.now_ms, name in seen.responding
    if tail is None:
        return ReplicaFreshness(
            instance=name, live=name in seen.live, responds=responds, serves=False, report_age_ms=None, state="unknown",
            tail_state=None, freshness_lag_ms=None, fresh_time_ms=None, freshness_source=None, visible_offset=None,
            epoch=None, lag_rows=None, last_event_age_ms=None, last_indexed_ms=None, rejected=0, log_offset=None,
            log_end=None, error=None, stages_ms=None, held_back_by="server",
            reason="it says nothing of this partition" if responds else "it does not answer",
        )  # fmt: skip
    mark = tail.watermark
    fresh_ms = mark.freshness_ms
    lag_ms = None if fresh_ms is None else max(0, now_ms - fresh_ms)
    age_ms = None if mark.max_ingestion_ms is None else max(0, now_ms - mark.max_ingestion_ms)
    steps_ms = [tail.last_indexed_ms, seen.moved_ms.get((tail.partition, name)), fresh_ms]
    quiet_ms = now_ms - max((step for step in steps_ms if step is not None), default=now_ms)
    said = Server(
        said_ms=tail.at_ms or now_ms, answers=responds, log_silent_since_ms=_log_silent_since_ms(tail, responds)
    )
    split = None if fresh_ms is None else stages(fresh_ms, now_ms, said, _pipe(seen, progress))
    stage = greatest(split) if split is not None else _suspect(seen, tail, lag_rows)
    return ReplicaFreshness(
        instance=name,
        live=name in seen.live,
        responds=responds,
        serves=(partition, name) in seen.serving,
        report_age_ms=max(0, now_ms - tail.at_ms) if tail.at_ms else None,
        state=state_of(_is_paused(seen.table), responds, lag_ms, age_ms, lag_rows, quiet_ms),
        tail_state=tail.state,
        freshness_lag_ms=lag_ms,
        fresh_time_ms=fresh_ms,
        freshness_source=mark.stamped_by,
        visible_offset=mark.next_offset,
        epoch=mark.epoch,
        lag_rows=lag_rows,
        last_event_age_ms=age_ms,
        last_indexed_ms=tail.last_indexed_ms,
        rejected=tail.rejected,
        log_offset=tail.log_offset,
        log_end=tail.log_end,
        error=tail.error,
        stages_ms=split,
        held_back_by=stage,
        reason=None if stage is None else reason(seen.table.record, seen.upstream, stage, tail, responds=responds),
    )


def _suspect(seen: Observed, tail: TailReport, lag_rows: int | None) -> str:
    """Who keeps a replica from a time that it could be judged by: the first of those that a row passes."""
    upstream = seen.upstream
    if _stream_silent(seen):
        return "stream"
    report = upstream.pipeline if upstream is not None else None
    if upstream is not None and (
        report is None or report.state != "running" or (upstream.age_ms or 0) > SILENT_AFTER_MS
    ):
        return "pipeline"
    if tail.state != "consuming" or tail.error is not None or (tail.log_end or 0) > tail.log_offset:
        return "server"
    return "unknown" if upstream is None or not lag_rows else "pipeline"


def _is_paused(table: TableView) -> bool:
    return table.record.paused or not table.record.enabled


def _progress(upstream: Upstream | None, partition: int) -> StreamProgress | None:
    if upstream is None or upstream.pipeline is None:
        return None
    return next((one for one in upstream.pipeline.partitions if one.partition == partition), None)


def _stream_end(seen: Observed, partition: int, progress: StreamProgress | None) -> tuple[int | None, int | None]:
    """End of the stream and when it was read, by whoever read it last."""
    known = []
    if seen.upstream is not None and (end := seen.upstream.ends.get(partition)) is not None:
        known.append((seen.ends_read_ms, end))
    if progress is not None and progress.stream_end is not None and progress.read_at_ms is not None:
        known.append((progress.read_at_ms, progress.stream_end))
    read_ms, newest = max(known, default=(None, None))
    return newest, read_ms


def _ahead(tail: TailReport | None, end: int | None, read_ms: int | None) -> int | None:
    """Rows of the stream that are not visible. Who was proven to be at the end since it was read is not behind: offsets
    that hold no message (ends of transactions) are nobody's rows."""
    if tail is None or end is None:
        return None
    proven_ms = tail.watermark.caught_up_at_ms
    if proven_ms is not None and read_ms is not None and proven_ms >= read_ms:
        return 0
    return max(0, end - tail.watermark.next_offset)


def _log_silent_since_ms(tail: TailReport, responds: bool) -> int | None:
    """When the log last answered this server, if it does not any more; a server that works off what it got, or that
    does not answer itself, proves nothing."""
    read_ms = tail.log_read_at_ms
    if read_ms is None or not responds or tail.at_ms - read_ms <= LOG_SILENT_AFTER_MS:
        return None
    at_end = tail.log_end is not None and tail.log_offset <= tail.log_end
    return read_ms if tail.state == "retrying" or (at_end and tail.state == "consuming") else None


def _pipe(seen: Observed, progress: StreamProgress | None) -> Pipe:
    upstream = seen.upstream
    if upstream is None:
        return Pipe(closed_ms=None, read_ms=None, stream_silent=False, known=False)
    report = upstream.pipeline
    if progress is None:  # it has nothing to tell, or runs not at all: then nothing but it holds rows back
        runs = report is not None and report.state == "running" and (upstream.age_ms or 0) <= SILENT_AFTER_MS
        return Pipe(closed_ms=None, read_ms=None, stream_silent=_stream_silent(seen), known=not runs)
    times_ms = [time_ms for time_ms in (progress.max_ingestion_ms, progress.caught_up_at_ms) if time_ms is not None]
    return Pipe(
        closed_ms=max(times_ms, default=None),
        read_ms=progress.read_at_ms,
        stream_silent=_stream_silent(seen),
        known=True,
    )


def _stream_silent(seen: Observed) -> bool:
    """It does not answer; of a table that is paused, nobody minds."""
    upstream = seen.upstream
    if upstream is None or _is_paused(seen.table):
        return False
    if upstream.stream_error is not None:
        return True
    said_so = upstream.pipeline is not None and upstream.pipeline.stream_error is not None
    return said_so and not upstream.ends  # whoever reads its end proves that it is back


def _pipeline(seen: Observed) -> PipelineFreshness:
    upstream = seen.upstream
    report: PipelineReport | None = upstream.pipeline if upstream is not None else None
    if upstream is None:
        state = "unknown"
    elif report is None:
        state = "none"
    else:
        state = "silent" if (upstream.age_ms or 0) > SILENT_AFTER_MS else report.state
    return PipelineFreshness(
        instance=upstream.pipeline_id if upstream is not None else None,
        state=state,
        report_age_ms=upstream.age_ms if upstream is not None else None,
        epoch=report.epoch if report is not None and report.epoch >= 0 else None,
        error=report.error if report is not None else None,
        stream_error=stream_error(upstream),
    )
