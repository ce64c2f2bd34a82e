# SPDX-License-Identifier: Apache-2.0
"""Failure cases by name: copies that are lost, damaged, moved and deleted, cut networks, wrong clocks, operators."""

from __future__ import annotations

from cremant.model.completion import StorePolicy
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.sim.completion.network import CONTROLLER
from cremant.sim.completion.server import Server
from cremant.sim.completion.stage import Scenario, Stage, registrar
from cremant.sim.engine import Actor

SCENARIOS: list[Scenario] = []
scenario = registrar(SCENARIOS)

COMMITTING, DONE = SegmentStatus.COMMITTING, SegmentStatus.DONE
_REQUIRED = {"policy": StorePolicy.STORE_REQUIRED}
_PEERS = {"policy": StorePolicy.PEERS_ONLY}
_THREE = {"replication": 3}


# --- peers --------------------------------------------------------------------------------------------------------


@scenario(
    "archives of a peer are torn: each is refused, and another holder asked",
    "an archive was torn", "fetched from a peer",
    options=_THREE | _PEERS,
)  # fmt: skip
def peer_sends_torn_archives(stage: Stage) -> Actor:
    yield from _one_bad_peer(stage, "torn", "an archive was torn")


@scenario(
    "archives of a peer have other content: each is refused, and another holder asked",
    "an archive was corrupt", "fetched from a peer",
    options=_THREE | _PEERS,
)  # fmt: skip
def peer_sends_other_content(stage: Stage) -> Actor:
    yield from _one_bad_peer(stage, "corrupt", "an archive was corrupt")


@scenario(
    "a peer says 404 of what the view says it has: another holder is asked",
    "a peer said 404", "fetched from a peer",
    options=_THREE | _PEERS,
)  # fmt: skip
def peer_says_404(stage: Stage) -> Actor:
    yield from _one_bad_peer(stage, "404", "a peer said 404")


def _one_bad_peer(stage: Stage, damage: str, fact: str) -> Actor:
    """One of two holders answers wrongly, and the third server has to get everything again."""
    yield from stage.until("six segments everywhere", lambda: _everywhere(stage, 6), 300_000)
    bad, wiped, _ = stage.world.servers.values()
    stage.world.network.damaged[bad.id] = damage
    stage.lose_disks([wiped], 1_000)
    yield from stage.until_happened(fact)
    yield from stage.until("the wiped server has everything", lambda: _has_all(stage, wiped))


def _everywhere(stage: Stage, segments: int) -> bool:
    return sum(stage.held_by_all(one) for one in stage.done()) >= segments


def _has_all(stage: Stage, server: Server) -> bool:
    return all(stage.holds(server, one) for one in stage.done())


@scenario(
    "two servers lose their disks and get everything from the third: its limits hold, refusals are waited out",
    "a peer was busy", "fetched from a peer",
    options=_THREE | _PEERS | {"transfer_ms": 4_000, "segment_rows": 150},
)  # fmt: skip
def download_storm(stage: Stage) -> Actor:
    yield from stage.until("thirty segments everywhere", lambda: _everywhere(stage, 30), 600_000, 1_000)
    _, *wiped = stage.world.servers.values()
    stage.lose_disks(wiped, 1_000)
    yield from stage.until_happened("a peer was busy")
    yield from stage.until("both have everything", lambda: all(_has_all(stage, one) for one in wiped), 300_000)


@scenario(
    "a server loses its disk and stays away for minutes: others hold its segments by then",
    "written: replicas", "fetched from a peer",
    options=_PEERS,
)  # fmt: skip
def server_is_wiped_and_stays_away(stage: Stage) -> Actor:
    yield from stage.until("six segments everywhere", lambda: _everywhere(stage, 6), 300_000)
    wiped = stage.holders(stage.done()[0])[0]
    stage.lose_disks([wiped], 400_000)
    safe = lambda: all(len({*stage.holders(one)} - {wiped}) > 1 for one in stage.done())  # noqa: E731
    yield from stage.until("all are safe without it", safe, 390_000, 1_000)
    stage.demand("it is still away", holds=not wiped.runs)


@scenario(
    "all holders of a segment lose their disks while the epoch log has its range: it is read again",
    "read from the epoch log again",
    options=_PEERS | {"trim": 0.0},
)  # fmt: skip
def all_holders_lost(stage: Stage) -> Actor:
    yield from stage.until("three segments everywhere", lambda: _everywhere(stage, 3))
    segment = stage.done()[0]
    stage.lose_disks(stage.holders(segment), 5_000)
    yield from stage.until_held_by_all(segment)


@scenario(
    "a replica is away while segments are sealed, then the only one that has them loses its disk: they are read again",
    "read from the epoch log again",
    options=_PEERS | {"servers": 2},
)  # fmt: skip
def single_copies_lost(stage: Stage) -> Actor:
    away, alone = stage.world.servers.values()
    yield from stage.until("a segment everywhere", lambda: _everywhere(stage, 1))
    away.kill(80_000)
    before = len(stage.done())
    yield from stage.until("five more are sealed", lambda: len(stage.done()) >= before + 5)
    newest = stage.newest(DONE)
    assert newest is not None
    yield from stage.until("it has them", lambda: stage.holds(alone, newest))
    stage.demand("nobody else has them", holds=stage.holders(newest) == [alone])
    stage.lose_disks([alone], 1_000)
    yield from stage.until_held_by_all(newest)


@scenario(
    "all holders of a segment stay away while the epoch log has its range: a third server reads it again",
    "read from the epoch log again", "written: replicas",
    options=_PEERS | {"trim": 0.0},
)  # fmt: skip
def all_holders_stay_away(stage: Stage) -> Actor:
    yield from stage.until("a segment everywhere", lambda: _everywhere(stage, 1))
    segment = stage.done()[0]
    replicas = stage.now(segment).replicas
    for name in replicas:
        stage.server(name).kill(900_000)
    third = next(server for name, server in stage.world.servers.items() if name not in replicas)
    yield from stage.until("the third server has it", lambda: stage.holds(third, segment), 890_000, 1_000)


@scenario(
    "a replica stands still until the epoch log begins behind it: it stops, and is started again where it can read",
    "liveness: Reset",
    options=_PEERS | _THREE,
)  # fmt: skip
def reader_falls_behind_the_log(stage: Stage) -> Actor:
    log = stage.world.logs[0]
    yield from stage.until("a segment everywhere", lambda: _everywhere(stage, 1))
    server = next(iter(stage.world.servers.values()))
    assert server.process is not None
    server.stand_still(600_000)
    position = server.process.tails[0].closings.last.log_offset
    yield from stage.until("the log begins behind it", lambda: log.earliest > position, 500_000)
    tail = server.process.tails[0]
    server.heal()
    yield from stage.until("its reader stops", lambda: tail.error)


@scenario(
    "all holders of a segment lose their disks and the epoch log has its range no more: the loss is recorded",
    "written: loss",
    options=_PEERS,
)  # fmt: skip
def all_holders_lost_for_good(stage: Stage) -> Actor:
    observers, log = stage.world.observers, stage.world.logs[0]
    yield from stage.until("a segment is trimmed from the log", lambda: _below(stage, log.earliest))
    lost = _below(stage, log.earliest)
    observers.given_up.update(one.name for one in lost)
    stage.lose_disks([server for one in lost for server in stage.holders(one)], 5_000)
    recorded = lambda: all(stage.now(one).lost is not None for one in lost)  # noqa: E731
    yield from stage.until("the losses are recorded", recorded)


@scenario(
    "all holders stay away for so long that a loss is recorded; they come back, and it is taken back",
    "written: loss", "repair: TakeBackLoss",
    options=_PEERS,
)  # fmt: skip
def holders_come_back_late(stage: Stage) -> Actor:
    log = stage.world.logs[0]
    yield from stage.until("a segment is trimmed from the log", lambda: _below(stage, log.earliest))
    segment = _below(stage, log.earliest)[0]
    for server in stage.holders(segment):
        server.kill(1_000_000)
    yield from stage.until("a loss is recorded", lambda: stage.now(segment).lost, 990_000, 1_000)
    yield from stage.until("it is taken back", lambda: stage.now(segment).lost is None, 900_000, 1_000)


def _below(stage: Stage, log_offset: int) -> list[SegmentMetadata]:
    return [one for one in stage.done() if one.start.log_offset < log_offset]


@scenario(
    "a file rots while its server is down: it is found at the start, and fetched from a peer",
    "a damaged file was found", "fetched from a peer",
    options=_PEERS,
)  # fmt: skip
def local_file_is_damaged(stage: Stage) -> Actor:
    yield from stage.until("three segments everywhere", lambda: _everywhere(stage, 3))
    segment = stage.done()[0]
    server = stage.holders(segment)[0]
    server.kill(2_000)
    server.rot(segment.name)
    yield from stage.until_happened("a damaged file was found")
    yield from stage.until("it has it again", lambda: stage.holds(server, segment))


@scenario(
    "the only file of a segment rots before it is uploaded: the upload notices, and the epoch log is read again",
    "a damaged file was found", "read from the epoch log again", "written: store",
    options={"servers": 1, "replication": 1},
)  # fmt: skip
def upload_finds_a_damaged_file(stage: Stage) -> Actor:
    stage.world.store.mode = "failing"
    yield from stage.until("a segment everywhere", lambda: _everywhere(stage, 1))
    segment = stage.done()[0]
    stage.server("s0").rot(segment.name)
    stage.world.store.mode = "up"
    yield from stage.until_happened("a damaged file was found")
    yield from stage.until("it is stored", lambda: stage.now(segment).store_state is StoreState.STORED, 600_000)


# --- network, clocks, operators -----------------------------------------------------------------------------------


@scenario(
    "a committer is heard and hears nothing, then hears and is not heard: others commit, it comes along",
    "cut one way", "controller: take-over",
    options=_PEERS | {"build_ms": 3_000},
)  # fmt: skip
def one_way_cuts(stage: Stage) -> Actor:
    for hears in (False, True):
        yield from stage.until_newest(COMMITTING)
        segment = stage.newest(COMMITTING)
        assert segment is not None
        assert segment.committer is not None
        cut = (segment.committer, CONTROLLER) if hears else (CONTROLLER, segment.committer)
        stage.world.network.cuts.add(cut)
        yield from stage.until_done(segment)
        yield 40_000
        stage.world.network.cuts.discard(cut)
        yield from stage.until_held_by_all(segment)


@scenario(
    "controllers with clocks that differ by minutes take over from each other",
    "a controller's clock is wrong", "written: commit",
    options={"skew_ms": 120_000},
)  # fmt: skip
def wrong_clocks(stage: Stage) -> Actor:
    for _ in range(4):
        yield from stage.until_newest(COMMITTING)
        yield from stage.until_written("commit", "after", stage.controller_dies)
        yield from stage.until("another controller leads", lambda: stage.world.controllers, 600_000)


@scenario(
    "a move at once takes the only copy's server away: it stays until another one has it",
    "replicas move", "fetched from a peer",
    options=_PEERS,
)  # fmt: skip
def last_copy_is_moved(stage: Stage) -> Actor:
    yield from stage.until("three segments everywhere", lambda: _everywhere(stage, 3))
    segment = stage.done()[0]
    keeper, wiped = stage.holders(segment)
    stage.world.network.damaged[keeper.id] = "404"
    stage.lose_disks([wiped], 1_000)
    single = lambda: wiped.answers and stage.holders(segment) == [keeper]  # noqa: E731
    yield from stage.until("a single copy is left, and known to be", single)
    others = tuple(name for name in stage.world.servers if name != keeper.id)
    stage.controller.changes.move({0: others}, downtime=True)
    yield 20_000
    stage.demand("it stays", holds=keeper.id in stage.now(segment).replicas)
    stage.world.network.damaged.clear()
    yield from stage.until("it left", lambda: keeper.id not in stage.now(segment).replicas)


@scenario(
    "a replica has lost its file, the only other holder is away: it is not given up, and comes back",
    "fetched from a peer",
    options=_PEERS,
)  # fmt: skip
def last_holder_is_away(stage: Stage) -> Actor:
    log = stage.world.logs[0]
    yield from stage.until("a segment is trimmed from the log", lambda: _below(stage, log.earliest))
    segment = _below(stage, log.earliest)[0]
    keeper, wiped = stage.holders(segment)
    keeper.kill(300_000)
    stage.lose_disks([wiped], 1_000)
    yield 250_000
    stage.demand("it stays a replica", holds=keeper.id in stage.now(segment).replicas)
    yield from stage.until_held_by_all(segment)


@scenario(
    "a server that gives a segment up hears no more, and is to get it back: what it is about to delete is no copy",
    "replicas move", "cut one way",
    options=_PEERS,
)  # fmt: skip
def copy_that_leaves_is_none(stage: Stage) -> Actor:
    yield from stage.until("three segments everywhere", lambda: _everywhere(stage, 3))
    segment = stage.done()[0]
    leaving, staying = stage.now(segment).replicas
    (new,) = set(stage.world.servers) - {leaving, staying}
    stage.controller.changes.move({0: (staying, new)})
    yield from stage.until("it left", lambda: leaving not in stage.now(segment).replicas)
    yield from stage.until("the move is over", lambda: not stage.controller.changes.moving)
    yield 2_000
    stage.world.network.cuts.add((CONTROLLER, leaving))
    stage.controller.changes.move({0: (leaving,)}, downtime=True)
    yield 30_000
    stage.world.network.cuts.clear()
    yield from stage.until("the move is over", lambda: not stage.controller.changes.moving)


@scenario(
    "a holder that is away loses its disk, the other one gave the segment up: it stays when the empty one is back",
    "replicas move", "fetched from a peer",
    options=_PEERS,
)  # fmt: skip
def holder_comes_back_empty(stage: Stage) -> Actor:
    log = stage.world.logs[0]
    yield from stage.until("a segment is trimmed from the log", lambda: _below(stage, log.earliest))
    segment = _below(stage, log.earliest)[0]
    away, leaving = stage.holders(segment)
    stage.world.network.damaged[leaving.id] = "404"
    stage.controller.changes.move({0: (away.id,)}, downtime=True)
    yield from stage.until("one is left in the record", lambda: stage.holders(segment) == [away])
    away.kill(25_000)
    yield 20_000
    stage.demand("who left has it still", holds=stage.holds(leaving, segment))
    away.lose_disk()
    yield 20_000
    stage.world.network.damaged.clear()
    yield from stage.until("who was away has it again", lambda: stage.holds(away, segment))


@scenario(
    "replicas move while the controller dies before and after each step",
    "replicas move", "written: replicas",
    options=_PEERS,
)  # fmt: skip
def controller_dies_while_replicas_move(stage: Stage) -> Actor:
    yield from stage.until("three segments everywhere", lambda: _everywhere(stage, 3))
    stage.on_write("replicas", "before", stage.controller_dies)
    servers = tuple(stage.world.servers)
    stage.controller.changes.move({0: servers[1:]})
    for when in ("after", "before", "after"):
        yield from stage.until_struck()
        yield from stage.until_led()
        stage.on_write("replicas", when, stage.controller_dies)
        if not stage.controller.changes.moving:
            stage.controller.changes.move({0: servers[:2]})
    yield from stage.until_struck()


@scenario(
    "the policy of a live table changes while its store is away: what the last one wants is made up for",
    "the policy changes", "written: store",
    options=_REQUIRED,
)  # fmt: skip
def policy_changes(stage: Stage) -> Actor:
    yield from stage.until_newest(DONE)
    stage.world.store.mode = "failing"
    for policy in (StorePolicy.STORE_BEST_EFFORT, StorePolicy.PEERS_ONLY):
        stage.controller.changes.change_policy(policy)
        for _ in range(3):
            yield from stage.until_newest(DONE)
    states = {one.store_state for one in stage.done()}
    stage.demand("committed without an object", holds={StoreState.FAILED, StoreState.NONE} <= states)
    stage.world.store.mode = "up"
    stage.controller.changes.change_policy(StorePolicy.STORE_REQUIRED)  # settled is only what is stored then


@scenario(
    "segments are deleted while one of their servers is down: no file of them stays",
    "a segment was deleted",
    options=_REQUIRED,
)  # fmt: skip
def deleted_while_a_server_is_down(stage: Stage) -> Actor:
    yield from stage.until("three segments everywhere", lambda: _everywhere(stage, 3))
    segment, server = stage.done()[0], stage.holders(stage.done()[0])[0]
    server.kill(30_000)
    stage.controller.changes.delete(segment.name)
    yield from stage.until("its file is gone", lambda: server.runs and segment.name not in server.disk)
    stage.demand("its object is gone", holds=segment.store_url not in stage.world.store.objects)
