# SPDX-License-Identifier: Apache-2.0
"""How far servers are visible, asked without a query: broker -> server, POST /internal/v1/watermarks."""

from __future__ import annotations

import msgspec

from cremant.model.cluster import TailReport
from cremant.wire.messages import Message


class WantedMark(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How far a partition is to be visible: rows below `offset` (as of a closed epoch, upsert tables), and everything
    that was in the stream at `fresh_ms`. 0 = whatever."""

    partition: int
    offset: int = 0
    fresh_ms: int = 0


class WatermarksRequest(Message, frozen=True, kw_only=True):
    """How far are these partitions visible here? The answer comes once all of them are as far as is wanted, at the
    latest after `timeout_ms`; 0 = at once. It holds no thread meanwhile."""

    table: str
    incarnation: str
    wanted: tuple[WantedMark, ...]
    timeout_ms: int = 0


class WatermarksReply(Message, frozen=True, kw_only=True):
    """Of the wanted partitions those that are here. Of an upsert table `watermark` is as of the last closed epoch that
    is applied."""

    instance: str
    tails: tuple[TailReport, ...] = ()
