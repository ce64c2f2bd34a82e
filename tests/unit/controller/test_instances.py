# SPDX-License-Identifier: Apache-2.0
"""Liveness by a clock that the test moves."""

from __future__ import annotations

from control import heartbeat_of

from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.instances import OWN_PAUSE_MS, Instances
from cremant.model.cluster import Role
from cremant.model.limits import HEARTBEAT_MS, INSTANCE_DEAD_AFTER_MS
from cremant.store.lease import lead
from cremant.store.memory import MemoryMetadataStore


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
