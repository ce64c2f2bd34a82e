# SPDX-License-Identifier: Apache-2.0
"""Failure cases by name: commits and uploads that go wrong, and a store that is away."""

from __future__ import annotations

from cremant.model.completion import CompletionMode, StorePolicy
from cremant.model.limits import UPLOADS_RUNNING_MAX
from cremant.model.segments import SegmentStatus, StoreState
from cremant.sim.completion.network import CONTROLLER
from cremant.sim.completion.server import Server
from cremant.sim.completion.stage import Scenario, Stage, registrar
from cremant.sim.engine import Actor

SCENARIOS: list[Scenario] = []
scenario = registrar(SCENARIOS)

COMMITTING, DONE = SegmentStatus.COMMITTING, SegmentStatus.DONE
_DOWNLOAD = {"mode": CompletionMode.DOWNLOAD}
_REQUIRED = {"policy": StorePolicy.STORE_REQUIRED}
_PEERS = {"policy": StorePolicy.PEERS_ONLY}


# --- uploads and who commits --------------------------------------------------------------------------------------


@scenario(
    "the upload fails, the commit goes on; followers fetch from the committer, the object is made up for later",
    "upload failed", "replica: not-stored", "fetched from a peer", "written: store",
    case="1", options=_DOWNLOAD,
)  # fmt: skip
def upload_fails(stage: Stage) -> Actor:
    stage.world.store.mode = "failing"
    yield from stage.until("all have a segment whose upload failed", lambda: _failed_and_held(stage))
    yield from stage.until_happened("fetched from a peer")


def _failed_and_held(stage: Stage) -> bool:
    failed = [one for one in stage.done() if one.store_state is StoreState.FAILED]
    return any(stage.held_by_all(one) for one in failed)


@scenario(
    "the upload fails and the committer dies at once: followers seal their own rows",
    "upload failed", "replica: same",
    case="2, DEFAULT",
)  # fmt: skip
def upload_fails_committer_dies(stage: Stage) -> Actor:
    yield from _committer_dies_without_object(stage)


@scenario(
    "the same when followers only download: after fetches that fail they read the epoch log again",
    "upload failed", "replica: download", "read from the epoch log again",
    case="2, DOWNLOAD", options=_DOWNLOAD,
)  # fmt: skip
def upload_fails_committer_dies_download(stage: Stage) -> Actor:
    yield from _committer_dies_without_object(stage)


def _committer_dies_without_object(stage: Stage) -> Actor:
    stage.world.store.mode = "failing"
    yield from stage.until_newest(DONE)
    segment = stage.newest(DONE)
    assert segment is not None
    stage.server(segment.committer).kill(100_000)
    yield from stage.until("a follower has it", lambda: any(stage.holds(one, segment) for one in stage.others(segment)))


@scenario(
    "the upload landed and the commit, then the committer dies: followers fetch from the store",
    "uploaded", "fetched from the store",
    case="3", options=_DOWNLOAD | _REQUIRED,
)  # fmt: skip
def uploaded_committer_dies(stage: Stage) -> Actor:
    yield from stage.until_newest(DONE)
    segment = stage.newest(DONE)
    assert segment is not None
    stage.server(segment.committer).kill(100_000)
    yield from stage.until("a follower has it", lambda: any(stage.holds(one, segment) for one in stage.others(segment)))


@scenario(
    "the upload landed, the committer dies before it can say so: another one commits the same end",
    "uploaded", "controller: take-over",
    options=_REQUIRED,
)  # fmt: skip
def uploaded_committer_dies_before_commit(stage: Stage) -> Actor:
    store = stage.world.store
    yield from stage.until("an object is there, and no commit", lambda: store.objects and stage.newest(COMMITTING))
    segment = stage.newest(COMMITTING)
    assert segment is not None
    stage.server(segment.committer).kill(100_000)
    yield from stage.until_done(segment)
    stage.demand("another committer", holds=stage.now(segment).committer != segment.committer)


@scenario(
    "the upload landed and the controller dies: the next one takes the commit",
    "uploaded", "written: commit",
    case="4", options=_REQUIRED,
)  # fmt: skip
def uploaded_controller_dies(stage: Stage) -> Actor:
    yield from stage.until_written("commit", "before", stage.controller_dies)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    stage.demand("an object is there", holds=bool(stage.world.store.objects))
    yield from stage.until_done(segment)


@scenario(
    "followers are told to download while the committer stands still, before it serves the segment",
    "a peer: unreachable", "fetched from a peer",
    case="5", options=_DOWNLOAD | _PEERS,
)  # fmt: skip
def told_before_the_committer_serves(stage: Stage) -> Actor:
    yield from stage.until_newest(COMMITTING)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    committer = stage.server(segment.committer)
    yield from stage.until_written("commit", "after", lambda: committer.stand_still(20_000))
    yield from stage.until_happened("a peer: unreachable")
    yield from stage.until_held_by_all(segment)


@scenario(
    "the controller dies before and after each of its writes: deciding, committing, recording an object, copies",
    "written: decide", "written: commit", "written: store", "written: copies",
    options={"upload_wait_ms": 0},
)  # fmt: skip
def controller_dies_at_each_write(stage: Stage) -> Actor:
    stage.world.store.mode = "slow"
    for step in ("decide", "commit", "store", "copies"):
        for when in ("before", "after"):
            yield from stage.until_written(step, when, stage.controller_dies)
            yield from stage.until_led()


@scenario(
    "the answer to a commit is lost; the committer and its followers find out by themselves",
    "commit without an answer", "cut one way",
    options=_DOWNLOAD,
)  # fmt: skip
def commit_answer_lost(stage: Stage) -> Actor:
    yield from stage.until_newest(COMMITTING)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    assert segment.committer is not None
    cut = (CONTROLLER, segment.committer)
    yield from stage.until_written("commit", "before", lambda: stage.world.network.cuts.add(cut))
    yield from stage.until_happened("commit without an answer")
    stage.world.network.cuts.discard(cut)
    yield from stage.until_held_by_all(segment)


@scenario(
    "a committer stands still, the messages of the next one are late: both commit with tokens of the past",
    "controller: take-over", "controller: stale-token", "controller: committed-other",
    options=_PEERS | {"replication": 3} | {"build_ms": 4_000},
)  # fmt: skip
def two_stale_committers(stage: Stage) -> Actor:
    yield from stage.until_newest(COMMITTING)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    stage.server(segment.committer).stand_still(45_000)
    yield from stage.until("another takes over", lambda: stage.now(segment).commit_token == 2)
    second = stage.now(segment).committer
    assert second is not None
    stage.world.network.late[second] = 200_000
    yield from stage.until_happened("controller: stale-token")
    yield from stage.until_done(segment, 300_000)
    yield from stage.until_happened("controller: committed-other", 300_000)


@scenario(
    "a controller that stood still goes on answering from what it knew, after another one decided: it changes nothing",
    "controller: too-early", "written: commit",
    options=_PEERS,
)  # fmt: skip
def deposed_controller_answers(stage: Stage) -> Actor:
    controllers = stage.world.controllers
    yield from stage.until_newest(SegmentStatus.IN_PROGRESS)
    deposed = stage.controller_stands_still()
    yield from stage.until_led()
    leader = stage.controller
    yield from stage.until_newest(COMMITTING)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    controllers[:] = [deposed]
    yield from stage.until_happened("controller: too-early")
    controllers[:] = [leader]
    yield from stage.until_done(segment)


@scenario(
    "the first to report a cut by time is far behind: it is refused for a while, the one ahead commits",
    "controller: far-behind", "controller: largest-wins",
    options=_PEERS | {"epoch_rows": 20_000, "segment_rows": 1_000_000_000, "segment_ms": 40_000},
)  # fmt: skip
def winner_is_far_behind(stage: Stage) -> Actor:
    segment = stage.newest(SegmentStatus.IN_PROGRESS)
    assert segment is not None
    ahead, behind = (stage.server(name) for name in segment.replicas)
    yield from stage.until("the one behind has rows", lambda: _visible(behind))
    behind.lags = True
    stage.world.network.late[ahead.id] = 15_000
    yield from stage.until_happened("controller: far-behind")
    yield from stage.until_done(segment)
    stage.demand("the one ahead commits", holds=stage.now(segment).committer == ahead.id)


def _visible(server: Server) -> int:
    tail = server.process.tails.get(0) if server.process is not None else None
    return tail.closings.last.next_offset if tail is not None else 0


@scenario(
    "no server has room for what it builds: commits wait for it, and go on when there is",
    "disk full",
    options=_PEERS,
)  # fmt: skip
def disk_full_while_building(stage: Stage) -> Actor:
    yield from stage.until_newest(DONE)
    servers = stage.world.servers.values()
    for server in servers:
        server.full = True
    yield from stage.until_happened("disk full")
    yield 60_000
    segment = stage.newest(COMMITTING)
    assert segment is not None
    for server in servers:
        server.full = False
    yield from stage.until_done(segment)


# --- the store ----------------------------------------------------------------------------------------------------


@scenario(
    "the store hangs: commits wait for it a few times, then not at all",
    "replica: pending", "breaker: open",
    options={"segment_rows": 150},
)  # fmt: skip
def store_hangs(stage: Stage) -> Actor:
    stage.world.store.mode = "hanging"
    yield from stage.until_happened("breaker: open", 300_000)
    for _ in range(5):
        yield from stage.until_newest(DONE)


@scenario(
    "the store is away for two hours: the backlog drains, with no more uploads at once than servers may run",
    "upload failed", "breaker: open", "uploaded",
    options={"segment_rows": 1_000_000, "segment_ms": 360_000},
)  # fmt: skip
def store_returns_after_hours(stage: Stage) -> Actor:
    world = stage.world
    world.store.mode = "failing"
    yield 2 * 60 * 60 * 1000
    backlog = [one for one in stage.done() if one.store_state is not StoreState.STORED]
    stage.demand("a backlog", holds=len(backlog) > 15)
    world.store.mode, world.store.running_max = "slow", 0
    stored = lambda: all(stage.now(one).store_state is StoreState.STORED for one in backlog)  # noqa: E731
    yield from stage.until("the backlog is drained", stored, 20 * 60_000, 1_000)
    bound = UPLOADS_RUNNING_MAX * len(world.servers)
    stage.demand(f"at most {bound} uploads at once", holds=1 < world.store.running_max <= bound)


@scenario(
    "an upload that was given up lands when the store is back",
    "upload failed", "an object landed late", "written: store",
)  # fmt: skip
def upload_lands_late(stage: Stage) -> Actor:
    stage.world.store.mode = "hanging"
    yield from stage.until_happened("upload failed")
    stage.world.store.mode = "up"
    yield from stage.until_happened("an object landed late")


@scenario(
    "the upload of a committer that was replaced lands after the other one's commit, with other rows",
    "controller: take-over", "an object landed late",
    options=_REQUIRED,
)  # fmt: skip
def upload_of_a_stale_committer_lands_late(stage: Stage) -> Actor:
    store = stage.world.store
    store.mode = "hanging"
    yield from stage.until_newest(COMMITTING)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    stage.server(segment.committer).diverges = True
    yield from stage.until("an upload runs", lambda: store.running)
    stage.server(segment.committer).kill(100_000)
    yield from stage.until("another takes over", lambda: stage.now(segment).commit_token > 1)
    store.mode = "up"
    yield from stage.until_done(segment)
    yield from stage.until_happened("an object landed late")
    stage.demand("the object of its own attempt is named", holds=f".{stage.now(segment).commit_token}." in _url(stage))


def _url(stage: Stage) -> str:
    first = min(stage.done(), key=lambda one: one.sequence)
    return first.store_url or ""


@scenario(
    "a committer with other rows stands still while it uploads, and is replaced; what it uploaded is not wanted",
    "controller: take-over", "controller: stored-other", "replica: differs",
    options={"replication": 3},
)  # fmt: skip
def upload_of_other_rows(stage: Stage) -> Actor:
    store = stage.world.store
    store.mode = "slow"
    yield from stage.until_newest(COMMITTING)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    committer = stage.server(segment.committer)
    committer.diverges = True
    yield from stage.until("an upload runs", lambda: store.running)
    committer.stand_still(60_000)
    yield from stage.until_done(segment)
    yield from stage.until_happened("controller: stored-other")
    yield from stage.until_held_by_all(segment)


@scenario(
    "a stored object is deleted by hand: it is missed, and uploaded again",
    "an object was missed", "written: store",
    options=_REQUIRED,
)  # fmt: skip
def stored_object_is_deleted(stage: Stage) -> Actor:
    store = stage.world.store
    yield from stage.until_newest(DONE)
    segment = stage.newest(DONE)
    assert segment is not None
    assert segment.store_url is not None
    store.rotten.add(segment.store_url)
    store.objects.remove(segment.store_url)
    yield from stage.until("it is missed", lambda: stage.now(segment).store_url is None, 3_600_000, 1_000)
    store.rotten.clear()
    yield from stage.until("it is there again", lambda: stage.now(segment).store_url in store.objects, 600_000)


@scenario(
    "a committer dies with its object uploaded and another one commits its own: the first object is swept in the end",
    "controller: take-over", "an orphan was swept",
    options=_REQUIRED | {"servers": 2, "segment_rows": 1_000_000, "segment_ms": 600_000},
)  # fmt: skip
def orphan_is_swept(stage: Stage) -> Actor:
    store = stage.world.store
    yield from stage.until("an object is there", lambda: store.objects and stage.newest(COMMITTING), 700_000)
    segment = stage.newest(COMMITTING)
    assert segment is not None
    orphan = next(iter(store.objects))
    stage.server(segment.committer).kill(10_000)
    stage.world.network.late[segment.committer or ""] = 60_000
    yield from stage.until_done(segment)
    stage.demand("another object is named", holds=stage.now(segment).store_url != orphan)
    yield from stage.until("the first is swept", lambda: orphan not in store.objects, 3 * 3_600_000, 10_000)


@scenario(
    "a stored object is damaged: who fetches it sees that, and asks a peer",
    "the store: checksum", "fetched from a peer",
    options=_REQUIRED,
)  # fmt: skip
def stored_object_is_damaged(stage: Stage) -> Actor:
    yield from stage.until_newest(DONE)
    segment = stage.newest(DONE)
    assert segment is not None
    assert segment.store_url is not None
    yield from stage.until_held_by_all(segment)
    stage.world.store.rotten.add(segment.store_url)
    stage.world.store.objects.put(segment.store_url, "something else")
    stage.lose_disks(stage.others(segment)[:1], 1_000)
    yield from stage.until_happened("the store: checksum")
    yield from stage.until_held_by_all(segment)
