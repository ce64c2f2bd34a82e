# SPDX-License-Identifier: Apache-2.0
"""A fetch, as `server/fetching.py` does it: the real machine asks store and peers, in the end the epoch log."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from cremant.completion.fetch import (
    Begin,
    Cause,
    Event,
    Failed,
    Fetch,
    FromPeer,
    FromStore,
    GiveUp,
    Holder,
    Look,
    Looked,
    Wait,
    Waited,
)
from cremant.model.errors import NotFound, Unavailable
from cremant.model.limits import PEER_TRANSFERS_EACH_MAX, PEER_TRANSFERS_MAX, STORE_CALL_MS
from cremant.model.segments import ReplicaState, SegmentMetadata, StoreState
from cremant.sim.completion.world import World, content_of

if TYPE_CHECKING:
    from cremant.sim.completion.controller import View
    from cremant.sim.completion.process import Process

#: As `server/peers.py` asks of who is refused.
RETRY_AFTER_MS = 1_000


def fetch(process: Process, metadata: SegmentMetadata) -> Generator[int, None, str]:
    """The content. Raises CremantError."""
    world = process.world
    machine = Fetch(process.id, seed=world.schedule.getrandbits(32))
    event: Event = Begin()
    while True:
        effect = machine.step(event, world.now_ms)
        world.took("fetch", type(event).__name__, type(effect).__name__)
        match effect:
            case Look():
                event = _looked(metadata, process.view)
            case Wait(ms=ms):
                yield from process.rests(ms)
                event = Waited()
            case FromStore(url=url):
                found, source = (yield from _from_store(process, url)), "the store"
            case FromPeer(holder=holder):
                found, source = (yield from _from_peer(process, holder.instance, metadata)), "a peer"
            case GiveUp(why=why):
                return (yield from _from_log(process, metadata, why))
        if isinstance(effect, FromStore | FromPeer):
            if isinstance(found, str) and (found == metadata.checksum or not world.guards.fetch_verified):
                world.happened.add(f"fetched from {source}")
                return found
            event = found if isinstance(found, Failed) else Failed(Cause.CHECKSUM, f"found {found}")
            world.happened.add(f"{source}: {event.cause}")


def _looked(metadata: SegmentMetadata, view: View | None) -> Looked:
    now = view.segments.get(metadata.name, metadata) if view is not None else metadata
    live, states = (view.live, view.states(now)) if view is not None else (frozenset(), {})
    online = {name for name, state in states.items() if state is ReplicaState.ONLINE}
    holders = tuple(Holder(name, f"http://{name}") for name in sorted(online.union(now.copies)) if name in live)
    return Looked(now.store_url if now.store_state is StoreState.STORED else None, holders)


def _from_store(process: Process, url: str) -> Generator[int, None, Failed | str]:
    world = process.world
    yield from process.rests(STORE_CALL_MS if world.store.mode == "hanging" else 50)
    found = world.store.objects.get(url) if world.store.mode in ("up", "slow") else None
    return found if found is not None else Failed(Cause.UNREACHABLE, f"the store is {world.store.mode}")


def _from_peer(process: Process, instance: str, metadata: SegmentMetadata) -> Generator[int, None, Failed | str]:
    world = process.world
    yield from process.rests(world.schedule.randint(1, world.delay_ms))
    if world.network.loses(process.id, instance) or not world.servers[instance].answers:
        return Failed(Cause.UNREACHABLE, "no answer")
    peer = world.servers[instance].process
    running = peer.transfers
    if running.total() >= PEER_TRANSFERS_MAX or running[process.id] >= PEER_TRANSFERS_EACH_MAX:
        world.happened.add("a peer was busy")
        return Failed(Cause.BUSY, "enough transfers are running", RETRY_AFTER_MS)
    running[process.id] += 1
    try:
        yield from process.rests(world.schedule.randint(1, 1 + world.options.transfer_ms))
    finally:
        running[process.id] -= 1
    if world.network.loses(instance, process.id) or not peer.lives:
        return Failed(Cause.UNREACHABLE, "the connection broke")
    return _answer(world, instance, peer.server.read(metadata.name))


def _answer(world: World, instance: str, content: str | None) -> Failed | str:
    damage = world.network.damaged.get(instance)
    if content is None or damage == "404":
        world.happened.add("a peer said 404")
        return Failed(Cause.NOT_HELD, "404")
    if damage == "torn" or world.chance(world.options.loss):
        world.happened.add("an archive was torn")
        return content[: len(content) // 2]
    if damage == "corrupt":
        world.happened.add("an archive was corrupt")
        return f"{content} and more"
    return content


def _from_log(process: Process, metadata: SegmentMetadata, why: str) -> Generator[int, None, str]:
    world = process.world
    if world.logs[metadata.partition].earliest > metadata.start.log_offset:
        raise NotFound(f"{metadata.name}: {why}; the epoch log has its range no more")
    yield from process.rests(world.schedule.randint(1, world.build_ms))
    assert metadata.end is not None
    content = content_of(metadata, metadata.end.next_offset)
    world.happened.add("read from the epoch log again")
    if content != metadata.checksum:
        raise Unavailable(f"{metadata.name}: {why}; the epoch log has other content")
    return content
