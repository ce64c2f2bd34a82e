# SPDX-License-Identifier: Apache-2.0
"""Replaced rows of sealed segments go, at an epoch that the controller orders.

Real: who gives orders, and what is recorded of them (`completion.compaction`), which rows stay (`Versions.kept`), their
versions. Modelled: files, which are named by the epoch at which they were compacted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cremant.cluster.lowwater import is_void
from cremant.completion.compaction import Sight, Withdraw, after_compaction
from cremant.model.cluster import PipelineRecord
from cremant.model.segments import StoredVersions
from cremant.model.upsert import CompactionConfig
from cremant.segment import snapshot
from cremant.segment.locations import Int32s, Locations
from cremant.sim.engine import Violation
from cremant.sim.upsert.bringing import Held, packed
from cremant.sim.upsert.table import UPSERT
from cremant.sim.world import INCARNATION, TABLE
from cremant.wire.messages import SegmentCompacted

if TYPE_CHECKING:
    from cremant.sim.upsert.hosted import Hosted
    from cremant.sim.upsert.world import UpsertWorld


def order_compactions(world: UpsertWorld) -> None:
    """As the controller does it, from what servers report."""
    upsert = msgspec.structs.replace(
        UPSERT, history_ms=world.options.compaction_ms, compaction=CompactionConfig(buffer_ms=0)
    )
    superseded: dict[str, int] = {}
    for key in world.sealed:
        counts = [_superseded(world, key, number) for number in world.consumers(key[0])]
        known = [count for count in counts if count is not None]
        if known and len(known) == len(counts):
            superseded[_name(key)] = min(known)
    sight = Sight(
        table=TABLE, incarnation=INCARNATION, upsert=upsert, low_water_mark=_low_water_mark(world),
        pipeline=PipelineRecord(rewinds=world.rewinds, keyed_from=1), superseded=superseded,
        segments=[world.metadata(*key) for key in world.sealed],
    )  # fmt: skip
    for order in world.compactions.step([sight], world.now_ms):
        partition, number = order.segment.split("/")
        if isinstance(order, Withdraw):
            world.compacting.pop((int(partition), int(number)), None)
            continue
        epoch = order.epoch if world.guards.compacted_at_mark else world.observers.committed[-1].epoch
        world.compacting[(int(partition), int(number))] = epoch
        world.note(f"segment {order.segment} is to be compacted at epoch {epoch}")


def _superseded(world: UpsertWorld, key: tuple[int, int], server: int) -> int | None:
    partition, number = key
    hosted = world.servers[server].hosted.get(partition)
    if hosted is None or number not in hosted.served or hosted.contents[number] != world.compacted_at.get(key, 0):
        return None
    return hosted.segments[number].counts()[0]


def _low_water_mark(world: UpsertWorld) -> int | None:
    closed = []
    for partition in range(len(world.cuts)):
        for number in world.consumers(partition):
            hosted = world.servers[number].hosted.get(partition)
            if hosted is None or hosted.is_stopped:
                return None
            closed.append(hosted.versions.epoch)
    mark = min(closed, default=None)
    return mark if mark is not None and is_void(mark, world.rewinds) is None else None


def compact(hosted: Hosted, number: int) -> None:
    """What a server does with a segment: has it recorded what an order leaves of it, or makes what was recorded."""
    world, key = hosted.world, (hosted.partition, number)
    recorded, content, versions = world.compacted_at.get(key, 0), hosted.contents[number], hosted.segments[number]
    epoch = recorded if content != recorded else world.compacting.get(key)
    if epoch is None or versions.epoch < epoch or not hosted.versions.is_current(str(number)):
        return
    kept = versions.kept(epoch)
    if not world.guards.tombstones_kept and versions.deleted is not None:
        kept &= ~versions.deleted
    made = versions.compacted(kept, epoch)
    _check_equal(key, world.sealed[key].setdefault(epoch, (made.locations, made.order)), made.locations, made.order)
    if content == recorded:
        _propose(hosted, number, epoch, Held(epoch, snapshot.Snapshot(made, hosted.reader.position)))
    elif hosted.versions.exchange(str(number), versions, made):
        hosted.segments[number], hosted.contents[number] = made, epoch
        hosted.disk[number] = packed(*key, Held(epoch, snapshot.Snapshot(made, hosted.reader.position)))


def _propose(hosted: Hosted, number: int, epoch: int, held: Held) -> None:
    world, key = hosted.world, (hosted.partition, number)
    before, rows = hosted.contents[number], held.found.versions.rows
    stored = key in world.uploaded
    at = held.found.position
    said = SegmentCompacted(
        instance=str(hosted.server.number), table=TABLE, incarnation=INCARNATION, segment=_name(key), epoch=epoch,
        before=str(before), checksum=str(before if rows == hosted.segments[number].rows else epoch), file_checksum="",
        rows=rows, size_bytes=0, url="" if stored else None,
        versions=StoredVersions(url="", position=at, size_bytes=0, file_checksum="") if stored else None,
    )  # fmt: skip
    changed = after_compaction(world.metadata(*key), said, world.now_ms)
    if changed is None:
        return
    world.compacting.pop(key)
    if changed.compacted_at != epoch:
        return  # there was nothing to let go of
    world.note(f"segment {key} is compacted at epoch {epoch}, {rows} rows stay")
    world.compacted_at[key] = epoch
    if stored:
        world.stored[key], world.stored_at[key] = packed(*key, held), at


def _check_equal(
    key: tuple[int, int], known: tuple[Locations, Int32s | None], locations: Locations, order: Int32s | None
) -> None:
    same = known[0].rows == locations.rows and np.array_equal(known[0].all_offsets(), locations.all_offsets())
    if not same or not np.array_equal(known[0].all_sub_rows(), locations.all_sub_rows()):
        raise Violation("I-3", f"segment {key} has other rows elsewhere")
    if not np.array_equal(known[1] if known[1] is not None else (), order if order is not None else ()):
        raise Violation("I-3", f"rows of segment {key} stand in another order elsewhere")


def _name(key: tuple[int, int]) -> str:
    return f"{key[0]}/{key[1]}"
