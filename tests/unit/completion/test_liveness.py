# SPDX-License-Identifier: Apache-2.0
"""Repair of consumption: who takes over partitions of servers that stay away, and when stopped replicas start again."""

from __future__ import annotations

from cremant.completion.liveness import Liveness, Place, Reset, Stopped
from cremant.model.cluster import PartitionRecord
from cremant.model.limits import (
    REPAIR_AWAY_MS,
    REPAIR_MOSTLY_AWAY_MS,
    RESET_BACKOFF_FIRST_MS,
    RESET_BACKOFF_MAX_MS,
)


def _partitions(*replicas: tuple[str, ...]) -> dict[str, list[PartitionRecord]]:
    return {
        "t": [
            PartitionRecord(partition=number, consuming=f"t__{number}__0", sequence=0, replicas=servers, start_offset=0)
            for number, servers in enumerate(replicas)
        ]
    }


def test_partitions_of_a_server_that_stays_away_go_to_the_live_ones_evenly() -> None:
    machine, live = Liveness(), frozenset({"s1", "s2"})
    partitions = _partitions(("s1",), ("s2",), ("s3",), ("s3",))
    assert machine.step(partitions, live, (), 0) == ()
    assert machine.step(partitions, live, (), REPAIR_AWAY_MS - 1) == ()
    assert machine.step(partitions, live, (), REPAIR_AWAY_MS) == (Place("t", 2, ("s1",)), Place("t", 3, ("s2",)))


def test_a_replica_that_stays_away_is_replaced_and_the_others_stay() -> None:
    machine, live = Liveness(), frozenset({"s1", "s3"})
    partitions = _partitions(("s1", "s2"))
    assert machine.step(partitions, live, (), 0) == ()
    assert machine.step(partitions, live, (), REPAIR_AWAY_MS) == (Place("t", 0, ("s1", "s3")),)
    alone = frozenset({"s1"})
    assert machine.step(partitions, alone, (), REPAIR_AWAY_MS) == (), "nobody else is there"


def test_a_server_that_was_back_in_between_is_not_replaced() -> None:
    machine, partitions = Liveness(), _partitions(("s1",), ("s2",))
    machine.step(partitions, frozenset({"s2"}), (), 0)
    machine.step(partitions, frozenset({"s1", "s2"}), (), REPAIR_AWAY_MS // 2)
    assert machine.step(partitions, frozenset({"s2"}), (), REPAIR_AWAY_MS) == ()


def test_the_first_server_of_a_cluster_that_restarts_does_not_get_everything() -> None:
    machine, first = Liveness(), frozenset({"s1"})
    partitions = _partitions(("s1",), ("s2",), ("s3",))
    assert machine.step(partitions, frozenset(), (), 0) == ()
    assert machine.step(partitions, first, (), REPAIR_MOSTLY_AWAY_MS - 1) == ()
    assert len(machine.step(partitions, first, (), REPAIR_MOSTLY_AWAY_MS)) == 2, "but it does not wait for ever"


def test_a_table_that_is_being_moved_is_left_to_who_moves_it() -> None:
    machine, live = Liveness(), frozenset({"s1"})
    partitions = _partitions(("s2",))
    machine.step(partitions, live, (), 0)
    assert machine.step(partitions, live, (), REPAIR_MOSTLY_AWAY_MS, moving={"t"}) == ()


def test_a_stopped_replica_is_started_again_later_each_time() -> None:
    machine, live, partitions = Liveness(), frozenset({"s1"}), _partitions(("s1",))
    stopped = (Stopped("t", 0, "t__0__0", "s1"),)
    assert machine.step(partitions, live, stopped, 0) == (Reset(stopped[0]),)
    assert machine.step(partitions, live, stopped, 2 * RESET_BACKOFF_FIRST_MS - 1) == ()
    second_ms = 2 * RESET_BACKOFF_FIRST_MS
    assert machine.step(partitions, live, stopped, second_ms) == (Reset(stopped[0]),)
    assert machine.step(partitions, live, (), second_ms + 1) == (), "it runs again, for a moment"
    assert machine.step(partitions, live, stopped, second_ms + 2 * RESET_BACKOFF_FIRST_MS) == ()
    assert machine.step(partitions, live, stopped, second_ms + 4 * RESET_BACKOFF_FIRST_MS) == (Reset(stopped[0]),)
    assert machine.step(partitions, live, stopped, 10 * RESET_BACKOFF_MAX_MS) == (Reset(stopped[0]),)


def test_a_replica_of_the_next_segment_begins_without_a_history() -> None:
    machine, live, partitions = Liveness(), frozenset({"s1"}), _partitions(("s1",))
    machine.step(partitions, live, (Stopped("t", 0, "t__0__0", "s1"),), 0)
    following = Stopped("t", 0, "t__0__1", "s1")
    assert machine.step(partitions, live, (following,), 1) == (Reset(following),)
