# SPDX-License-Identifier: Apache-2.0
"""The world of segment completion: what outlives processes, and what stands between them.

Real in here: both halves of completion, breaker, fetch, copies, repair, liveness; the controller's catalog, instances,
commits and repair; the metadata store with its compare-and-set and the leader's lease. Models: processes, time, the
network, the epoch log (its closed positions), the deep store; a segment's content is a text that says its range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from cremant.controller.clock import Clock
from cremant.controller.streams import Streams, T
from cremant.log.api import Log
from cremant.model.cluster import (
    PartitionRecord,
    PipelineRecord,
    TableRecord,
    partition_key,
    pipeline_key,
    segment_key,
    table_key,
)
from cremant.model.completion import CompletionConfig
from cremant.model.offsets import Position
from cremant.model.schema import Schema
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.sim.completion.network import Network
from cremant.sim.completion.observers import Observers
from cremant.sim.completion.options import Options
from cremant.sim.completion.safeguards import WorldSafeguards
from cremant.sim.engine import Engine
from cremant.store.memory import MemoryMetadataStore
from cremant.store.metadata import Expect, Put, Update
from cremant.wire.codec import encode

TABLE = "sim"
INCARNATION = "51b0000000000002"


class Killed(Exception):
    """The process that did this is gone."""


class EpochLog:
    """One partition's: the closed positions, and where it begins. An epoch is two records: rows and mark."""

    def __init__(self) -> None:
        self.positions = [Position(log_offset=0, epoch=0, generation=1, next_offset=0)]
        self.earliest = 0

    @property
    def end(self) -> Position:
        return self.positions[-1]

    def close(self, rows: int) -> None:
        last = self.end
        self.positions.append(
            Position(
                log_offset=last.log_offset + 2, epoch=last.epoch + 1, generation=1, next_offset=last.next_offset + rows
            )
        )


class Watched(dict[str, str]):
    """Name -> content. Says when it changes, so that what must hold is looked at only then."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def put(self, name: str, content: str) -> None:
        self[name] = content
        self._changed()

    def remove(self, name: str) -> bool:
        self._changed()
        return self.pop(name, None) is not None

    def lose_all(self) -> None:
        self.clear()
        self._changed()


class ObjectStore:
    """`mode`: up, slow, failing or hanging. `objects` by URL."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.mode = "up"
        self.objects = Watched(changed)
        self.written_ms: dict[str, int] = {}
        #: Uploads under way, and how many they were at most.
        self.running = self.running_max = 0
        #: URLs of objects whose bytes are not what was written.
        self.rotten: set[str] = set()


class ObservedStore(MemoryMetadataStore):
    """The metadata store, with somebody who looks at each commit."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def commit(self, requirements: Sequence[Expect], updates: Sequence[Update]) -> int:
        if not self._world.guards.compared_and_set:
            requirements = ()
        steps = self._world.observers.steps_of(updates)
        self._world.strike(steps, "before")
        revision = super().commit(requirements, updates)
        self._world.observers.committed(updates)
        self._world.happened.update(f"written: {step}" for step in steps)
        self._world.strike(steps, "after")
        return revision


class VirtualClock(Clock):
    """`ahead_ms`: how wrong the wall clock was when its process began."""

    def __init__(self, world: World, ahead_ms: int = 0) -> None:
        self._world = world
        self.ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return self._world.now_ms + self.ahead_ms

    def wall_ms(self) -> int:
        return self.now_ms()


class SimulatedStreams(Streams):
    """The epoch logs, as the controller asks them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def of_epochs(self, call: Callable[[Log], T], *, timeout_ms: int | None = None) -> T:
        return call(cast("Log", self))

    def earliest(self, topic: str, partition: int) -> int:
        return self._world.logs[partition].earliest


class World(Engine):
    def __init__(self, seed: int, options: Options, guards: WorldSafeguards) -> None:
        super().__init__(seed)
        self.options = options
        self.guards = guards
        self.network = Network(self)
        #: What happened so far, in a few words each: faults, and rows of the machines' tables as "machine: row".
        self.happened: set[str] = set()
        #: Looks at each write to the metadata store, with what it does and "before" or "after" (scenarios).
        self.strike: Callable[[frozenset[str], str], None] = lambda steps, when: None
        self.logs = [EpochLog() for _ in range(options.partitions)]
        self.observers = Observers(self)
        self.store = ObjectStore(self.observers.changed)
        self.streams = SimulatedStreams(self)
        self.metadata = ObservedStore(self)
        #: Set by the actors themselves: controllers that answer, oldest first, and servers by id.
        self.controllers: list[Any] = []
        self.servers: dict[str, Any] = {}
        self.record = self._create_table()

    def took(self, machine: str, event: str, row: str) -> None:
        """A row of a machine's table."""
        self.transitions.add((machine, event, row))
        self.happened.add(f"{machine}: {row}")

    @property
    def build_ms(self) -> int:
        """Of a healed world: slow builds would only make it long."""
        return self.options.build_ms if self.faults else min(100, self.options.build_ms)

    @property
    def delay_ms(self) -> int:
        return self.options.delay_ms if self.faults else min(100, self.options.delay_ms)

    def _create_table(self) -> TableRecord:
        options = self.options
        config = TableConfig(
            name=TABLE, time_column="ts", replication=options.replication,
            stream=StreamConfig(stream_type="embedded", topic=TABLE),
            flush=FlushConfig(rows=options.segment_rows, time_ms=options.segment_ms),
            completion=CompletionConfig(
                mode=options.mode, store_policy=options.policy, upload_wait_ms=options.upload_wait_ms,
                peer_scheme="http" if options.replication > 1 else None,
            ),
        )  # fmt: skip
        record = TableRecord(config=config, table_schema=Schema(name=TABLE, fields=()), incarnation=INCARNATION)
        updates: list[Update] = [
            Put(table_key(TABLE), encode(record)), Put(pipeline_key(TABLE), encode(PipelineRecord()))
        ]  # fmt: skip
        for partition, log in enumerate(self.logs):
            replicas = tuple(sorted(f"s{(partition + n) % options.servers}" for n in range(options.replication)))
            name = f"{TABLE}__{partition}__0__19700101T0000Z"
            opened = SegmentMetadata(
                name=name, partition=partition, sequence=0, status=SegmentStatus.IN_PROGRESS, start_offset=0,
                start=log.end, created_ms=0, replicas=replicas,
            )  # fmt: skip
            placed = PartitionRecord(partition=partition, consuming=name, sequence=0, replicas=replicas, start_offset=0)
            updates += [
                Put(segment_key(TABLE, name), encode(opened)), Put(partition_key(TABLE, partition), encode(placed))
            ]  # fmt: skip
        self.metadata.commit([], updates)
        return record


def content_of(metadata: SegmentMetadata, end_offset: int) -> str:
    """What the log says is in [start, end)."""
    return f"{metadata.partition}:{metadata.start_offset}-{end_offset}"
