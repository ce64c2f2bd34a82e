# SPDX-License-Identifier: Apache-2.0
"""Routing: every part of a table goes to exactly one server that can answer it."""

from __future__ import annotations

from small_tables import opened, report, sealed, table, view

from cremant.cluster.routing import TAIL_LAG_ROWS_MAX, Part, assign, parts_of, renewed, routing_table
from cremant.model.cluster import TableView
from cremant.model.segments import ColumnRange, ReplicaState
from cremant.wire.messages import PruneTerm, TailRequest

SERVERS = ("s1", "s2", "s3")


def servers_of(of: TableView, part: Part, **options: object) -> list[str]:
    """Whom `part` would be asked of, one after the other, as each fails."""
    tried: list[str] = []
    while True:
        assignment = assign(view(of), of, [part], avoid={part: set(tried)}, **options)  # type: ignore[arg-type]
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
        assignment = assign(view(of, live=live), of, parts)
        asked = [part for ask in assignment.asks for part in ask.parts]
        assert sorted(asked) == sorted(parts)
        assert {ask.server for ask in assignment.asks} <= set(live)


def test_load_is_spread_over_equal_replicas() -> None:
    segments = tuple(sealed(0, s, s * 10, s * 10 + 10) for s in range(10))
    of = table((opened(0, 10, 100), opened(1, 0, 0)), segments)
    asks = assign(view(of), of, parts_of(of).needed).asks
    assert sorted(len(ask.parts) for ask in asks) == [6, 6]


def test_parts_that_no_live_server_holds_are_named() -> None:
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10, replicas=("s3",)),))
    assignment = assign(view(of, live=("s1",)), of, parts_of(of).needed)
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


def test_a_tail_that_was_sealed_meanwhile_becomes_its_segments_and_the_new_tail() -> None:
    newer = table((opened(0, 2, 30),), (sealed(0, 0, 0, 10), sealed(0, 1, 10, 30)))
    assert renewed([Part(0, 10)], newer) == (Part(0, 10, "t__0__1__x"), Part(0, 30))
    assert renewed([Part(0, 0, "t__0__0__x")], newer) == (Part(0, 0, "t__0__0__x"),)


def test_a_segment_that_retention_dropped_is_no_part_any_more() -> None:
    assert renewed([Part(0, 0, "t__0__0__x")], table((opened(0, 1, 10),))) == ()


def test_the_routing_table_names_open_segments_as_pinot_does() -> None:
    of = table((opened(0, 1, 10),), (sealed(0, 0, 0, 10),))
    names = sorted(name for listed in routing_table(view(of), of).values() for name in listed)
    assert names == ["t__0__0__x", "t__0__1__x"]


def test_an_ask_lists_segments_and_tails_apart() -> None:
    of = table((opened(0, 1, 10, replicas=("s1",)),), (sealed(0, 0, 0, 10, replicas=("s1",)),))
    (ask,) = assign(view(of), of, parts_of(of).needed).asks
    assert ask.segments == ("t__0__0__x",)
    assert ask.tails == (TailRequest(partition=0, from_offset=10),)
