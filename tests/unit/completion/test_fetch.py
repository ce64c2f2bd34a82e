# SPDX-License-Identifier: Apache-2.0
"""Whom a fetch asks, in which order, how long it waits, and what it says in the end."""

from __future__ import annotations

import pytest

from cremant.completion.fetch import (
    Begin,
    Cause,
    Effect,
    Event,
    Failed,
    Fetch,
    FromPeer,
    FromStore,
    GiveUp,
    Holder,
    Look,
    Looked,
    Source,
    Wait,
    Waited,
    fetch_order,
)
from cremant.model.errors import InvalidConfig

HOLDERS = tuple(Holder(f"Server_{n}", f"http://server-{n}") for n in range(6))
STORE = "s3://bucket/segment"


def conversation(fetch: Fetch, looks: list[Looked], cause: Cause = Cause.TIMEOUT) -> list[Effect]:
    """Everything it does while every source fails; the last look is repeated."""
    effects: list[Effect] = []
    event: Event = Begin()
    now_ms = 0
    while True:
        effect = fetch.step(event, now_ms)
        effects.append(effect)
        match effect:
            case Look():
                event = looks.pop(0) if len(looks) > 1 else looks[0]
            case FromStore() | FromPeer():
                event = Failed(cause, "no")
            case Wait():
                now_ms += effect.ms
                event = Waited()
            case GiveUp():
                return effects


def asked(effects: list[Effect]) -> list[str]:
    return [
        effect.holder.instance if isinstance(effect, FromPeer) else effect.url
        for effect in effects
        if isinstance(effect, FromPeer | FromStore)
    ]


def test_each_round_asks_the_store_first_then_every_other_holder_once() -> None:
    effects = conversation(Fetch("Server_3", seed=1, rounds_max=2), [Looked(STORE, HOLDERS)])
    names = asked(effects)
    assert len(names) == 2 * (1 + 5)
    others = {"Server_0", "Server_1", "Server_2", "Server_4", "Server_5"}
    for one_round in (names[:6], names[6:]):
        assert one_round[0] == STORE
        assert set(one_round[1:]) == others


def test_replicas_do_not_all_ask_the_same_peer_first() -> None:
    first = {asked(conversation(Fetch("me", seed=seed), [Looked(None, HOLDERS)]))[0] for seed in range(50)}
    assert len(first) == 6
    rounds = asked(conversation(Fetch("me", seed=1, rounds_max=3), [Looked(None, HOLDERS)]))
    assert len({tuple(rounds[at : at + 6]) for at in (0, 6, 12)}) > 1
    again = asked(conversation(Fetch("me", seed=1, rounds_max=3), [Looked(None, HOLDERS)]))
    assert again == rounds


def test_what_there_is_to_ask_is_read_anew_each_round() -> None:
    looks = [Looked(None, ()), Looked(None, HOLDERS[:1]), Looked(STORE, HOLDERS[:1])]
    effects = conversation(Fetch("me", seed=1, rounds_max=4), looks)
    assert asked(effects) == ["Server_0", STORE, "Server_0"]
    assert [type(effect) for effect in effects[:3]] == [Look, Wait, Look]


def test_waits_grow_are_spread_and_bounded_and_heed_what_a_peer_asked_for() -> None:
    waits = [
        [e.ms for e in conversation(Fetch("me", seed=s, rounds_max=18), [Looked(None, ())]) if isinstance(e, Wait)]
        for s in range(20)
    ]
    assert all(len(row) == 8 and max(row) <= 5_000 for row in waits)
    assert all(125 <= row[0] <= 250 and 250 <= row[1] <= 500 and row[-1] >= 2_500 for row in waits)
    assert len({row[0] for row in waits}) > 10
    fetch = Fetch("me", seed=1)
    fetch.step(Begin(), 0)
    fetch.step(Looked(None, HOLDERS[:1]), 0)
    waited = fetch.step(Failed(Cause.BUSY, "429", retry_after_ms=3_000), 0)
    assert waited == Wait(3_000)


def test_a_holder_that_does_not_give_it_is_waited_for_longer_than_nobody() -> None:
    """A follower is told of the committer before that serves: reading the log again would be work for nothing."""

    def waited_ms(looked: Looked, cause: Cause) -> int:
        return sum(e.ms for e in conversation(Fetch("me", seed=1), [looked], cause) if isinstance(e, Wait))

    assert 3_000 <= waited_ms(Looked(None, HOLDERS[:1]), Cause.NOT_HELD) <= 10_000
    assert waited_ms(Looked(None, ()), Cause.NOT_HELD) < 1_000
    assert waited_ms(Looked(None, HOLDERS[:1]), Cause.CHECKSUM) < 1_000
    assert waited_ms(Looked(STORE, ()), Cause.TIMEOUT) < 1_000


def test_in_the_end_every_source_has_said_why() -> None:
    fetch = Fetch("me", seed=1, rounds_max=1)
    fetch.step(Begin(), 0)
    assert fetch.step(Looked(STORE, HOLDERS[:2]), 0) == FromStore(STORE)
    first = fetch.step(Failed(Cause.NOT_HELD, "no object"), 0)
    assert isinstance(first, FromPeer)
    second = fetch.step(Failed(Cause.TRUNCATED, "10 of 20 bytes"), 0)
    assert isinstance(second, FromPeer)
    end = fetch.step(Failed(Cause.OTHER_CONTENT, "has another"), 0)
    assert end == GiveUp(
        f"store: no object (notHeld); {first.holder.instance}: 10 of 20 bytes (truncated); "
        f"{second.holder.instance}: has another (otherContent)"
    )
    effects = conversation(Fetch("me", seed=1, rounds_max=2), [Looked(None, (Holder("me", "http://me"),))])
    assert effects[-1] == GiveUp("no live server and no store has it")


def test_it_ends_in_time() -> None:
    fetch = Fetch("me", seed=1, rounds_max=100, deadline_ms=1_000)
    fetch.step(Begin(), 0)
    assert isinstance(fetch.step(Looked(None, HOLDERS), 0), FromPeer)
    assert isinstance(fetch.step(Failed(Cause.TIMEOUT, "slow"), 1_001), GiveUp)
    fetch = Fetch("me", seed=1, rounds_max=100, deadline_ms=1_000)
    fetch.step(Begin(), 0)
    assert fetch.step(Looked(None, ()), 990) == Wait(10)


def test_who_is_busy_is_waited_for_until_the_deadline() -> None:
    """It has the segment: giving up would make it again from the log, or not at all."""
    looked = [Looked(STORE, HOLDERS[:2])]
    effects = conversation(Fetch("me", seed=1, rounds_max=3, deadline_ms=100_000), looked, Cause.BUSY)
    assert asked(effects).count(STORE) > 15
    assert sum(effect.ms for effect in effects if isinstance(effect, Wait)) == 100_000
    fetch = Fetch("me", seed=1, rounds_max=1)
    fetch.step(Begin(), 0)
    fetch.step(looked[0], 0)
    fetch.step(Failed(Cause.UNREACHABLE, "no store"), 0)
    fetch.step(Failed(Cause.BUSY, "429"), 0)
    assert isinstance(fetch.step(Failed(Cause.NOT_HELD, "404"), 0), Wait)
    fetch.step(Waited(), 1_000)
    fetch.step(Looked(None, HOLDERS[:1]), 1_000)
    assert isinstance(fetch.step(Failed(Cause.NOT_HELD, "404"), 1_000), GiveUp)


def test_peer_urls_and_the_configured_order() -> None:
    looked = Looked("peer:///segment", HOLDERS[:1])
    assert asked(conversation(Fetch("me", seed=1, rounds_max=1), [looked])) == ["Server_0"]
    looked = Looked(STORE, HOLDERS[:1])
    order = fetch_order(["peer", " store"])
    assert asked(conversation(Fetch("me", seed=1, rounds_max=1, order=order), [looked])) == ["Server_0", STORE]
    assert fetch_order(["peer"]) == (Source.PEER,)
    for wrong in (["shop"], ["store", "store"], [""]):
        with pytest.raises(InvalidConfig, match="fetch_order"):
            fetch_order(wrong)
