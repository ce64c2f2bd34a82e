# SPDX-License-Identifier: Apache-2.0
"""Controllers: real catalog, instances, commits and repair over the metadata store; several may believe to lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cremant.cluster.states import external_view, ideal_state, replica_state
from cremant.completion.copies import misses_store, trim_floor
from cremant.completion.liveness import Place
from cremant.completion.orders import Assign, Prune, RecordLoss, TakeBackLoss, Upload
from cremant.completion.segment import CommitterProgressed, Event, Reply
from cremant.controller.catalog import Catalog
from cremant.controller.commits import Commits
from cremant.controller.housekeeping import SWEEP_INTERVAL_MS
from cremant.controller.instances import Instances
from cremant.controller.objects import Objects
from cremant.controller.repair import Ended, Repair, ServerCalls
from cremant.model.cluster import InstanceReport, PartitionRecord, Role, TableRecord, segment_key
from cremant.model.completion import StorePolicy, policy_of
from cremant.model.errors import CremantError, NotFound, StoreFailed, Unavailable
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus
from cremant.sim.completion.changes import Changes
from cremant.sim.completion.network import CONTROLLER
from cremant.sim.completion.objects import SimulatedStore
from cremant.sim.completion.world import INCARNATION, TABLE, VirtualClock, World
from cremant.sim.engine import Actor
from cremant.store.lease import Leadership, lead
from cremant.store.memory import MemoryMetadataStore
from cremant.store.metadata import Entry, Expect, MetadataStore, Update
from cremant.wire.messages import Heartbeat

LEASE_MS = 5_000
#: How long the ablated controller keeps what it answered before it writes it.
UNWRITTEN_MS = 2_000


class View(msgspec.Struct, frozen=True):
    """What servers are told."""

    record: TableRecord
    segments: dict[str, SegmentMetadata]
    partitions: dict[int, PartitionRecord]
    live: frozenset[str]
    #: What live servers said last.
    reports: dict[str, InstanceReport]
    #: How wrong the controller's clock is.
    ahead_ms: int

    def states(self, segment: SegmentMetadata) -> dict[str, ReplicaState]:
        """What live servers report of it."""
        return {
            server: replica_state(segment, said)
            for server, report in self.reports.items()
            for said in report.segments
            if said.segment == segment.name
        }


class SimulatedCalls(ServerCalls):
    def __init__(self, world: World) -> None:
        self._world = world

    def post(self, server: str, paths: Sequence[str], timeout_ms: int, ended: Ended) -> None:
        self._world.spawn(self._run(server, paths, ended), self._world.schedule.randint(1, 50))

    def _run(self, server: str, paths: Sequence[str], ended: Ended) -> Actor:
        world, error, of_store = self._world, "", False
        for path in paths:
            _, _, _, segment, what = path.split("/")
            try:
                if world.network.loses(CONTROLLER, server) or not world.servers[server].answers:
                    raise NotFound(f"server {server} did not answer")
                yield from world.servers[server].ordered(what, segment)
            except CremantError as failure:
                error, of_store = error or str(failure), of_store or isinstance(failure, StoreFailed)
        yield world.schedule.randint(1, 50)
        ended(error, of_store=of_store)


class UnwrittenStore(MemoryMetadataStore):
    """Ablation: writes are answered at once and reach the store a while later; a crash loses them."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._entries = dict(world.metadata._entries)
        self._revision = world.metadata.revision
        self.dead = False

    def get(self, key: str) -> Entry | None:
        return super().get(key) or self._world.metadata.get(key)

    def commit(self, requirements: Sequence[Expect], updates: Sequence[Update]) -> int:
        revision = super().commit(requirements, updates)
        self._world.spawn(self._write(updates), UNWRITTEN_MS)
        return revision

    def _write(self, updates: Sequence[Update]) -> Actor:
        if not self.dead:
            self._world.metadata.commit([], updates)
        yield from ()


class ObservedCommits(Commits):
    """Notes which row of the table answered."""

    world: World

    def _step(self, table: str, incarnation: str | None, segment: str, event: Event) -> Reply:
        reply = super()._step(table, incarnation, segment, event)
        rule = "renew" if isinstance(event, CommitterProgressed) else reply.rule
        self.world.took("controller", type(event).__name__, rule)
        return reply


class ObservedRepair(Repair):
    """Notes which orders were given."""

    world: World

    def _write(self, orders: Sequence[Assign | Prune | RecordLoss | TakeBackLoss]) -> int:
        for order in orders:
            self.world.took("repair", "step", type(order).__name__)
        return super()._write(orders)

    def _upload(self, order: Upload) -> None:
        self.world.took("repair", "step", type(order).__name__)
        super()._upload(order)

    def _place(self, orders: Sequence[Place]) -> None:
        for order in orders:
            self.world.took("liveness", "step", type(order).__name__)
        super()._place(orders)

    def reset(self, table: str, wanted: Mapping[str, Sequence[str]]) -> None:
        self.world.took("liveness", "step", "Reset")
        super().reset(table, wanted)


class Controller:
    def __init__(
        self, world: World, name: str, leadership: Leadership, store: MetadataStore, clock: VirtualClock
    ) -> None:
        self.world = world
        self.name = name
        self.store = store
        self.clock = clock
        self.lives = True
        machines = world.guards.machines
        self.catalog = Catalog(store, leadership)
        self.instances = Instances(self.catalog, clock)
        self.commits = ObservedCommits(self.catalog, self.instances, clock, safeguards=machines)
        self.commits.world = world
        self.repair = ObservedRepair(
            self.catalog, self.instances, world.streams, lambda record: policy_of(record.config, has_store=True), clock,
            calls=SimulatedCalls(world), safeguards=machines,
        )  # fmt: skip
        self.repair.world = world
        self.objects = Objects(self.catalog, SimulatedStore(world), clock)
        self._sweep_at_ms = clock.now_ms() + SWEEP_INTERVAL_MS
        self.changes = Changes(self)
        self._view: View | None = None
        self.catalog.on_change(self._forget_view)

    @property
    def policy(self) -> StorePolicy:
        return policy_of(self.catalog.tables[TABLE].config, has_store=True)

    def _forget_view(self) -> None:
        self._view = None

    def heartbeat(self, beat: Heartbeat) -> View:
        self.instances.heartbeat(beat)
        if self.instances.is_newest(beat):
            self.commits.heard(beat.instance.id, beat.report)
        live = frozenset(self.instances.live(Role.SERVER))
        if self._view is None or self._view.live != live:
            self._view = View(
                self.catalog.tables[TABLE], dict(self.catalog.segments[TABLE]), dict(self.catalog.partitions[TABLE]),
                live, {}, self.clock.ahead_ms,
            )  # fmt: skip
        return msgspec.structs.replace(self._view, reports=self.instances.reports())

    def turn(self) -> None:
        """One second of a leader's duties. Raises StoreConflict when it leads no more."""
        world = self.world
        now_ms = self.clock.now_ms()
        self.catalog.renew(lead(self.store, "controller", self.name, now_ms=now_ms, lease_ms=LEASE_MS))
        self.instances.refresh_liveness()
        if world.guards.consumption_repaired:
            self.repair.run_liveness()
        if world.guards.copies_repaired:
            self.repair.run_copies()
        self.changes.run()
        self._look_after_objects()
        if world.chance(world.options.trim):
            self._trim()
        if world.chance(world.options.force):
            self.force()

    def _look_after_objects(self) -> None:
        if self.objects.look():
            self.world.happened.add("an object was missed")
        if self.clock.now_ms() < self._sweep_at_ms:
            return
        self._sweep_at_ms = self.clock.now_ms() + SWEEP_INTERVAL_MS
        try:
            if self.objects.sweep():
                self.world.happened.add("an orphan was swept")
        except Unavailable as error:
            self.world.note(f"{self.name} sweeps later: {error}")

    def _trim(self) -> None:
        tails = self.instances.tails(TABLE, INCARNATION)
        for partition, log in enumerate(self.world.logs):
            visible = [tail.watermark.next_offset for tail in tails.get(str(partition), {}).values()]
            segments = [one for one in self.catalog.segments[TABLE].values() if one.partition == partition]
            floor = trim_floor(segments, visible, self.world.guards.machines)
            if floor > log.earliest:
                self.world.note(f"{self.name} trims partition {partition} to {floor}")
                log.earliest = floor
                self.world.observers.changed()

    def force(self) -> None:
        """An operator wants everything sealed that is there now."""
        for partition in self.catalog.partitions[TABLE].values():
            opened = self.catalog.segments[TABLE][partition.consuming]
            there = self.world.logs[partition.partition].end.next_offset
            if opened.status is SegmentStatus.IN_PROGRESS and there > opened.start_offset:
                forced = msgspec.structs.replace(opened, force_at_offset=there)
                self.catalog.commit({segment_key(TABLE, opened.name): forced})

    def unsettled(self) -> str:
        """What is not as it should be in the end; "" when all is (I-10: ideal state = external view)."""
        if self.changes.moving:
            return "replicas move"
        segments, partitions = self.catalog.segments[TABLE], self.catalog.partitions[TABLE].values()
        for partition in partitions:
            if segments[partition.consuming].start_offset != self.world.logs[partition.partition].end.next_offset:
                return f"{partition.consuming} is not sealed: {segments[partition.consuming].status}"
        given_up = self.world.observers.given_up
        for one in segments.values():
            if one.name in given_up or one.lost is not None:
                if one.name not in given_up or one.lost is None:
                    return f"{one.name}: lost {one.lost}, given up {one.name in given_up}"
            elif misses_store(one, self.policy):
                return f"{one.name} is {one.store_state} under {self.policy}"
        for server in self.world.servers.values():
            for name in server.disk:
                if name not in segments or server.id not in segments[name].replicas:
                    return f"{name} is still on {server.id}"
        ideal = ideal_state(partitions, [one for one in segments.values() if one.name not in given_up])
        view = external_view(TABLE, INCARNATION, partitions, segments, self.instances.reports())
        shown = {name: {i: s for i, s in states.items() if i in ideal.get(name, ())} for name, states in view.items()}
        for name, states in ideal.items():
            if shown.get(name) != states:
                return f"{name} should be {states}, and is {shown.get(name)}"
        return ""


def controllers(world: World) -> Actor:
    """Keeps one running; crashes and pauses them."""
    number = 0
    while True:
        number += 1
        name, clock = f"c{number}", VirtualClock(world, _ahead_ms(world))
        while (found := lead(world.metadata, "controller", name, now_ms=clock.now_ms(), lease_ms=LEASE_MS)) is None:
            yield 500
        store: MetadataStore = world.metadata if world.guards.persisted_first else UnwrittenStore(world)
        controller = Controller(world, name, found, store, clock)
        world.note(f"{name} leads, term {found.term}")
        world.controllers.append(controller)
        yield from _life(world, controller)


def _ahead_ms(world: World) -> int:
    if not world.faults or not world.options.skew_ms:
        return 0
    world.happened.add("a controller's clock is wrong")
    return world.trouble.randint(-world.options.skew_ms, world.options.skew_ms)


def _life(world: World, controller: Controller) -> Actor:
    options = world.options
    while True:
        yield world.schedule.randint(800, 1_200)
        if not controller.lives:
            return
        if world.chance(options.controller_crash):
            gone(world, controller)
            return
        if world.chance(options.controller_pause):
            pause_ms = world.trouble.randint(1_000, 3 * LEASE_MS)
            world.note(f"{controller.name} stands still for {pause_ms} ms")
            world.controllers.remove(controller)
            world.spawn(_wakes(world, controller), pause_ms)
            return
        try:
            controller.turn()
        except CremantError as error:
            world.note(f"{controller.name} leads no more: {error}")
            gone(world, controller)
            return


def _wakes(world: World, controller: Controller) -> Actor:
    """It answers for a while before it notices that another one leads."""
    world.note(f"{controller.name} goes on")
    world.controllers.append(controller)
    yield world.schedule.randint(1, 3_000)
    gone(world, controller)


def gone(world: World, controller: Controller) -> None:
    world.note(f"{controller.name} is gone")
    controller.lives = False
    if controller in world.controllers:
        world.controllers.remove(controller)
    if isinstance(controller.store, UnwrittenStore):
        controller.store.dead = True
