# SPDX-License-Identifier: Apache-2.0
"""Carries out the start protocol of a table's query (decisions: `cremant.epoch.start`).

Each effect ends in exactly one event. A refusal by the controller (no lease, higher generation) is an event of its own;
anything that fails or whose outcome is unknown ends the start, and the next one sorts it out.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, assert_never

from cremant.cluster.leases import holder_name
from cremant.epoch import start_messages as start
from cremant.epoch.format import Head, peek, to_message
from cremant.epoch.protocol import (
    Append,
    Appended,
    CheckpointState,
    EffectFailed,
    GiveUp,
    ReadBack,
    ReadBackDone,
    RunPlan,
    highest_fence,
)
from cremant.epoch.scan import PartitionScan
from cremant.epoch.start import StartMachine
from cremant.log.api import Log, LogReader
from cremant.model.cluster import Rewind, TableView
from cremant.model.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    CremantError,
    Fenced,
    InvariantViolation,
    NotFound,
    PeerError,
    Unavailable,
    WorldError,
)
from cremant.model.limits import MIB
from cremant.model.names import epoch_topic
from cremant.pipeline.checkpoint import adopt_checkpoint, inspect_checkpoint
from cremant.pipeline.coordinator import has_state, read_companion
from cremant.shell.logs import log_failure
from cremant.wire.messages import BaseRequest, GenerationReply, GenerationRequest

_log = logging.getLogger(__name__)

GENERATION_PATH = "/internal/v1/pipeline/generation"
BASE_PATH = "/internal/v1/pipeline/base"
SCAN_MESSAGES = 1_024
SCAN_BYTES = 32 * MIB

T = TypeVar("T")


class Controller(Protocol):
    """What the pipeline needs of `Member`."""

    @property
    def id(self) -> str: ...

    @property
    def nonce(self) -> str: ...

    def call(self, path: str, message: object, reply_type: type[T], timeout_ms: int = ...) -> T: ...


def ensure_epoch_topic(log: Log, table: TableView) -> str:
    """The table's epoch log, with a partition for each of the table's; made or grown where the controller has not."""
    name, wanted = epoch_topic(table.name, table.record.incarnation), max(1, len(table.partitions))
    try:
        topic = log.topic(name)
    except NotFound:
        try:
            topic = log.create_topic(name, wanted)
        except AlreadyExists:
            topic = log.topic(name)
    if topic.partitions < wanted:
        try:
            log.grow_topic(name, wanted)
        except Conflict:
            pass  # somebody else grew it, further
    return name


def read_heads(log: Log, topic: str, partition: int, first: int, incarnation: str) -> Iterator[tuple[int, Head]]:
    """(log offset, head) of every record that is there now, from `first` or the earliest left on."""
    end = log.latest(topic, partition)
    reader = log.reader(topic, partition, max(first, log.earliest(topic, partition)))
    try:
        yield from heads_between(reader, end, incarnation)
    finally:
        reader.close()


def heads_between(reader: LogReader, end: int, incarnation: str) -> Iterator[tuple[int, Head]]:
    """(log offset, head) of every record from the reader's position to `end`, where it stands then. All of them, or an
    error (OffsetExpired, Unavailable), since the Fence that is looked for may be among those that are missing."""
    while reader.position < end:
        batch = reader.read(max_messages=min(SCAN_MESSAGES, end - reader.position), max_bytes=SCAN_BYTES)
        if batch is None:
            if reader.position < end:
                raise Unavailable(f"the epoch log ends at {reader.position}, expected to read up to {end}")
            break
        for index, offset in enumerate(batch.offsets.tolist()):
            if offset < end:
                yield offset, peek(batch.values[index].as_buffer(), incarnation)
    if reader.position != end:
        reader.seek(end)


def fence_between(log: Log, topic: str, partition: int, first: int, up_to: int, incarnation: str) -> int:
    """Highest generation of a Fence in [first, up_to), 0 if there is none."""
    reader = log.reader(topic, partition, first)
    try:
        return highest_fence(head for _, head in heads_between(reader, up_to, incarnation))
    finally:
        reader.close()


class StartDriver:
    """One start, with the first `partitions` of the table. `checkpoints` holds its checkpoint directories."""

    def __init__(
        self, controller: Controller, log: Log, table: TableView, checkpoints: Path, partitions: int, *,
        forget: bool = False,
    ) -> None:  # fmt: skip
        """`forget`: whatever the checkpoint says, it is lost."""
        self._controller = controller
        self._log = log
        self._table = table
        self._incarnation = table.record.incarnation
        self._checkpoints = checkpoints
        self._views = table.partitions[:partitions]
        self._topic = epoch_topic(table.name, self._incarnation)
        #: What an operator wants of this start, and what it has done once it ended well.
        self.rewound: Rewind | None = None
        self.rebuild = 0
        #: Since when the table has keys, before this start.
        self.keyed_from: int | None = None
        #: A seed leaves out keys of before then.
        self.expire_before_ms: int | None = None
        self._is_keyed = table.record.config.upsert is not None
        self._forget = forget

    def run(self) -> RunPlan:
        """The outcome of the start. Raises Fenced (somebody else's turn), PeerError (try again) or
        InvariantViolation."""
        ensure_epoch_topic(self._log, self._table)
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        machine = StartMachine(
            config_version=self._table.record.config_version,
            scan_from={view.record.partition: view.consuming.start for view in self._views},
            keyed=self._is_keyed,
        )
        waiting = list(machine.begin())
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, start.Planned):
                return self._ready(effect.run)
            if isinstance(effect, GiveUp):
                raise give_up(effect, self._table.name)
            try:
                event = self._carry_out(effect)
            except (PeerError, WorldError, NotFound, OSError) as error:
                event = EffectFailed(f"{type(effect).__name__}: {error}")
            waiting.extend(machine.step(event))
        raise PeerError(f"table {self._table.name}: the start protocol ended without a plan")

    def _carry_out(self, effect: start.Effect) -> start.Event:
        match effect:
            case start.TakeGeneration():
                return self._take_generation()
            case Append(partition, record):
                appended = self._log.append(self._topic, partition, [to_message(record, self._incarnation)])
                return Appended(partition, appended.first_offset)
            case ReadBack(partition, first, up_to):
                highest = fence_between(self._log, self._topic, partition, first, up_to, self._incarnation)
                return ReadBackDone(highest)
            case start.ReadPartitions():
                return start.PartitionsRead(tuple(view.record.start_offset for view in self._views))
            case start.ReadTo():
                return self._scan(effect)
            case start.InspectCheckpoint(checkpoint):
                return start.CheckpointInspected(self._inspect(self._checkpoints / checkpoint))
            case start.TakeBase():
                return self._take_base(effect)
            case start.AdoptCheckpoint(source, checkpoint, commits_above, plans_above):
                adopt_checkpoint(
                    self._checkpoints / source, self._checkpoints / checkpoint, commits_above=commits_above,
                    plans_above=plans_above,
                )  # fmt: skip
                return start.CheckpointAdopted()
            case start.Planned() | GiveUp():
                raise InvariantViolation("start", f"{type(effect).__name__} has no event")
            case _:
                assert_never(effect)

    def _take_generation(self) -> start.Event:
        holder = holder_name(self._controller.id, self._controller.nonce)
        request = GenerationRequest(holder=holder, table=self._table.name, incarnation=self._incarnation)
        try:
            reply = self._controller.call(GENERATION_PATH, request, GenerationReply)
        except (Conflict, Fenced) as error:
            return start.GenerationRefused(str(error))
        if reply.rewind is not None and reply.rewind != self._table.pipeline_record.rewind:
            # The log would be scanned from segments that the rewind has taken back, and the epoch not be found.
            return EffectFailed(f"this process has not heard yet of the rewind to epoch {reply.rewind.to_epoch}")
        self.rewound, self.rebuild, self.keyed_from = reply.rewind, reply.rebuild, reply.keyed_from
        self.expire_before_ms = reply.expire_before_ms
        reset_to = reply.rewind.to_epoch if reply.rewind is not None else None
        forget = self._forget or self.rebuild > 0
        return start.GenerationTaken(reply.generation, "" if forget else reply.checkpoint, reset_to)

    def _take_base(self, taken: start.TakeBase) -> start.Event:
        request = BaseRequest(
            table=self._table.name, incarnation=self._incarnation, generation=taken.generation, base=taken.base,
            checkpoint=taken.checkpoint, first_epoch=taken.first_epoch, previous=taken.previous, rewound=self.rewound,
            rebuild=self.rebuild, keyed=self._is_keyed, expire_before_ms=self.expire_before_ms,
        )  # fmt: skip
        try:
            self._controller.call(BASE_PATH, request, dict[str, Any])
        except (Conflict, Fenced) as error:
            return start.GenerationRefused(str(error))
        return start.BaseTaken()

    def _scan(self, request: start.ReadTo) -> start.Event:
        scan = PartitionScan(request)
        heads = read_heads(self._log, self._topic, request.partition, scan.from_offset, self._incarnation)
        for log_offset, head in heads:
            scan.add(log_offset, head)
            if scan.done:
                break
        return start.Scanned(request.partition, scan)

    def _inspect(self, checkpoint: Path) -> CheckpointState | None:
        """A checkpoint that was made without keys holds no state of theirs: it counts as lost when there are any. So
        does one whose state is not as the last committed batch left it."""
        try:
            made_with = read_companion(checkpoint)
        except Corrupt as error:
            log_failure(_log, "a checkpoint counts as lost", error, table=self._table.name)
            return None
        found = inspect_checkpoint(checkpoint) if (made_with is not None) == self._is_keyed else None
        if made_with is None or found is None or found.committed is None:
            return found
        return found if has_state(checkpoint, made_with, found.committed + 1) else None

    def _ready(self, run: RunPlan) -> RunPlan:
        if run.fresh:
            shutil.rmtree(self._checkpoints / run.checkpoint, ignore_errors=True)
        return run


def give_up(effect: GiveUp, table: str) -> CremantError:
    """The error that a machine's `GiveUp` stands for."""
    text = f"table {table}: {effect.reason}"
    if effect.rule:
        return InvariantViolation(effect.rule, text)
    return Fenced(text) if effect.fenced else PeerError(text)
