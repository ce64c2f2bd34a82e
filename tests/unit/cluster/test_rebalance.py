# SPDX-License-Identifier: Apache-2.0
"""Rebalancing: the target is even, near and deterministic; the way there never takes an able replica away too early."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.cluster.placement import NotEnoughServers, place
from cremant.cluster.rebalance import Replicas, Unit, able_tails, gone_servers, next_step, plan_target
from cremant.model.cluster import TailReport
from cremant.model.offsets import Watermark

SERVERS = tuple(f"s{n}" for n in range(8))


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[int, Replicas], int, list[str], dict[str, int]]:
    """Replicas of now (on any servers, also too few or too many), replication, servers that live, load of others."""
    servers = draw(st.lists(st.sampled_from(SERVERS), min_size=1, max_size=8, unique=True))
    replication = draw(st.integers(1, len(servers)))
    replicas = st.lists(st.sampled_from(SERVERS), max_size=4, unique=True).map(tuple)
    current = draw(st.dictionaries(st.integers(0, 30), replicas, min_size=1, max_size=20))
    elsewhere = draw(st.dictionaries(st.sampled_from(SERVERS), st.integers(0, 9)))
    return current, replication, servers, elsewhere


def _load(target: dict[int, Replicas], servers: list[str]) -> dict[str, int]:
    load = dict.fromkeys(servers, 0)
    for replicas in target.values():
        for server in replicas:
            load[server] += 1
    return load


@given(situations())
def test_a_target_is_even_within_one_on_distinct_live_servers(
    situation: tuple[dict[int, Replicas], int, list[str], dict[str, int]],
) -> None:
    current, replication, servers, elsewhere = situation
    target = plan_target(current, replication, servers, elsewhere)
    assert set(target) == set(current)
    for replicas in target.values():
        assert len(set(replicas)) == len(replicas) == replication
    load = _load(target, servers)
    assert max(load.values()) - min(load.values()) <= 1


@given(situations())
def test_a_balanced_table_is_left_alone_and_order_of_servers_does_not_matter(
    situation: tuple[dict[int, Replicas], int, list[str], dict[str, int]],
) -> None:
    current, replication, servers, elsewhere = situation
    target = plan_target(current, replication, servers, elsewhere)
    assert plan_target(target, replication, servers, elsewhere) == target
    assert plan_target(current, replication, servers[::-1], elsewhere) == target


@given(situations())
def test_a_fresh_placement_is_balanced(situation: tuple[dict[int, Replicas], int, list[str], dict[str, int]]) -> None:
    current, replication, servers, elsewhere = situation
    placed = place(sorted(current), replication, servers, elsewhere)
    assert plan_target(placed, replication, servers, elsewhere) == placed


@st.composite
def small_situations(draw: st.DrawFn) -> tuple[dict[int, Replicas], int, list[str]]:
    """Replicas of now on up to four servers and a dead one, replication, servers that live."""
    servers = list(SERVERS[: draw(st.integers(1, 4))])
    replication = draw(st.integers(1, min(len(servers), 3)))
    replicas = st.lists(st.sampled_from([*servers, "dead"]), max_size=3, unique=True).map(tuple)
    current = draw(st.lists(replicas, min_size=1, max_size=4))
    return dict(enumerate(current)), replication, servers


def _fewest_moves(current: dict[int, Replicas], replication: int, servers: list[str]) -> int:
    """Of all even targets."""
    moves = []
    for target in itertools.product(itertools.combinations(servers, replication), repeat=len(current)):
        load = _load(dict(enumerate(target)), servers).values()
        if max(load) - min(load) <= 1:
            moves.append(sum(len(set(target[p]) - set(current[p])) for p in current))
    return min(moves)


@given(small_situations())
def test_hardly_more_replicas_move_than_have_to(situation: tuple[dict[int, Replicas], int, list[str]]) -> None:
    """Without other tables: the fewest there can be, one more where a surplus left the wrong server."""
    current, replication, servers = situation
    target = plan_target(current, replication, servers, {})
    moved = sum(len(set(target[p]) - set(current[p])) for p in current)
    assert moved <= _fewest_moves(current, replication, servers) + 1


def test_a_new_replica_is_passed_on_rather_than_an_old_one_moved() -> None:
    """Filling in order overfills a server that partition 26 then needs: the surplus leaves by way of another."""
    current: dict[int, Replicas] = {0: ("s6",), 1: ("s6",), 26: ("s0",)}
    target = plan_target(current, 2, ["s0", "s1", "s6"], {})
    assert all(set(replicas) <= set(target[partition]) for partition, replicas in current.items())
    assert sorted(server for replicas in target.values() for server in replicas) == ["s0", "s0", "s1", "s1", "s6", "s6"]


def test_a_fourth_server_takes_its_share_and_nothing_else_moves() -> None:
    current = place(range(6), 2, ["s0", "s1", "s2"], {})
    target = plan_target(current, 2, ["s0", "s1", "s2", "s3"], {})
    gained = {p: set(target[p]) - set(current[p]) for p in current}
    assert sum(map(len, gained.values())) == 3
    assert set().union(*gained.values()) == {"s3"}


def test_a_dead_servers_replicas_go_to_the_others() -> None:
    current = place(range(4), 2, ["s0", "s1", "s2"], {})
    target = plan_target(current, 2, ["s0", "s1"], {})
    assert {frozenset(replicas) for replicas in target.values()} == {frozenset(("s0", "s1"))}
    assert all(len(set(target[p]) - set(current[p])) <= 1 for p in current)


def test_too_few_servers_are_refused_by_number() -> None:
    with pytest.raises(NotEnoughServers, match="replication 3 needs 3 live servers, found 2: s0, s1"):
        plan_target({0: ("s0",)}, 3, ["s0", "s1"], {})


class _World:
    """Replicas become able some time after they were added; servers fetch in random order."""

    def __init__(self, current: dict[str, Replicas], dice: random.Random) -> None:
        self.replicas = dict(current)
        self.able = {key: {s for s in replicas if dice.random() < 0.9} for key, replicas in current.items()}
        self._dice = dice

    def units(self, target: dict[str, Replicas], dead: set[str]) -> dict[str, Unit]:
        return {key: Unit(self.replicas[key], target[key], frozenset(self.able[key] - dead)) for key in self.replicas}

    def progress(self) -> None:
        for key, replicas in self.replicas.items():
            self.able[key] &= set(replicas)
            self.able[key] |= {server for server in replicas if self._dice.random() < 0.3}


@settings(max_examples=200, deadline=None)
@given(situations(), st.integers(0, 2**32), st.integers(1, 4))
def test_every_step_keeps_as_many_able_replicas_and_the_last_is_the_target(
    situation: tuple[dict[int, Replicas], int, list[str], dict[str, int]], seed: int, moving_max: int
) -> None:
    """At any step the controller may restart (nothing but the records is carried over) and servers may be away for a
    while: the number of able replicas never falls below the present one, up to the number the target has."""
    current, replication, servers, elsewhere = situation
    target = {str(p): r for p, r in plan_target(current, replication, servers, elsewhere).items()}
    dice = random.Random(seed)
    world = _World({str(p): replicas for p, replicas in current.items()}, dice)
    for turn in range(500):
        dead = set(dice.sample(servers, 1)) if dice.random() < 0.2 and turn < 100 else set()
        units = world.units(target, dead)
        step = next_step(units, moving_max=moving_max)
        if step.done:
            break
        for key, replicas in step.changes.items():
            able = units[key].able
            assert len(able & set(replicas)) >= min(len(able & set(units[key].replicas)), len(target[key]))
            assert len(set(replicas)) == len(replicas)
            world.replicas[key] = replicas
        assert sum(set(target[k]) < set(r) for k, r in world.replicas.items()) <= max(
            moving_max, sum(unit.grown for unit in units.values())
        )
        world.progress()
    assert {key: set(replicas) for key, replicas in world.replicas.items()} == {k: set(t) for k, t in target.items()}
    assert next_step(world.units(target, set())).done


def test_a_replica_leaves_only_when_all_new_ones_are_able() -> None:
    unit = Unit(("a", "b"), ("b", "c"), frozenset(("a", "b")))
    assert next_step({"x": unit}).changes == {"x": ("a", "b", "c")}
    waiting = Unit(("a", "b", "c"), ("b", "c"), frozenset(("a", "b")))
    step = next_step({"x": waiting})
    assert (step.changes, step.awaited, step.done) == ({}, {"x": frozenset("c")}, False)
    able = Unit(("a", "b", "c"), ("b", "c"), frozenset(("b", "c")))
    assert next_step({"x": able}).changes == {"x": ("b", "c")}


def test_a_live_committer_stays_until_its_segment_is_sealed() -> None:
    everyone = frozenset("abc")
    pinned = Unit(("a", "b", "c"), ("b", "c"), everyone, pinned=frozenset("a"))
    step = next_step({"x": pinned})
    assert (step.changes, step.done) == ({}, False)
    assert next_step({"x": Unit(("a", "b", "c"), ("b", "c"), everyone)}).changes == {"x": ("b", "c")}


def test_downtime_takes_the_target_at_once() -> None:
    unit = Unit(("a",), ("b",), frozenset("a"))
    assert next_step({"x": unit}, downtime=True).changes == {"x": ("b",)}


def test_downtime_never_gives_up_the_only_copies() -> None:
    unit = Unit(("a",), ("b",), frozenset("a"), sole=frozenset("a"))
    assert next_step({"x": unit}, downtime=True).changes == {"x": ("b", "a")}
    waiting = Unit(("b", "a"), ("b",), frozenset("a"), sole=frozenset("a"))
    step = next_step({"x": waiting}, downtime=True)
    assert (step.changes, step.awaited, step.done) == ({}, {"x": frozenset("b")}, False)
    away = Unit(("b", "a"), ("b",), frozenset(), sole=frozenset("a"))
    assert next_step({"x": away}, downtime=True).changes == {}, "its disk comes back with it"
    able = Unit(("b", "a"), ("b",), frozenset("b"), sole=frozenset("ab"))
    assert next_step({"x": able}, downtime=True).changes == {"x": ("b",)}


def test_a_tail_is_able_when_it_consumes_near_the_freshest() -> None:
    def said(offset: int, state: str = "consuming", error: str | None = None) -> TailReport:
        watermark = Watermark(next_offset=offset, epoch=1)
        return TailReport(
            table="t", incarnation="i", partition=0, first_offset=0, rows=0, watermark=watermark, state=state,
            error=error,
        )  # fmt: skip

    reports = {"a": said(50_000), "b": said(49_000), "c": said(30_000), "d": said(50_000, "catchingUp")}
    reports["e"] = said(50_000, error="damaged")
    assert able_tails(reports) == {"a", "b"}
    assert able_tails({}) == frozenset()


def test_servers_of_a_target_that_do_not_live_are_named() -> None:
    assert gone_servers({0: ("a", "b"), 1: ("c",)}, {"a"}) == {"b", "c"}
