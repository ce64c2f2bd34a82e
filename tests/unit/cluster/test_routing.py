# SPDX-License-Identifier: Apache-2.0
"""Routing: every part of a table goes to exactly one server that can answer it."""

from __future__ import annotations

from small_tables import opened, report, sealed, table, view

from cremant.cluster.load import Load
from cremant.cluster.parts import Part, parts_of, renewed
from cremant.cluster.routing import TAIL_LAG_ROWS_MAX, Routes, Wishes, assign, routing_table
from cremant.model.cluster import TableView
from cremant.model.segments import ColumnPartitions, ColumnRange, ReplicaState
from cremant.model.table import PartitionFunction
from cremant.wire.messages import PruneTerm, TailRequest

SERVERS = ("s1", "s2", "s3")


def servers_of(of: TableView, part: Part, **options: object) -> list[str]:
    """Whom `part` would be asked of, one after the other, as each fails."""
    tried: list[str] = []
    while True:
        assignment = assign(Routes(view(of), of), [part], avoid={part: set(tried)}, **options)  # type: ignore[arg-type]
        if assignment.unassigned:
            return tried
        tried.append(assignment.asks[0].server)


def test_a_table_is_its_sealed_segments_and_the_tails_behind_them() -> None:
    of = table((opened(0, 2, 30), opened(1, 0, 0)), (sealed(0, 0, 0, 10), sealed(0, 1, 10, 30)))
    assert parts_of(of).needed == (
        Part(0, 0, "t__0__0__x"), Part(0, 10, "t__0__1__x"), Part(0, 30), Part(1, 0)
    )  # fmt: skip


def test_each_part_is_asked_of_exactly_one_live_server() -> None:
    segments = tuple(sealed(p, s, s * 10, s * 10 + 10) for p in range(3) for s in range(4))
    of = table(tuple(opened(p, 4, 40) for p in range(3)), segments)
    parts = parts_of(of).needed
    for live in (SERVERS, ("s1",), ("s2",), ("s1", "s3")):
        assignment = assign(Routes(view(of, live=live), of), parts)
        asked = [part for ask in assignment.asks for part in ask.parts]
        assert sorted(asked) == sorted(parts)
        assert {ask.server for ask in assignment.asks} <= set(live)


def test_load_is_spread_over_equal_replicas() -> None:
    segments = tuple(sealed(0, s, s * 10, s * 10 + 10) for s in range(10))
    of = table((opened(0, 10, 100), opened(1, 0, 0)), segments)
    asks = assign(Routes(view(of), of), parts_of(of).needed, wishes=Wishes(together=False)).asks
    assert sorted(len(ask.parts) for ask in asks) == [6, 6]


def test_a_query_over_few_rows_goes_to_as_few_servers_as_hold_its_parts() -> None:
    of = table((opened(0, 2, 20), opened(1, 0, 0)), (sealed(0, 0, 0, 10), sealed(0, 1, 10, 20, replicas=("s3",))))
    asks = assign(Routes(view(of), of), parts_of(of).needed).asks
    assert sorted(len(ask.parts) for ask in asks) == [1, 3]


def test_a_query_over_many_rows_is_shared_by_all_replicas() -> None:
    of = table(
        (opened(0, 2, 2_000_000),), (sealed(0, 0, 0, 1_000_000), sealed(0, 1, 1_000_000, 2_000_000)),
    )  # fmt: skip
    assert len(assign(Routes(view(of), of), parts_of(of).needed).asks) == 2


def test_of_equally_good_replicas_the_clearly_less_loaded_is_asked() -> None:
    of = table((opened(0, 0, 0),))
    (first, second) = servers_of(of, Part(0, 0))

    def chosen(**loads: Load) -> str:
        return servers_of(of, Part(0, 0), loads=loads)[0]

    assert chosen(**{first: Load(in_flight=1)}) == first
    assert chosen(**{first: Load(in_flight=2)}) == second
    assert chosen(**{first: Load(in_flight=9), second: Load(in_flight=8)}) == first
    assert chosen(**{first: Load(latency_ms=8.0)}) == first
    assert chosen(**{first: Load(latency_ms=80.0)}) == second
    busy = {first: Load(in_flight=50)}
    assert servers_of(of, Part(0, 0), loads=busy, wishes=Wishes(fixed=True))[0] == first


def test_load_never_wins_over_a_replica_that_is_fresher() -> None:
    tails = {"0": {"s1": report(0, 100), "s2": report(0, 100_000)}}
    of = table((opened(0, 0, 0),), tails=tails)
    assert servers_of(of, Part(0, 0), loads={"s2": Load(in_flight=50)}) == ["s2", "s1"]


def test_a_replica_that_has_proven_nothing_for_seconds_is_asked_last_even_if_few_rows_are_missing() -> None:
    for late_ms, expected in ((1_900, "s1"), (2_100, "s2")):
        tails = {
            "0": {"s1": report(0, 99, caught_up_at_ms=50_000 - late_ms), "s2": report(0, 100, caught_up_at_ms=50_000)}
        }
        of = table((opened(0, 0, 0, replicas=("s1", "s2")),), tails=tails)
        rotated = servers_of(of, Part(0, 0), wishes=Wishes(together=False))
        assert rotated[0] == expected


def test_replicas_known_to_be_past_the_floor_come_first() -> None:
    tails = {"0": {"s1": report(0, 100), "s2": report(0, 105)}}
    of = table((opened(0, 0, 0),), tails=tails)

    def first(**wishes: object) -> str:
        return servers_of(of, Part(0, 0), wishes=Wishes(together=False, **wishes))[0]  # type: ignore[arg-type]

    assert first() == "s1"
    assert first(floors={0: 103}) == "s2"
    assert first(floors={0: 103}, known={(0, "s1"): 104}) == "s1"


def test_parts_that_no_live_server_holds_are_named() -> None:
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10, replicas=("s3",)),))
    assignment = assign(Routes(view(of, live=("s1",)), of), parts_of(of).needed)
    assert assignment.unassigned == (Part(0, 0, "t__0__0__x"),)


def test_a_server_that_reports_the_segment_online_is_asked_before_one_that_only_should_have_it() -> None:
    name = "t__0__0__x"
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),), external={name: {"s2": ReplicaState.ONLINE}})
    assert servers_of(of, Part(0, 0, name)) == ["s2", "s1"]
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),), external={name: {"s1": ReplicaState.ERROR}})
    assert servers_of(of, Part(0, 0, name)) == ["s2", "s1"]


def test_a_replica_far_behind_or_in_error_is_asked_last() -> None:
    part = Part(0, 0)
    lagging = {"s1": report(0, 100), "s2": report(0, 101 + TAIL_LAG_ROWS_MAX)}
    assert servers_of(table((opened(0, 0, 0),), tails={"0": lagging}), part) == ["s2", "s1"]
    broken = {"s1": report(0, 100, error="stopped"), "s2": report(0, 50)}
    assert servers_of(table((opened(0, 0, 0),), tails={"0": broken}), part) == ["s2", "s1"]
    starting = {"s1": report(0, 100, state="catchingUp"), "s2": report(0, 50)}
    assert servers_of(table((opened(0, 0, 0),), tails={"0": starting}), part) == ["s2", "s1"]


def test_a_server_that_is_no_replica_any_more_is_asked_after_those_that_are_able_and_before_those_that_are_not() -> (
    None
):
    """It serves a moment longer who has not heard yet that the part moved."""
    tails = {"0": {"s1": report(0, 100), "s2": report(0, 90)}}
    assert servers_of(table((opened(0, 0, 0, replicas=("s2",)),), tails=tails), Part(0, 0)) == ["s2", "s1"]
    tails = {"0": {"s1": report(0, 100), "s2": report(0, 90, state="catchingUp")}}
    assert servers_of(table((opened(0, 0, 0, replicas=("s2",)),), tails=tails), Part(0, 0)) == ["s1", "s2"]
    name = "t__0__0__x"
    segments = (sealed(0, 0, 0, 10, replicas=("s2",)),)
    both = {name: {"s1": ReplicaState.ONLINE, "s2": ReplicaState.ONLINE}}
    assert servers_of(table((opened(0, 1, 10),), segments, external=both), Part(0, 0, name)) == ["s2", "s1"]
    one = {name: {"s1": ReplicaState.ONLINE}}
    assert servers_of(table((opened(0, 1, 10),), segments, external=one), Part(0, 0, name)) == ["s1", "s2"]


def test_equally_good_replicas_are_not_alternated_so_that_counts_do_not_go_backwards() -> None:
    first = {"s1": report(0, 100), "s2": report(0, 90)}
    second = {"s1": report(0, 110), "s2": report(0, 120)}
    part = Part(0, 0)
    assert servers_of(table((opened(0, 0, 0),), tails={"0": first}), part)[0] == "s1"
    assert servers_of(table((opened(0, 0, 0),), tails={"0": second}), part)[0] == "s1"


def test_a_suspect_is_asked_only_for_want_of_others() -> None:
    of = table((opened(0, 0, 0),))
    assert servers_of(of, Part(0, 0), suspects={"s1"}) == ["s2", "s1"]


def test_segments_that_cannot_match_are_pruned_and_tails_never() -> None:
    segments = tuple(
        sealed(0, s, s * 10, s * 10 + 10, ranges={"n": ColumnRange(min=s * 10, max=s * 10 + 9)}) for s in range(4)
    )
    of = table((opened(0, 4, 40),), segments)
    parts = parts_of(of, (PruneTerm(column="n", op=">", values=(29,)),))
    assert parts.needed == (Part(0, 30, "t__0__3__x"), Part(0, 40))
    assert parts.pruned == 3


def test_segments_of_other_partitions_of_a_value_are_pruned_and_those_of_unknown_ones_never() -> None:
    def of_partition(*ids: int) -> dict[str, ColumnPartitions]:
        return {"n": ColumnPartitions(function=PartitionFunction.MODULO, partitions=4, ids=ids)}

    segments = (
        *(sealed(0, s, s * 10, s * 10 + 10, partitioning=of_partition(s)) for s in range(4)),
        sealed(1, 0, 0, 10), sealed(1, 1, 10, 20, partitioning=of_partition(0, 1, 2, 3)),
    )  # fmt: skip
    of = table((opened(0, 4, 40), opened(1, 2, 20)), segments)
    unpartitioned = (Part(1, 0, "t__1__0__x"), Part(1, 10, "t__1__1__x"), Part(1, 20))
    parts = parts_of(of, (PruneTerm(column="n", op="=", values=(6,)),))
    assert parts.needed == (Part(0, 20, "t__0__2__x"), Part(0, 40), *unpartitioned)
    assert parts.pruned == 3
    parts = parts_of(of, (PruneTerm(column="n", op="in", values=(3, 7, 2)),))
    assert parts.needed == (Part(0, 20, "t__0__2__x"), Part(0, 30, "t__0__3__x"), Part(0, 40), *unpartitioned)
    assert parts_of(of, (PruneTerm(column="n", op=">", values=(6,)),)).pruned == 0


def test_a_tail_that_was_sealed_meanwhile_becomes_its_segments_and_the_new_tail() -> None:
    newer = table((opened(0, 2, 30),), (sealed(0, 0, 0, 10), sealed(0, 1, 10, 30)))
    assert renewed([Part(0, 10)], newer) == (Part(0, 10, "t__0__1__x"), Part(0, 30))
    assert renewed([Part(0, 0, "t__0__0__x")], newer) == (Part(0, 0, "t__0__0__x"),)


def test_a_segment_that_retention_dropped_is_no_part_any_more() -> None:
    assert renewed([Part(0, 0, "t__0__0__x")], table((opened(0, 1, 10),))) == ()


def test_the_routing_table_names_open_segments_as_pinot_does() -> None:
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),))
    names = sorted(name for listed in routing_table(Routes(view(of), of)).values() for name in listed)
    assert names == ["t__0__0__x", "t__0__1__x"]


def test_an_ask_lists_segments_and_tails_apart() -> None:
    of = table((opened(0, 1, 10, replicas=("s1",)),), (sealed(0, 0, 0, 10, replicas=("s1",)),))
    (ask,) = assign(Routes(view(of), of), parts_of(of).needed).asks
    assert ask.segments == ("t__0__0__x",)
    assert ask.tails({0: 12}) == (TailRequest(partition=0, from_offset=10, not_before=12),)
