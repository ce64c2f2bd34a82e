# SPDX-License-Identifier: Apache-2.0
"""How fresh an answer is, from the watermarks that came with it (design: freshness.md). Pure.

The minimum over the partitions the query needed. A partition of which some part was not answered, or whose watermark
proves nothing, makes the whole unknown: an answer never looks fresh because the living partitions are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cremant.broker.demand import NO_MARKS
from cremant.broker.response import Freshness
from cremant.broker.tokens import read_token
from cremant.cluster.gather import Gather
from cremant.cluster.shown import Mark, Shown
from cremant.model.cluster import PartitionView, TableRecord
from cremant.model.offsets import weakest
from cremant.wire.messages import PartitionAnswer, ServerAnswer


def freshness_of(
    answers: Sequence[ServerAnswer], record: TableRecord, partitions_expected: int, floors: Mapping[int, int],
    cut: int | None = None, proofs: Mapping[int, Mark] = NO_MARKS, unanswered: Collection[int] = (),
    empty: Sequence[int | None] = (),
) -> Freshness:  # fmt: skip
    """`floors`: of the query's `notBefore`. `cut`: the epoch of the answer, upsert tables; it is all of its token.
    `proofs`: what is known of the stream besides; it counts where the answer shows as much. `unanswered`: partitions of
    which something is missing. `empty`: of each partition that the table did not have at the cut, the time up to which
    it is known to have been empty."""
    tails = {tail.partition: tail for answer in answers for tail in answer.partitions}
    complete = tails if not unanswered else {number: tail for number, tail in tails.items() if number not in unanswered}
    result = Freshness(partitions_expected=partitions_expected, partitions_reporting=len(complete))
    if cut is not None and answers:  # an epoch of which nothing was shown may never come
        result.epoch, result.read_token = cut, read_token(record, cut, (), floors)
    if not tails:
        return result
    watermarks = [tail.watermark for tail in tails.values()]
    events = [mark.max_ingestion_ms for mark in watermarks if mark.max_ingestion_ms is not None]
    result.newest_event_ms = max(events, default=None)
    result.source = weakest(mark.stamped_by for mark in watermarks)
    result.partitions = {number: _mark(tail, cut, proofs.get(number)) for number, tail in complete.items()}
    known = [*empty, *(mark.fresh_ms for mark in result.partitions.values())]
    if len(complete) == partitions_expected and None not in known:
        result.fresh_ms = min(value for value in known if value is not None)
    if cut is None:
        result.epoch = min(mark.epoch for mark in watermarks)
        result.read_token = read_token(record, result.epoch, tails.values(), floors)
    return result


def _mark(tail: PartitionAnswer, cut: int | None, proof: Mark | None) -> Mark:
    watermark = tail.watermark
    offset, epoch = (tail.covered.next, watermark.epoch) if cut is None else (watermark.next_offset, cut)
    fresh_ms = watermark.freshness_ms
    # Of an upsert table both count: a rewind that this broker has not heard of yet took offsets back, not epochs.
    if proof is not None and offset >= proof.offset and (cut is None or cut >= proof.epoch):
        return Mark(offset, epoch, max(fresh_ms or 0, proof.fresh_ms or 0) or None)
    return Mark(offset, epoch, fresh_ms)


def empty_until(views: Iterable[PartitionView], shown: Shown) -> list[int | None]:
    """Of each partition: up to when replicas have proven that there is nothing in it, None: they have not."""
    found: list[int | None] = []
    for view in views:
        marks = shown.known(view.record.partition, view.record.replicas)
        proven = [mark.fresh_ms or 0 for mark in marks if mark.offset <= view.record.start_offset]
        found.append(max(proven, default=0) or None)
    return found


def provenance_of(gather: Gather) -> list[dict[str, Any]]:
    """Where the rows of each partition came from (`includeProvenance`): the consuming part with what it shows, and how
    many sealed segments, replica by replica."""
    found: list[dict[str, Any]] = []
    for answer, arrival in gather.answers:
        for tail in answer.partitions:
            mark = tail.watermark
            found.append(
                {
                    "partition": tail.partition, "origin": "consuming", "replica": arrival.server, "segments": 1,
                    "fromOffset": tail.covered.first, "nextOffset": tail.covered.next, "epoch": mark.epoch,
                    "freshnessTimeMs": mark.freshness_ms, "maxIngestionTimeMs": mark.max_ingestion_ms,
                    "caughtUpTimeMs": mark.caught_up_at_ms, "freshnessSource": mark.stamped_by,
                }
            )  # fmt: skip
    sealed: dict[tuple[int, str], int] = {}
    for server, parts in gather.settled:
        for part in parts:
            if part.segment:
                sealed[part.partition, server] = sealed.get((part.partition, server), 0) + 1
    found += [
        {"partition": partition, "origin": "sealed", "replica": server, "segments": count}
        for (partition, server), count in sealed.items()
    ]
    return sorted(found, key=lambda one: (one["partition"], one["origin"], one["replica"]))
