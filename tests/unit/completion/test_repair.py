# SPDX-License-Identifier: Apache-2.0
"""Repair of copies: what enters the index, what is ordered for it, and when nothing is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cremant.cluster.partitions import open_partition
from cremant.completion.orders import (
    Assign,
    Key,
    Order,
    Prune,
    RecordLoss,
    Situation,
    TakeBackLoss,
    Upload,
    Wants,
)
from cremant.completion.repair import CopiesRepair
from cremant.model.cluster import SegmentReport
from cremant.model.completion import StorePolicy
from cremant.model.limits import (
    LOSS_AFTER_MS,
    LOSS_AWAY_MS,
    REPAIR_AWAY_MS,
    REPAIR_BACKOFF_FIRST_MS,
    REPAIR_BACKOFF_MAX_MS,
    REPAIR_MOVING_MAX,
    REPAIR_UPLOADS_MAX,
    SURPLUS_AFTER_MS,
    UPLOAD_PATIENCE_MS,
)
from cremant.model.offsets import Position
from cremant.model.segments import Copy, Loss, ReplicaState, SegmentMetadata, SegmentStatus, StoreState

RECORD, OPEN = open_partition("t", 0, 0, ("s1", "s2"), 0)
BEST_EFFORT = Wants(StorePolicy.STORE_BEST_EFFORT, 2)
PEERS = Wants(StorePolicy.PEERS_ONLY, 2)
LOSS = Loss(at_ms=1, rows=10, start_offset=0, end_offset=10, cause="-")


def _copies(*servers: str) -> dict[str, Copy]:
    return {server: Copy(checksum="c1", verified_at_ms=0) for server in servers}


def _done(sequence: int = 1, **fields: Any) -> SegmentMetadata:
    changes: dict[str, Any] = {
        "name": f"t__0__{sequence:03d}__x", "sequence": sequence, "status": SegmentStatus.DONE, "checksum": "c1",
        "committer": "s1", "copies": _copies("s1", "s2"), "end_offset": 10, "rows": 10,
        "start": Position(log_offset=100, epoch=1, generation=1, next_offset=0), **fields,
    }  # fmt: skip
    return msgspec.structs.replace(OPEN, **changes)


class World:
    """The machine with the cluster around it: who lives and holds what, and what the epoch log still has."""

    def __init__(self, *servers: str) -> None:
        self.machine = CopiesRepair()
        self.now_ms = 1_000_000
        self.live = set(servers or ("s1", "s2"))
        self.known: dict[Key, tuple[SegmentMetadata, Wants]] = {}
        self.states: dict[tuple[str, str], tuple[ReplicaState, str | None]] = {}
        self.log_earliest: dict[tuple[str, int], int] = {}
        self.moving: frozenset[str] = frozenset()
        self.leaving: frozenset[str] = frozenset()
        self.homes: tuple[str, ...] = ("s1", "s2")
        self.looked_at = 0

    def put(self, segment: SegmentMetadata, wants: Wants = BEST_EFFORT) -> Key:
        key = Key("t", segment.name)
        self.known[key] = (segment, wants)
        self.machine.put("t", segment, wants, self.now_ms)
        return key

    def says(self, server: str, state: ReplicaState, checksum: str | None = None) -> None:
        """Of every segment, instead of what its copies tell."""
        for key in self.known:
            self.states[server, key.segment] = (state, checksum)

    def step(self, after_ms: int = 0) -> tuple[Order, ...]:
        self.now_ms += after_ms
        self.machine.notice(frozenset(self.live), self.now_ms)
        said = {
            key: {server: self._report(server, segment) for server in self.live if server in segment.replicas}
            for key, (segment, _) in self.known.items()
        }
        homes = {("t", 0): self.homes}
        situation = Situation(frozenset(self.live), said, self.log_earliest, self.moving, self.leaving, homes)
        run = self.machine.step(situation, self.now_ms)
        self.looked_at = run.looked_at
        return run.orders

    def _report(self, server: str, segment: SegmentMetadata) -> SegmentReport:
        held = server in segment.copies
        usual = (ReplicaState.ONLINE, "c1") if held else (ReplicaState.OFFLINE, None)
        state, checksum = self.states.get((server, segment.name), usual)
        return SegmentReport(table="t", segment=segment.name, state=state, checksum=checksum)


# --- the index ----------------------------------------------------------------------------------------------------


def test_what_misses_nothing_is_never_looked_at() -> None:
    world = World()
    for sequence in range(100):
        world.put(_done(sequence, store_state=StoreState.STORED))
    key = world.put(_done(100))
    world.put(OPEN)
    assert world.machine.missing() == {key}
    world.step()
    assert world.looked_at == 1
    world.machine.remove("t", key.segment)
    assert world.machine.missing() == frozenset()


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        ({"store_state": StoreState.FAILED}, BEST_EFFORT),
        ({"store_state": StoreState.PENDING}, BEST_EFFORT),
        ({"store_state": StoreState.NONE}, Wants(StorePolicy.STORE_REQUIRED, 2)),
        ({"copies": _copies("s1")}, PEERS),
        ({"copies": _copies("s1", "s2", "s3")}, PEERS),
        ({"lost": LOSS}, PEERS),
        ({"replicas": ("s1", "s2", "s3"), "copies": _copies("s1", "s2", "s3")}, PEERS),
    ],
)
def test_what_misses_something_is_in_the_index_until_it_is_there(fields: dict[str, Any], wants: Wants) -> None:
    world = World()
    key = world.put(_done(**fields), wants)
    assert world.machine.missing() == {key}
    world.put(_done(store_state=StoreState.STORED), wants)
    assert world.machine.missing() == frozenset()


# --- the store ----------------------------------------------------------------------------------------------------


def test_a_committer_has_its_time_before_another_holder_is_asked() -> None:
    world = World()
    key = world.put(_done(store_state=StoreState.PENDING, store_changed_ms=world.now_ms))
    assert world.step() == ()
    assert world.step(UPLOAD_PATIENCE_MS) == (Upload(key, "s1"),)
    assert world.step() == (), "one at a time"


def test_a_holder_uploads_at_once_what_its_dead_committer_did_not() -> None:
    world = World("s2")
    key = world.put(_done(store_state=StoreState.FAILED, store_changed_ms=world.now_ms))
    assert world.step() == (Upload(key, "s2"),)


def test_a_table_whose_policy_wants_a_store_now_gets_its_old_segments_uploaded() -> None:
    world = World()
    segment = _done(store_state=StoreState.NONE)
    world.put(segment, PEERS)
    assert world.step() == ()
    assert world.step() == ()
    assert world.put(segment, BEST_EFFORT) in {order.key for order in world.step()}


def test_only_holders_of_the_committed_content_are_asked() -> None:
    world = World("s2")
    world.put(_done(store_state=StoreState.FAILED))
    world.says("s2", ReplicaState.ONLINE, "c2")
    assert world.step() == ()


def test_a_failing_store_gets_one_upload_at_a_time_with_backoff_and_drains_in_parallel_when_it_is_back() -> None:
    world = World("s2")
    for sequence in range(20):
        world.put(_done(sequence, store_state=StoreState.FAILED))
    first = world.step()
    assert len(first) == REPAIR_UPLOADS_MAX
    for order in first:
        world.machine.ended(order, "the store is down", world.now_ms, of_store=True)  # type: ignore[arg-type]
    assert world.step() == (), "the store backs off as a whole"
    assert set(world.machine.causes().values()) == {"the store is down"}
    for _ in range(10):
        orders = world.step(REPAIR_BACKOFF_MAX_MS)
        assert len(orders) == 1
        world.machine.ended(orders[0], "the store is down", world.now_ms, of_store=True)  # type: ignore[arg-type]
    (probe,) = world.step(REPAIR_BACKOFF_MAX_MS)
    world.machine.ended(probe, "", world.now_ms)  # type: ignore[arg-type]
    world.put(msgspec.structs.replace(world.known[probe.key][0], store_state=StoreState.STORED))
    assert len(world.step()) == REPAIR_UPLOADS_MAX


def test_a_server_that_fails_by_itself_holds_up_no_other_upload() -> None:
    """Its copy is damaged, or it is gone: the store did nothing wrong."""
    world = World("s2")
    keys = [world.put(_done(sequence, store_state=StoreState.FAILED)) for sequence in range(20)]
    first = world.step()
    world.machine.ended(first[0], "expected sha256:1, found sha256:2", world.now_ms)  # type: ignore[arg-type]
    for order in first[1:]:
        world.machine.ended(order, "", world.now_ms)  # type: ignore[arg-type]
        world.put(msgspec.structs.replace(world.known[order.key][0], store_state=StoreState.STORED))  # type: ignore[union-attr]
    following = world.step()
    assert len(following) == REPAIR_UPLOADS_MAX
    assert keys[0] not in {order.key for order in following}, "only the damaged one waits"


def test_a_hurried_upload_waits_for_no_backoff() -> None:
    world = World()
    key = world.put(_done(store_state=StoreState.PENDING, store_changed_ms=world.now_ms))
    assert world.step() == ()
    assert world.machine.hurry(key)
    assert world.step() == (Upload(key, "s1"),)
    assert not world.machine.hurry(Key("t", "another"))


# --- replicas -----------------------------------------------------------------------------------------------------


def test_a_server_that_stays_away_is_replaced_and_given_up_only_when_the_copy_is_verified() -> None:
    world = World("s1", "s2", "s3")
    key = world.put(_done(), PEERS)
    world.live = {"s2", "s3"}
    assert world.step() == ()
    assert world.step(REPAIR_AWAY_MS - 1) == ()
    (assigned,) = world.step(1)
    assert assigned == Assign(key, ("s1", "s2", "s3"), "1 of 2 replicas: s3 gets it from a copy")
    world.put(_done(replicas=("s1", "s2", "s3")), PEERS)
    assert world.step(REPAIR_BACKOFF_FIRST_MS) == (), "s3 has not verified it yet"
    world.put(_done(replicas=("s1", "s2", "s3"), copies=_copies("s1", "s2", "s3")), PEERS)
    assert world.step(REPAIR_BACKOFF_FIRST_MS) == (Assign(key, ("s2", "s3"), "replicas that are away were replaced"),)
    world.put(_done(replicas=("s2", "s3"), copies=_copies("s2", "s3")), PEERS)
    assert world.machine.missing() == frozenset()


def test_a_server_that_comes_back_in_time_moves_nothing() -> None:
    world = World("s1", "s2", "s3")
    world.put(_done(), PEERS)
    world.live = {"s2", "s3"}
    world.step()
    world.step(REPAIR_AWAY_MS - 1)
    world.live = {"s1", "s2", "s3"}
    assert world.step(1) == ()
    world.live = {"s2", "s3"}
    assert world.step(1) == (), "its absence is counted anew"


def test_without_another_server_nothing_is_given_up() -> None:
    world = World()
    world.put(_done(), PEERS)
    world.live = {"s2"}
    world.step()
    assert world.step(REPAIR_AWAY_MS) == ()
    assert world.step(LOSS_AWAY_MS) == ()


def test_the_segment_with_the_fewest_copies_goes_first_and_only_so_many_move_at_once() -> None:
    world = World("s1", "s2", "s3", "s4")
    for sequence in range(2 * REPAIR_MOVING_MAX):
        three = ("s1", "s2", "s3")
        world.put(_done(sequence, replicas=three, copies=_copies(*three)), Wants(PEERS.policy, 3))
    urgent = world.put(_done(500, copies=_copies("s2")), PEERS)
    world.live = {"s2", "s3", "s4"}
    world.step()
    orders = world.step(REPAIR_AWAY_MS)
    assert orders[0].key == urgent
    assert len(orders) == REPAIR_MOVING_MAX


def test_a_live_replica_in_error_for_long_is_made_up_for() -> None:
    world = World("s1", "s2", "s3")
    key = world.put(_done(copies=_copies("s1")), PEERS)
    world.says("s2", ReplicaState.ERROR)
    assert world.step() == ()
    (order,) = world.step(REPAIR_AWAY_MS)
    assert order == Assign(key, ("s1", "s2", "s3"), "1 of 2 replicas: s3 gets it from a copy")


def test_a_table_that_is_being_moved_is_left_to_who_moves_it() -> None:
    world = World("s1", "s2", "s3")
    world.put(_done(), PEERS)
    world.live = {"s2", "s3"}
    world.step()
    world.moving = frozenset({"t"})
    assert world.step(REPAIR_AWAY_MS) == ()


def test_a_holder_that_is_no_replica_any_more_is_no_copy_but_the_last_one_stays() -> None:
    world = World()
    key = world.put(_done(copies=_copies("s1", "s9")), PEERS)
    assert world.step() == (Prune(key, ("s9",)),)
    world.put(_done(copies=_copies("s9")), PEERS)
    assert not any(isinstance(order, Prune) for order in world.step(REPAIR_BACKOFF_FIRST_MS))


# --- no copy ------------------------------------------------------------------------------------------------------


def test_a_lone_copy_that_is_gone_is_read_again_by_its_live_replica_while_the_log_has_it() -> None:
    world = World("s1")
    world.put(_done(replicas=("s1",), copies={}), Wants(StorePolicy.STORE_REQUIRED, 1))
    assert world.machine.without_copy() == {("t", 0)}
    world.log_earliest = {("t", 0): 100}
    assert world.step(LOSS_AWAY_MS) == (), "s1 reads the log by itself"


def test_a_server_that_returns_after_it_was_made_up_for_leaves_no_replica_more_than_wanted() -> None:
    world = World("s1", "s2", "s3")
    world.homes = ("s2", "s3")
    three = {"replicas": ("s1", "s2", "s3"), "copies": _copies("s1", "s2")}
    world.put(_done(store_state=StoreState.STORED, **three))
    assert world.step() == world.step(SURPLUS_AFTER_MS) == (), "s3 has no copy yet"
    key = world.put(_done(store_state=StoreState.STORED, **three | {"copies": _copies("s1", "s2", "s3")}))
    assert world.step() == world.step(SURPLUS_AFTER_MS - 1) == ()
    (order,) = world.step(1)
    assert order == Assign(key, ("s2", "s3"), "3 replicas are more than the 2 that are wanted")
    world.says("s3", ReplicaState.ERROR)
    assert world.step(SURPLUS_AFTER_MS) == (), "one of those that stay has trouble"
    world.states.clear()
    assert world.step() == ()
    world.moving = frozenset({"t"})
    assert world.step(SURPLUS_AFTER_MS) == (), "somebody else moves them"


def test_a_copy_that_is_reported_but_not_recorded_replaces_nobody() -> None:
    """Who was given the segment again may be deleting what it had of it."""
    world = World("s2", "s3")
    key = world.put(_done(replicas=("s1", "s2", "s3"), copies=_copies("s1", "s2"), store_state=StoreState.STORED))
    world.says("s3", ReplicaState.ONLINE, "c1")
    world.states.pop(("s2", key.segment), None)
    world.step()
    assert world.step(REPAIR_AWAY_MS) == ()
    world.put(_done(replicas=("s1", "s2", "s3"), copies=_copies("s1", "s2", "s3"), store_state=StoreState.STORED))
    assert world.step() == (Assign(key, ("s2", "s3"), "replicas that are away were replaced"),)


def test_who_is_to_be_taken_out_gets_nothing_new() -> None:
    world = World("s1", "s2", "s3")
    world.leaving = frozenset({"s3"})
    key = world.put(_done(replicas=("s1",), copies=_copies("s1")), PEERS)
    (order,) = world.step()
    assert order == Assign(key, ("s1", "s2"), "1 of 2 replicas: s2 gets it from a copy")
    world.leaving = frozenset({"s2", "s3"})
    assert world.step(REPAIR_BACKOFF_FIRST_MS) == ()


def test_what_a_table_asks_for_now_is_made_of_what_it_had() -> None:
    """STORE_REQUIRED with one replica, then best effort with two, then peers only, and back."""
    world = World("s1", "s2")
    required = Wants(StorePolicy.STORE_REQUIRED, 1)
    key = world.put(_done(replicas=("s1",), copies=_copies("s1"), store_state=StoreState.STORED), required)
    assert world.machine.missing() == frozenset()
    world.put(_done(replicas=("s1",), copies=_copies("s1"), store_state=StoreState.STORED), BEST_EFFORT)
    assert world.step() == (Assign(key, ("s1", "s2"), "1 of 2 replicas: s2 gets it from a copy"),)
    world.put(_done(store_state=StoreState.STORED), PEERS)
    assert world.machine.missing() == frozenset(), "its object stays, and nobody asks for it"
    later = world.put(_done(2), PEERS)
    world.put(_done(2), BEST_EFFORT)
    assert world.step(UPLOAD_PATIENCE_MS) == (Upload(later, "s1"),), "committed without the store, wanted there now"
    world.machine.ended(Upload(later, "s1"), "the store is down", world.now_ms, of_store=True)
    world.put(_done(2), required)
    assert isinstance(world.step(SURPLUS_AFTER_MS)[0], Upload)
    assert world.step(SURPLUS_AFTER_MS) == (), "two copies stay until the store has it"
    world.put(_done(2, store_state=StoreState.STORED), required)
    world.machine.ended(Upload(later, "s2"), "", world.now_ms)
    assert world.step() == ()
    found = world.step(SURPLUS_AFTER_MS)
    assert {order.replicas for order in found if isinstance(order, Assign)} == {("s1",)}


def test_a_lone_copy_whose_server_stays_away_is_read_again_by_another_while_the_log_has_it() -> None:
    world = World("s1", "s2")
    key = world.put(_done(replicas=("s1",), copies=_copies("s1")), Wants(StorePolicy.STORE_REQUIRED, 1))
    world.live = {"s2"}
    world.log_earliest = {("t", 0): 100}
    assert world.step() == ()
    (order,) = world.step(REPAIR_AWAY_MS)
    assert order == Assign(key, ("s1", "s2"), "0 of 1 replicas: s2 gets it from the epoch log")


def test_a_loss_is_recorded_only_when_the_log_is_known_not_to_have_it() -> None:
    world = World("s1")
    key = world.put(_done(replicas=("s1",), copies={}), Wants(StorePolicy.PEERS_ONLY, 1))
    assert world.step(LOSS_AFTER_MS) == (), "the log did not answer"
    world.log_earliest = {("t", 0): 101}
    (order,) = world.step()
    assert isinstance(order, RecordLoss)
    assert (order.key, order.loss.rows, order.loss.start_offset, order.loss.end_offset) == (key, 10, 0, 10)
    assert "the epoch log begins behind it" in order.loss.cause
    world.put(_done(replicas=("s1",), copies={}, lost=order.loss), Wants(StorePolicy.PEERS_ONLY, 1))
    assert world.step(LOSS_AFTER_MS) == (), "once"


def test_a_report_on_its_way_or_rows_in_a_tail_are_waited_for() -> None:
    world = World("s1")
    world.put(_done(replicas=("s1",), copies={}), Wants(StorePolicy.PEERS_ONLY, 1))
    world.log_earliest = {("t", 0): 101}
    assert world.step(LOSS_AFTER_MS - 1) == ()
    world.says("s1", ReplicaState.ONLINE, None)
    assert world.step(LOSS_AFTER_MS) == ()


def test_holders_that_are_only_away_get_much_longer_and_take_the_loss_back_when_they_return() -> None:
    world = World("s3")
    key = world.put(_done(), PEERS)
    world.log_earliest = {("t", 0): 101}
    assert world.step() == ()
    assert world.step(LOSS_AWAY_MS - 1) == ()
    (order,) = world.step(1)
    assert isinstance(order, RecordLoss)
    assert "s1, s2 are away" in order.loss.cause
    world.put(_done(lost=order.loss), PEERS)
    world.live = {"s1", "s3"}
    assert world.step(REPAIR_BACKOFF_FIRST_MS) == (TakeBackLoss(key),)


def test_a_holder_that_is_no_replica_of_anything_is_waited_for_no_longer_than_others() -> None:
    world = World("s1")
    world.put(_done(replicas=("s1",), copies=_copies("s9")), PEERS)
    world.log_earliest = {("t", 0): 101}
    assert world.step() == ()
    assert world.step(LOSS_AWAY_MS - 1) == ()
    assert world.machine.without_copy() == {("t", 0)}
    (order,) = world.step(1)
    assert isinstance(order, RecordLoss)
