# SPDX-License-Identifier: Apache-2.0
"""How fresh an answer is, from the watermarks that came with it (design: freshness.md). Pure.

The minimum over the partitions the query needed. A partition that nobody answered for, or whose watermark proves
nothing, makes the whole unknown: an answer never looks fresh because the living partitions are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cremant.broker.response import Freshness
from cremant.broker.tokens import read_token
from cremant.model.cluster import TableRecord
from cremant.wire.messages import ServerAnswer

#: From least to most that a timestamp proves: own clock at indexing, producer's clock, the log's clock at append.
_SOURCES = ("index", "create", "logAppend")


def freshness_of(
    answers: Sequence[ServerAnswer], record: TableRecord, partitions_expected: int, floors: Mapping[int, int],
    cut: int | None = None,
) -> Freshness:  # fmt: skip
    """`floors`: of the query's `notBefore`. `cut`: the epoch of the answer, upsert tables; it is all of its token."""
    tails = {tail.partition: tail for answer in answers for tail in answer.partitions}
    result = Freshness(partitions_expected=partitions_expected, partitions_reporting=len(tails))
    if cut is not None and answers:  # an epoch of which nothing was shown may never come
        result.epoch, result.read_token = cut, read_token(record, cut, (), floors)
    if not tails:
        return result
    watermarks = [tail.watermark for tail in tails.values()]
    events = [mark.max_ingestion_ms for mark in watermarks if mark.max_ingestion_ms is not None]
    result.newest_event_ms = max(events, default=None)
    result.source = min((mark.source for mark in watermarks), key=_strength)
    known = [mark.freshness_ms for mark in watermarks]
    if len(tails) == partitions_expected and all(value is not None for value in known):
        result.fresh_ms = min(value for value in known if value is not None)
    if cut is None:
        result.epoch = min(mark.epoch for mark in watermarks)
        result.read_token = read_token(record, result.epoch, tails.values(), floors)
    return result


def _strength(source: str) -> int:
    return _SOURCES.index(source) if source in _SOURCES else 0
