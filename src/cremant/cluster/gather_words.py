# SPDX-License-Identifier: Apache-2.0
"""What a Gather says of parts that nobody answered (gather.py). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cremant.cluster.parts import Part
from cremant.cluster.routing import Routes
from cremant.model.upsert import Cut
from cremant.wire.messages import ServerAnswer

#: Causes and segments that a message lists.
_LISTED_MAX = 10


def silence(
    servers: Collection[str], causes: Mapping[str, str], left: Iterable[Part], floors: Mapping[int, int]
) -> str:
    """Of servers that did not answer; `left`: the parts they were asked for."""
    text = f"{len(servers)} servers [{', '.join(sorted(servers))}] not responded"
    return text + _awaited(left, floors) + _why(servers, causes)


def unavailable(
    parts: Collection[Part], routes: Routes, floors: Mapping[int, int], tried: Collection[str],
    causes: Mapping[str, str],
) -> str:  # fmt: skip
    """Of parts that none of the servers `tried` could answer."""
    names = {view.record.partition: view.consuming.name for view in routes.table.partitions}
    listed = [part.segment or names.get(part.partition, f"partition {part.partition}") for part in parts]
    shown = ", ".join(listed[:_LISTED_MAX]) + (", ..." if len(listed) > _LISTED_MAX else "")
    lost = [told for part in parts if (told := routes.loss(part)) is not None]
    told = "".join(f"; {one}" for one in lost[:_LISTED_MAX])
    return f"{len(listed)} segments unavailable: [{shown}]{told}{_awaited(parts, floors)}{_why(tried, causes)}"


def lateness(answer: ServerAnswer, cut: Cut | None) -> str:
    """Of a server that could not answer all it was asked for."""
    if answer.refused_partitions and cut is not None:
        return f"does not know epoch {cut.epoch} any more, its oldest is {answer.horizon}"
    if answer.behind_partitions:
        return "is behind" if cut is None else f"has not closed epoch {cut.epoch}"
    return "has not loaded it"


def too_old(epoch: int, horizon: int) -> str:
    """Of an `asOfEpoch` that every replica refused."""
    return (
        f"QueryValidationError: asOfEpoch {epoch}: what was visible then is not known any more, the oldest epoch that "
        f"can be asked is {horizon} (`horizon` of GET /tables/<table>/upsert)"
    )


def _why(servers: Collection[str], causes: Mapping[str, str]) -> str:
    known = [f"{server}: {causes[server]}" for server in sorted(servers) if server in causes]
    return f" ({'; '.join(known[:_LISTED_MAX])})" if known else ""


def _awaited(parts: Iterable[Part], floors: Mapping[int, int]) -> str:
    awaited = [part for part in parts if not part.segment and floors.get(part.partition, 0) > part.from_offset]
    return "".join(
        f"; no replica showed partition {part.partition} up to {floors[part.partition]}, "
        "which the query must see (notBefore, or a demand for freshness)"
        for part in awaited[:_LISTED_MAX]
    )
