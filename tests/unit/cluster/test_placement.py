# SPDX-License-Identifier: Apache-2.0
"""Placement and partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.cluster.partitions import missing_partitions, open_partition
from cremant.cluster.placement import NotEnoughServers, load_of, place
from cremant.model.segments import SegmentStatus


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 8))
def test_replicas_are_distinct_and_load_is_even_within_one(partitions: int, replication: int, servers: int) -> None:
    names = [f"s{n}" for n in range(servers)]
    if replication > servers:
        with pytest.raises(NotEnoughServers, match=f"found {servers}"):
            place(range(partitions), replication, names, {})
        return
    placed = place(range(partitions), replication, names, {})
    load = dict.fromkeys(names, 0)
    for replicas in placed.values():
        assert len(set(replicas)) == len(replicas) == replication
        for server in replicas:
            load[server] += 1
    assert max(load.values()) - min(load.values()) <= 1


def test_placement_is_the_same_for_the_same_inputs_in_any_order() -> None:
    assert place([0, 1, 2], 2, ["c", "a", "b"], {"a": 1}) == place([0, 1, 2], 2, ["b", "c", "a"], {"a": 1})


def test_neighbouring_partitions_do_not_share_their_first_server() -> None:
    placed = place([0, 1], 2, ["a", "b"], {})
    assert placed[0][0] != placed[1][0]


def test_new_partitions_go_to_the_servers_with_less() -> None:
    assert place([5], 1, ["a", "b"], {"a": 3, "b": 2}) == {5: ("b",)}


def test_load_counts_every_replica() -> None:
    records = [open_partition("t", p, 0, ("a", "b")[: p + 1], 0)[0] for p in range(2)]
    assert load_of(records) == {"a": 2, "b": 1}


def test_a_partition_opens_at_its_start_with_no_epoch_closed() -> None:
    record, segment = open_partition("gold", 3, 17, ("s1",), 0)
    assert segment.name == record.consuming == "gold__3__0__19700101T0000Z"
    assert segment.status is SegmentStatus.IN_PROGRESS
    assert (segment.start.log_offset, segment.start.epoch, segment.start.generation) == (0, 0, 0)
    assert segment.start_offset == segment.start.next_offset == record.start_offset == 17


def test_growth_names_the_partitions_that_are_missing() -> None:
    assert missing_partitions([0, 1], 4) == [2, 3]
    assert missing_partitions([0, 1], 2) == []
    assert missing_partitions([0, 1, 2], 2) == []
