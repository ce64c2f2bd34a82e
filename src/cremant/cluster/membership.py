# SPDX-License-Identifier: Apache-2.0
"""Membership: which process speaks for an instance id, and which instances live. Pure.

Rules: a process is (id, nonce). The newest process of an id replaces earlier ones for good: an earlier nonce that
speaks up again (a process that was stopped and continued) is fenced. An instance lives while its last heartbeat is
younger than INSTANCE_DEAD_AFTER_MS, measured on the controller's monotonic clock.
"""

from __future__ import annotations

import msgspec

from cremant.model.cluster import InstanceRecord
from cremant.model.errors import Fenced
from cremant.model.limits import INSTANCE_DEAD_AFTER_MS

#: Earlier processes of one id that are remembered as replaced.
RETIRED_MAX = 16


class Membership(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Durable: the instance, the process that speaks for it, and the processes it replaced (newest last). One that is
    not `enabled` gets nothing new; what it has it serves until a rebalance has moved it."""

    record: InstanceRecord
    nonce: str
    retired: tuple[str, ...] = ()
    enabled: bool = True


def heard(known: Membership | None, record: InstanceRecord, nonce: str) -> Membership:
    """Membership after a heartbeat; the same object when nothing durable changed. Raises Fenced."""
    if known is None:
        return Membership(record=record, nonce=nonce)
    if nonce in known.retired:
        raise Fenced(f"{record.id}: a newer process runs under this id", hint="stop this one")
    if known.nonce == nonce:
        return known if known.record == record else msgspec.structs.replace(known, record=record)
    retired = (*known.retired, known.nonce)[-RETIRED_MAX:]
    return msgspec.structs.replace(known, record=record, nonce=nonce, retired=retired)


def is_live(last_heard_ms: int | None, now_ms: int) -> bool:
    """Both on the same monotonic clock."""
    return last_heard_ms is not None and now_ms - last_heard_ms < INSTANCE_DEAD_AFTER_MS
