# SPDX-License-Identifier: Apache-2.0
"""The world of epochs: one log, one stream, the records that outlive processes.

Real in here: the start and the close machine, the partition reader, the bytes of every record, the memory log.
Simulated: Spark, processes, time.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, ClassVar

import msgspec
import pyarrow as pa

from cremant.epoch.format import decode, peek, to_message
from cremant.epoch.protocol import CheckpointState, PlannedBatch
from cremant.epoch.records import Record
from cremant.epoch.safeguards import Safeguards
from cremant.epoch.scan import PartitionScan
from cremant.log.api import OffsetExpired
from cremant.log.memory import MemoryLog
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.sim.engine import Engine, Violation
from cremant.sim.observers import Observers
from cremant.sim.options import Options
from cremant.sim.stream import StreamPartition, rows

TABLE = "sim"
INCARNATION = "51b0000000000001"
TOPIC = epoch_topic(TABLE, INCARNATION)


class Checkpoint(msgspec.Struct):
    """A Spark checkpoint directory: offset log and commit log, which only ever add what is not there, and versions of
    the state, by the batch that wrote them (never changed: a batch that runs again writes a new one)."""

    plans: dict[int, PlannedBatch] = {}
    commits: set[int] = set()
    states: dict[int, Any] = {}

    def copy(self) -> Checkpoint:
        return Checkpoint(dict(self.plans), set(self.commits), dict(self.states))

    def adopted(self, commits_above: int, plans_above: int, *, with_state: bool = False) -> Checkpoint:
        """A copy without what has a higher id; state that nobody committed is of no use. `with_state`: all of it."""
        return Checkpoint(
            {batch: plan for batch, plan in self.plans.items() if batch <= plans_above},
            {batch for batch in self.commits if batch <= commits_above},
            {batch: state for batch, state in self.states.items() if with_state or batch <= commits_above},
        )

    @property
    def state(self) -> CheckpointState | None:
        """As a directory is read: a commit without its plan makes it unreadable."""
        committed = max(self.commits, default=None)
        if committed is not None and committed > max(self.plans, default=-1):
            return None
        plans = tuple(self.plans[batch] for batch in sorted(self.plans)[-8:])
        return CheckpointState(plans=plans, committed=committed)


class World(Engine):
    OBSERVERS: ClassVar[type[Observers]] = Observers

    def __init__(self, seed: int, options: Options, safeguards: Safeguards) -> None:
        super().__init__(seed)
        self.options = options
        self.safeguards = safeguards
        self.copies = Random(f"{seed}/copies")
        self.log = MemoryLog(lambda: self.now_ms)
        self.stream: list[StreamPartition] = []
        self.observers = self.OBSERVERS(self)
        #: Read, decoded: the bytes of a record are decoded once, whoever reads it.
        self._records: dict[tuple[int, int], Record] = {}
        #: Read, not decoded yet.
        self._values: dict[tuple[int, int], pa.Buffer] = {}
        # What the metadata store keeps.
        self.generation = 0
        self.base = 0
        self.checkpoint = ""
        self.lease_holder = -1
        self.config_version = 1
        #: An operator wants the table taken back to this epoch.
        self.reset_to: int | None = None
        #: Whoever goes on with a checkpoint drops the state that nobody committed.
        self.state_dropped = True
        #: How often what batches leave behind was to be made anew, and how often a start has begun to.
        self.rebuilds_asked = self.rebuilds_begun = 0
        #: Per partition the decided cuts; the first is where the table began.
        self.cuts: list[list[Position]] = []
        # What file systems keep.
        self.checkpoints: dict[str, Checkpoint] = {}
        self._old_checkpoints: deque[tuple[str, Checkpoint]] = deque(maxlen=12)
        for _ in range(options.partitions):
            self.add_partition()

    # --- stream and log ---

    def rows(self, partition: int, first: int, end: int, config: int) -> pa.RecordBatch:
        """What the messages of [first, end) become under a config: content of a row block."""
        return rows(partition, first, end, config)

    def add_partition(self) -> None:
        start = self.workload.choice((0, 0, 17))
        self.stream.append(StreamPartition(start))
        self.observers.add_partition(start)
        self.cuts.append([Position(log_offset=0, epoch=0, generation=0, next_offset=start)])
        if len(self.stream) == 1:
            self.log.create_topic(TOPIC, 1)
        else:
            self.log.grow_topic(TOPIC, len(self.stream))

    def append(self, partition: int, record: Record) -> int:
        """Log offset of the record, which goes through its bytes."""
        log_offset = self.log.append(TOPIC, partition, [to_message(record, INCARNATION)]).first_offset
        self.observers.appended(partition, record, log_offset)
        return log_offset

    def read(self, partition: int, log_offset: int) -> Record | None:
        """The record at a log offset; None past the end. Raises OffsetExpired."""
        if log_offset < self.log.earliest(TOPIC, partition):
            raise OffsetExpired(TOPIC, partition, log_offset, self.log.earliest(TOPIC, partition))
        key = (partition, log_offset)
        record = self._records.get(key)
        if record is None and log_offset < self.log.latest(TOPIC, partition):
            if key not in self._values:
                batch = self.log.reader(TOPIC, partition, log_offset).read(max_messages=64, max_bytes=1 << 30)
                assert batch is not None  # the offset is below the end
                for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                    self._values[(partition, offset)] = value.as_buffer()
            record = self._records[key] = decode(self._values.pop(key), INCARNATION)
        return record

    def scan(self, partition: int, scan: PartitionScan) -> PartitionScan:
        first = max(scan.from_offset, self.log.earliest(TOPIC, partition))
        reader = self.log.reader(TOPIC, partition, first)
        while not scan.done and (batch := reader.read(max_messages=64, max_bytes=1 << 30)) is not None:
            for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                scan.add(offset, peek(value.as_buffer(), INCARNATION))
        return scan

    def base_taken(self, generation: int, first_epoch: int, reset_to: int | None) -> None:
        """A start of that generation is through with the log, and has gone back to `reset_to`."""
        if reset_to is not None:
            self.reset_to = None

    # --- checkpoints ---

    def remember_checkpoint(self, name: str) -> None:
        if name in self.checkpoints:
            self._old_checkpoints.append((name, self.checkpoints[name].copy()))

    def damage_checkpoint(self) -> None:
        """What happens to a directory between two runs."""
        if self.chance(self.options.checkpoint_lost):
            self.note(f"checkpoint {self.checkpoint} is lost")
            self.checkpoints.pop(self.checkpoint, None)
        elif self.chance(self.options.checkpoint_stale):
            old = [kept for name, kept in self._old_checkpoints if name == self.checkpoint]
            now = self.checkpoints.get(self.checkpoint)
            if now is not None and now.commits and self.copies.random() < 0.4:
                # Copied while it was in use, commits first: they lack the last one, the plans are all there.
                self.note(f"checkpoint {self.checkpoint} is restored without commit {max(now.commits)}")
                self.checkpoints[self.checkpoint] = Checkpoint(
                    dict(now.plans), now.commits - {max(now.commits)}, dict(now.states)
                )
            elif old:
                stale = self.trouble.choice(old).copy()
                self.note(f"checkpoint {self.checkpoint} is restored: plans {sorted(stale.plans)}")
                self.checkpoints[self.checkpoint] = stale

    # --- cuts (a sound subset of segment completion: the first reporter decides) ---

    def report_cut(self, partition: int, index: int, at: Position) -> None:
        """I-1: one end per segment; I-2: the next one starts exactly there (each replica counts from its own)."""
        cuts = self.cuts[partition]
        if index < len(cuts):
            if (cuts[index].log_offset, cuts[index].next_offset) != (at.log_offset, at.next_offset):
                raise Violation("I-1", f"partition {partition}: segment {index} ends at {cuts[index]} and at {at}")
            return
        if index > len(cuts):
            raise Violation("I-2", f"partition {partition}: segment {index} ends before segment {len(cuts)}")
        cuts.append(at)
        self.note(f"partition {partition}: segment {index} cut at {at.next_offset}, epoch {at.epoch}")
