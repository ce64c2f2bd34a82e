# SPDX-License-Identifier: Apache-2.0
"""Liveness by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import msgspec
from control import heartbeat_of

from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.instances import OWN_PAUSE_MS, Instances
from cremant.model.cluster import InstanceReport, Role, SegmentReport, TailReport
from cremant.model.limits import HEARTBEAT_MS, INSTANCE_DEAD_AFTER_MS
from cremant.model.offsets import Watermark
from cremant.model.segments import ReplicaState
from cremant.store.lease import lead
from cremant.store.memory import MemoryMetadataStore
from cremant.wire.messages import Heartbeat


class MovedClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


def _instances() -> tuple[Instances, MovedClock]:
    store, clock = MemoryMetadataStore(), MovedClock()
    leadership = lead(store, "controller", "c", now_ms=0, lease_ms=1)
    assert leadership is not None
    return Instances(Catalog(store, leadership), clock), clock


def _pass(instances: Instances, clock: MovedClock, ms: int, *, beating: tuple[str, ...] = ()) -> None:
    for _ in range(ms // HEARTBEAT_MS):
        clock.ms += HEARTBEAT_MS
        for name in beating:
            instances.heartbeat(heartbeat_of(name))
        instances.refresh_liveness()


def _saying(server: str, *, number: int = 0, **report: Any) -> Heartbeat:
    return msgspec.structs.replace(heartbeat_of(server), report=InstanceReport(**report), number=number)


def test_silence_is_death_and_a_heartbeat_is_life() -> None:
    instances, clock = _instances()
    instances.heartbeat(heartbeat_of("a"))
    instances.heartbeat(heartbeat_of("b"))
    _pass(instances, clock, INSTANCE_DEAD_AFTER_MS, beating=("a",))
    assert instances.live(Role.SERVER) == ["a"]
    assert instances.heartbeat(heartbeat_of("b")), "coming back is material"
    assert instances.live(Role.SERVER) == ["a", "b"]


def test_a_controller_that_stood_still_calls_nobody_dead_for_it() -> None:
    instances, clock = _instances()
    instances.heartbeat(heartbeat_of("a"))
    clock.ms += 60_000
    assert not instances.refresh_liveness()
    assert instances.live(Role.SERVER) == ["a"]
    _pass(instances, clock, INSTANCE_DEAD_AFTER_MS)
    assert instances.live(Role.SERVER) == [], "but who stays silent afterwards dies as ever"


def test_a_pause_of_the_controller_resurrects_nobody() -> None:
    instances, clock = _instances()
    instances.heartbeat(heartbeat_of("a"))
    _pass(instances, clock, INSTANCE_DEAD_AFTER_MS)
    clock.ms += 10 * OWN_PAUSE_MS
    instances.refresh_liveness()
    assert instances.live(Role.SERVER) == []


def test_the_same_report_again_is_not_material() -> None:
    instances, _ = _instances()
    assert instances.heartbeat(heartbeat_of("a"))
    assert not instances.heartbeat(heartbeat_of("a"))


def test_a_tail_that_has_caught_up_is_material_since_queries_go_there_again() -> None:
    instances, _ = _instances()
    said = TailReport(
        table="gold", incarnation="1", partition=0, first_offset=0, rows=5, watermark=Watermark(next_offset=5, epoch=1),
        state="catchingUp",
    )  # fmt: skip
    assert instances.heartbeat(_saying("a", tails=(said,)))
    further = msgspec.structs.replace(said, rows=50)
    assert not instances.heartbeat(_saying("a", tails=(further,)))
    assert instances.heartbeat(_saying("a", tails=(msgspec.structs.replace(further, state="consuming"),)))


def test_a_heartbeat_that_was_overtaken_by_a_later_one_counts_for_nothing() -> None:
    """The later one says all, the overtaken one arrives, and from then on the process leaves out what it has said."""
    instances, _ = _instances()
    old, new = (
        (SegmentReport(table="gold", segment="s", state=state),)
        for state in (ReplicaState.OFFLINE, ReplicaState.ONLINE)
    )
    instances.heartbeat(_saying("a", segments=new, number=2))
    assert not instances.heartbeat(_saying("a", segments=old, number=1))
    kept = msgspec.structs.replace(_saying("a", number=3), segments_kept=True)
    whole = instances.whole_report(kept)
    assert whole is not None
    assert whole.segments == new


def test_reports_are_parted_by_table() -> None:
    instances, _ = _instances()
    said = {
        name: SegmentReport(table=name, segment=f"{name}__0__0", state=ReplicaState.ONLINE, checksum="c")
        for name in ("gold", "iron")
    }
    mark = Watermark(next_offset=1, epoch=1, max_ingestion_ms=None)
    tail = TailReport(table="gold", incarnation="i", partition=0, first_offset=0, rows=1, watermark=mark)
    instances.heartbeat(_saying("a", segments=(said["gold"], said["iron"]), tails=(tail,)))
    instances.heartbeat(_saying("b", segments=(said["iron"],)))
    parted = instances.reports_by_table()
    assert parted == {
        "gold": {"a": InstanceReport(segments=(said["gold"],), tails=(tail,))},
        "iron": {name: InstanceReport(segments=(said["iron"],)) for name in ("a", "b")},
    }
    assert instances.tails("gold", "i", parted["gold"]) == instances.tails("gold", "i") == {"0": {"a": tail}}
