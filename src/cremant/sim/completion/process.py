# SPDX-License-Identifier: Apache-2.0
"""A server's process: what it hosts, and what it says of that, as `server/hosting.py` does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cremant.completion.copies import is_last_copy
from cremant.model.cluster import InstanceRecord, InstanceReport, Role, SegmentReport, TableRecord, TailReport
from cremant.model.completion import StorePolicy, policy_of
from cremant.model.errors import CremantError, NotFound, Unavailable
from cremant.model.names import SegmentName
from cremant.model.offsets import Position, Watermark
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus
from cremant.sim.completion.controller import Controller, View
from cremant.sim.completion.network import CONTROLLER
from cremant.sim.completion.sealing import Sealer
from cremant.sim.completion.tail import Tail
from cremant.sim.completion.uploads import Uploads
from cremant.sim.completion.world import INCARNATION, TABLE, Killed, World
from cremant.sim.engine import Actor
from cremant.wire.messages import Heartbeat

if TYPE_CHECKING:
    from cremant.sim.completion.server import Server

T = TypeVar("T")
#: As `server/hosting.py`.
SEGMENT_GRACE_MS = 15_000


@dataclass(slots=True)
class Hosted:
    metadata: SegmentMetadata
    unwanted_since_ms: int | None = None
    #: It went elsewhere, and nobody else is known to have it.
    last_copy: bool = False
    error: str | None = None


class Process:
    """One life of a server. Its disk outlives it."""

    def __init__(self, world: World, server: Server, number: int) -> None:
        self.world = world
        self.server = server
        self.id = server.id
        self.disk = server.disk
        self.lives = True
        self.paused_until_ms = 0
        self._nonce = f"{server.id}.{number}"
        self._beats = 0
        self.view: View | None = None
        self._reconciled = False
        self.hosted: dict[str, Hosted] = {}
        self.tails: dict[int, Tail] = {}
        self.opened: dict[int, SegmentMetadata] = {}
        self.sealer = Sealer(self)
        self.uploads = Uploads(self)
        #: Segments that are sent now, by who asked.
        self.transfers: Counter[str] = Counter()
        self._resets: set[int] = set()
        #: What was on the disk at the start and was not read since; the last is next.
        self._unverified = sorted(server.disk)

    @property
    def record(self) -> TableRecord:
        """The table as this server knows it."""
        return self.world.record if self.view is None else self.view.record

    @property
    def policy(self) -> StorePolicy:
        return policy_of(self.record.config, has_store=True)

    @property
    def cluster_now_ms(self) -> int:
        """The controller's time, as it was told last."""
        return self.world.now_ms + (self.view.ahead_ms if self.view is not None else 0)

    def hosted_metadata(self) -> list[SegmentMetadata]:
        return [hosted.metadata for hosted in self.hosted.values()]

    def rests(self, ms: int) -> Actor:
        """Lets time pass; a dead process stops here, one that stands still goes on later."""
        yield ms
        while self.lives and self.world.now_ms < self.paused_until_ms:
            yield min(1_000, self.paused_until_ms - self.world.now_ms)
        if not self.lives:
            raise Killed

    def while_alive(self, actor: Actor) -> Actor:
        try:
            yield from actor
        except Killed:
            return

    def call(self, deliver: Callable[[Controller], T], late_ms: int = 0) -> Generator[int, None, T]:
        """One request to a controller that answers. Raises Unavailable."""
        world, options = self.world, self.world.options
        yield from self.rests(world.schedule.randint(1, world.delay_ms) + late_ms)
        if world.network.loses(self.id, CONTROLLER) or not world.controllers:
            raise Unavailable("the controller did not answer")
        controller = world.schedule.choice(world.controllers)
        if world.chance(options.duplication):
            world.spawn(_again(world, controller, deliver), world.schedule.randint(1, 40_000))
        answer = deliver(controller)
        yield from self.rests(world.schedule.randint(1, world.delay_ms))
        if world.network.loses(CONTROLLER, self.id):
            raise Unavailable("the answer was lost")
        return answer

    def install(self, metadata: SegmentMetadata, content: str, end: Position) -> None:
        self.world.observers.installed(self.id, metadata.name, content)
        self.world.note(f"{self.id} installs {metadata.name}")
        self.disk.put(metadata.name, content)
        done = metadata
        if metadata.end is None:  # an older view was looked at; what was committed is known
            done = msgspec.structs.replace(
                metadata, status=SegmentStatus.DONE, end=end, end_offset=end.next_offset, checksum=content
            )
        self.hosted.setdefault(metadata.name, Hosted(done)).error = None
        tail = self.tails.get(metadata.partition)
        if tail is not None:
            tail.sealed(metadata.start_offset, end)

    # --- a look at everything ---

    def run(self) -> Actor:
        world = self.world
        try:
            while True:
                yield from self.rests(world.schedule.randint(700, 1_300))
                for tail in self.tails.values():
                    if not self.server.lags and not world.chance(world.options.lag):
                        tail.read(world.schedule.choice((2, 10, 100)))
                yield from self._beat()
                self._verify()
                if self.view is not None:
                    self._reconcile(self.view)
                    self.sealer.look()
                    self.uploads.look()
        except Killed:
            return

    def doubt(self, segment: str) -> None:
        self._unverified.append(segment)

    def _verify(self) -> None:
        """Reads one segment back."""
        if not self._reconciled or not self._unverified:
            return
        name = self._unverified.pop()
        if name in self.server.rotten:
            self.world.happened.add("a damaged file was found")
            self.world.note(f"{self.id}: {name} is damaged")
            self.server.rotten.discard(name)
            self.disk.remove(name)
            if name in self.hosted:
                self.hosted[name].error = "the file is damaged"

    def say(self, deliver: Callable[[Controller], T]) -> Generator[int, None, T]:
        """Of a segment; beside heartbeats."""
        return self.call(deliver, self.world.network.late.get(self.id, 0))

    def _beat(self) -> Actor:
        self._beats += 1
        record = InstanceRecord(id=self.id, role=Role.SERVER, host=self.id, port=1)
        beat = Heartbeat(instance=record, nonce=self._nonce, report=self._report(), number=self._beats)
        try:
            self.view = yield from self.call(lambda controller: controller.heartbeat(beat))
        except CremantError as error:
            self.world.note(f"{self.id}: no heartbeat: {error}")

    def _report(self) -> InstanceReport:
        segments = [self._said(one) for one in self.hosted.values()]
        segments += [self._said_open(one) for one in self.opened.values() if one.name not in self.hosted]
        tails = tuple(
            TailReport(
                table=TABLE, incarnation=INCARNATION, partition=partition, first_offset=tail.first_offset, rows=0,
                watermark=Watermark(
                    next_offset=tail.closings.last.next_offset, epoch=tail.closings.last.epoch
                ),
                error=tail.error, state="stopped" if tail.error else "consuming",
            )
            for partition, tail in self.tails.items()
        )  # fmt: skip
        return InstanceReport(segments=tuple(segments), tails=tails)

    def _said_open(self, metadata: SegmentMetadata) -> SegmentReport:
        tail = self.tails.get(metadata.partition)
        error = tail.error if tail is not None else None
        return SegmentReport(
            table=TABLE, segment=metadata.name, state=ReplicaState.ERROR if error else ReplicaState.CONSUMING,
            error=error, progress=self.sealer.progress(metadata.name),
        )  # fmt: skip

    def _said(self, hosted: Hosted) -> SegmentReport:
        metadata, content = hosted.metadata, self.disk.get(hosted.metadata.name)
        tail, end = self.tails.get(metadata.partition), metadata.end
        leaving = hosted.unwanted_since_ms is not None and not hosted.last_copy
        read = metadata.name not in self._unverified
        counted = content if read and not (leaving and self.world.guards.leaving_uncounted) else None
        state = ReplicaState.ERROR if hosted.error else ReplicaState.OFFLINE
        from_tail = tail is not None and tail.first_offset <= metadata.start_offset
        if content is not None or (from_tail and tail and end and tail.closings.last.next_offset >= end.next_offset):
            state = ReplicaState.ONLINE
        return SegmentReport(
            table=TABLE, segment=metadata.name, state=state, checksum=counted, error=hosted.error,
            progress=self.sealer.progress(metadata.name),
        )  # fmt: skip

    # --- reconciling, as server/hosting.py ---

    def _reconcile(self, view: View) -> None:
        done = {name: one for name, one in view.segments.items() if one.status is SegmentStatus.DONE}
        assigned = {name: one for name, one in done.items() if self.id in one.replicas}
        for name, metadata in assigned.items():
            known = self.hosted.setdefault(name, Hosted(metadata))
            known.metadata, known.unwanted_since_ms, known.last_copy = metadata, None, False
            if self.disk.get(name, metadata.checksum) != metadata.checksum and name not in self.sealer.busy:
                self.disk.remove(name)
        if not self._reconciled:
            self._find_strangers(done)
        self._remove_unwanted(view, done)
        self._reconcile_tails(view)
        self._reconciled = True

    def _find_strangers(self, done: dict[str, SegmentMetadata]) -> None:
        for name in [name for name in self.disk if name not in self.hosted]:
            if name in done:
                self.hosted[name] = Hosted(done[name], unwanted_since_ms=self.world.now_ms)
            else:
                self.world.note(f"{self.id} starts, and deletes {name}")
                self.disk.remove(name)

    def _remove_unwanted(self, view: View, done: dict[str, SegmentMetadata]) -> None:
        now_ms = self.world.now_ms
        for name, known in list(self.hosted.items()):
            metadata, number = done.get(name), known.metadata.partition
            if metadata is not None and self.id in metadata.replicas:
                continue
            newer = SegmentName.parse(name).sequence >= view.partitions[number].sequence
            if metadata is None and newer and number in self.tails:
                continue
            known.unwanted_since_ms = now_ms if known.unwanted_since_ms is None else known.unwanted_since_ms
            known.last_copy = metadata is not None and self._is_last_copy(metadata, view)
            if now_ms - known.unwanted_since_ms > SEGMENT_GRACE_MS and not known.last_copy:
                del self.hosted[name]
                if self.disk.remove(name):
                    self.world.note(f"{self.id} deletes {name}")

    def _is_last_copy(self, metadata: SegmentMetadata, view: View) -> bool:
        if self.disk.get(metadata.name) != metadata.checksum:
            return False
        states = view.states(metadata)
        if not self.world.guards.serving_counted:
            states = dict.fromkeys(view.live, ReplicaState.ONLINE)
        return is_last_copy(metadata, self.id, states)

    def _reconcile_tails(self, view: View) -> None:
        now_ms = self.world.now_ms
        mine = {number: p for number, p in view.partitions.items() if self.id in p.replicas}
        for number in self._resets & self.tails.keys():
            del self.tails[number]
        self._resets.clear()
        for number, placed in mine.items():
            if number not in self.tails:
                self.tails[number] = Tail(self.world.logs[number], view.segments[placed.consuming].start)
            self.tails[number].unwanted_since_ms = None
        self.opened = {number: view.segments[placed.consuming] for number, placed in mine.items()}
        for number, tail in list(self.tails.items()):
            if number not in mine:
                tail.unwanted_since_ms = now_ms if tail.unwanted_since_ms is None else tail.unwanted_since_ms
                if now_ms - tail.unwanted_since_ms > SEGMENT_GRACE_MS:
                    del self.tails[number]

    def ordered(self, what: str, segment: str) -> Actor:
        """An order of the controller: `upload` or `reset`. Raises CremantError."""
        if what == "upload":
            hosted = self.hosted.get(segment)
            if hosted is None or segment not in self.disk:
                raise NotFound(f"{segment} is not here")
            yield from self.uploads.upload_now(hosted.metadata)
        elif segment not in self.hosted or not self.sealer.hurry(segment):
            self._resets |= {number for number, one in self.opened.items() if one.name == segment}


def _again(world: World, controller: Controller, deliver: Callable[[Controller], object]) -> Actor:
    """The same message a second time, later; nobody waits for the answer."""
    if controller in world.controllers:
        try:
            deliver(controller)
        except CremantError as error:
            world.note(f"a message that came twice was refused: {error}")
    yield from ()
