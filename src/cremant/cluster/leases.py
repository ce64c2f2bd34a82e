# SPDX-License-Identifier: Apache-2.0
"""The pipeline lease of a table, its generations and its epoch base. Pure reducers: record in, record out.

Rules (epoch-log design, Writing):
- at most one holder; a holder whose lease runs keeps it, one that lapsed, released or was replaced by a newer process
  of its own instance loses it to whoever asks first;
- a generation is handed out only to the holder, each once, growing: two pipelines never share one;
- the base is set only under the generation in force, and never shrinks (E-5: epoch numbers only grow).
A holder is `<instance id>:<process nonce>`: a restarted process is another holder, and known to replace the old one.
"""

from __future__ import annotations

import msgspec

from cremant.model.cluster import UNKEYED, Expiry, PipelineRecord, Rewind
from cremant.model.errors import Conflict, Fenced
from cremant.model.table import TableConfig


def holder_name(instance: str, nonce: str) -> str:
    return f"{instance}:{nonce}"


def instance_of(holder: str) -> str:
    return holder.rpartition(":")[0] or holder


def nonce_of(holder: str) -> str:
    instance, _, nonce = holder.rpartition(":")
    return nonce if instance else ""


def is_held(record: PipelineRecord, now_ms: int) -> bool:
    return record.holder is not None and record.lease_until_ms > now_ms


def is_new(record: PipelineRecord) -> bool:
    """No pipeline has ever had it."""
    return record.holder is None and record.generation == 0


def take(
    record: PipelineRecord, holder: str, now_ms: int, lease_ms: int, *, replaced: bool = False
) -> PipelineRecord | None:
    """The record with `holder` holding until now + lease, or None when another holds it. `replaced` says that the
    present holder is a process known to be superseded by a newer one of the same instance."""
    if record.holder != holder and is_held(record, now_ms) and not replaced:
        return None
    return msgspec.structs.replace(record, holder=holder, lease_until_ms=now_ms + lease_ms)


def release(record: PipelineRecord, holder: str) -> PipelineRecord:
    """Given up early; no effect if `holder` does not hold it."""
    if record.holder != holder:
        return record
    return msgspec.structs.replace(record, holder=None, lease_until_ms=0)


def next_generation(record: PipelineRecord, holder: str, now_ms: int) -> PipelineRecord:
    """Raises Fenced unless `holder` holds the lease now."""
    if record.holder != holder or not is_held(record, now_ms):
        raise Fenced(
            f"generation refused: {holder} does not hold the pipeline lease (holder: {record.holder or 'nobody'})",
            hint="take the lease first",
        )
    return msgspec.structs.replace(record, generation=record.generation + 1)


def with_keys(record: PipelineRecord, before: TableConfig, after: TableConfig) -> PipelineRecord:
    """An append table that gets keys is what it was until a pipeline has looked at its rows."""
    if before.upsert is not None or after.upsert is None:
        return record
    return msgspec.structs.replace(record, keyed_from=UNKEYED)


def set_base(
    record: PipelineRecord, generation: int, base: int, checkpoint: str, *, first_epoch: int = 0, previous: int = 0,
    rewound: Rewind | None = None, rebuild: int = 0, keyed: bool = False, expire_before_ms: int | None = None,
) -> PipelineRecord:  # fmt: skip
    """`rewound`: its Resets are in the log. `rebuild`: a fresh checkpoint is begun for it. `keyed`: the first epoch
    gives the table its keys, unless an epoch up to `previous` has; then, if it is a seed, keys of before
    `expire_before_ms` expire in it. Raises Fenced for a generation that is not in force, Conflict for a base that would
    shrink."""
    if generation != record.generation:
        raise Fenced(f"base refused: generation {generation} is not in force, {record.generation} is")
    if base < record.base:
        raise Conflict(f"base refused: {base} is below the present base {record.base}, epochs only grow (E-5)")
    rewinds = record.rewinds
    if rewound is not None and record.rewind == rewound:
        done = msgspec.structs.replace(rewound, generation=generation, next_epoch=first_epoch)
        rewinds = (*rewinds[:-1], done)
    keyed_from, expiry = record.keyed_from, record.expiry
    if keyed and begins_with_seed(base, first_epoch, previous):
        expires = expire_before_ms is not None and keyed_from is not None and keyed_from <= previous
        if expires and expire_before_ms is not None:
            expiry = Expiry(epoch=first_epoch, before_ms=expire_before_ms)
        elif expiry is not None and expiry.epoch > previous:
            expiry = None  # a seed that was not closed, and this one is another
    if keyed and (keyed_from is None or keyed_from > previous):
        keyed_from = first_epoch
    return msgspec.structs.replace(
        record, base=base, checkpoint=checkpoint, rewinds=rewinds, keyed_from=keyed_from,
        rebuilds_begun=max(record.rebuilds_begun, rebuild), expiry=expiry,
    )  # fmt: skip


def begins_with_seed(base: int, first_epoch: int, previous: int) -> bool:
    """Of a run that keeps keys: ids of batches begin anew, behind an epoch."""
    return previous > 0 and base == first_epoch
