# SPDX-License-Identifier: Apache-2.0
"""A pipeline process: the real start and close machines around a model of Spark's micro-batches.

Of Spark is modelled what the protocol leans on: the plan of a batch is written before it runs and read again after a
crash, the commit after it; both only if nobody else wrote them; tasks are tried again, and those that were given up, or
whose driver died, may go on writing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, assert_never

from cremant.epoch.close import BlockAck, CloseBatch, CloseMachine, CommitBatch, GapAck, Idle, UpdateAck
from cremant.epoch.close import Effect as CloseEffect
from cremant.epoch.close import Event as CloseEvent
from cremant.epoch.format import row_block
from cremant.epoch.protocol import (
    Append,
    Appended,
    EffectFailed,
    GiveUp,
    PlannedBatch,
    ReadBack,
    ReadBackDone,
    RunPlan,
    highest_fence,
)
from cremant.epoch.records import Fence, Gap, GapReason
from cremant.epoch.scan import PartitionScan
from cremant.epoch.start import (
    AdoptCheckpoint,
    BaseTaken,
    CheckpointAdopted,
    CheckpointInspected,
    GenerationRefused,
    GenerationTaken,
    InspectCheckpoint,
    PartitionsRead,
    Planned,
    ReadPartitions,
    ReadTo,
    Scanned,
    StartMachine,
    TakeBase,
    TakeGeneration,
)
from cremant.epoch.start import Effect as StartEffect
from cremant.epoch.start import Event as StartEvent
from cremant.log.api import OffsetExpired
from cremant.model.offsets import OffsetRange
from cremant.sim.engine import Actor, Violation
from cremant.sim.world import Checkpoint, World

Ack = TypeVar("Ack")
Attempt = Generator[None, None, list[Ack]]
#: A task that fails this often fails its batch.
ATTEMPTS_MAX = 4


class TaskFailed(Exception):
    pass


class Driver:
    """`run` is its life; when it ends, the process has ended. `closing`: machine of the query that runs, if any."""

    #: Batches leave state behind that the next one needs.
    KEYED: ClassVar[bool] = False

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.closing: CloseMachine | None = None
        #: Task attempts in flight, by task.
        self.attempts: Mapping[int, Attempt[Any]] = {}
        self._seen = 0
        #: What the start under way was told to go back to.
        self._reset_to: int | None = None
        #: The last rebuild that it has begun, or begins with its start.
        self._rebuild = 0

    def run(self) -> Actor:
        plan = yield from self._start()
        if plan is not None:
            yield from self._query(plan)

    @property
    def block_rows_max(self) -> int:
        return self.world.options.block_rows

    def pass_time(self) -> int:
        return self.world.schedule.choice((1, 1, 2, 5, 9))

    # --- start ---

    def _start(self) -> Generator[int, None, RunPlan | None]:
        world = self.world
        latest = {partition: cuts[-1] for partition, cuts in enumerate(world.cuts)}
        self._reset_to = world.reset_to
        machine = StartMachine(
            config_version=world.config_version, scan_from=latest, keyed=self.KEYED, safeguards=world.safeguards
        )
        effects = machine.begin()
        while effects:
            yield self.pass_time()
            effect = effects.pop(0)
            if isinstance(effect, Planned):
                world.observers.planned(effect.run, self._seen)
                world.note(f"driver {self.number}: {effect.run}")
                return effect.run
            if isinstance(effect, GiveUp):
                self._gave_up(effect)
                return None
            start_event = self._start_event(effect)
            world.transitions.add(("start", machine.state.value, type(start_event).__name__))
            effects.extend(machine.step(start_event))
        raise Violation("start", "no effect is left and there is no plan")

    def _gave_up(self, effect: GiveUp) -> None:
        self.world.note(f"driver {self.number} gives up: {effect.reason}")
        if effect.rule:
            raise Violation(effect.rule, effect.reason)

    def _start_event(self, effect: StartEffect) -> StartEvent:
        world = self.world
        match effect:
            case TakeGeneration():
                if world.lease_holder != self.number:
                    return GenerationRefused("no lease")
                world.generation += 1
                if world.reset_to != self._reset_to:
                    return EffectFailed("its view is older than the rewind")
                self._rebuild = world.rebuilds_asked
                forget = self._rebuild > world.rebuilds_begun
                return GenerationTaken(world.generation, "" if forget else world.checkpoint, world.reset_to)
            case Append(partition, record):
                if isinstance(record, Fence):
                    self._seen = max(self._seen, world.observers.oracles[partition].epoch_max)
                return self._append(effect)
            case ReadBack():
                return self._read_back(effect)
            case ReadPartitions():
                return PartitionsRead(tuple(partition.start for partition in world.stream))
            case ReadTo(partition, _, _):
                return Scanned(partition, world.scan(partition, PartitionScan(effect)))
            case InspectCheckpoint(name):
                found = world.checkpoints.get(name)
                return CheckpointInspected(None if found is None else found.state)
            case TakeBase(generation, base, checkpoint, first_epoch):
                if generation != world.generation:
                    return GenerationRefused(f"generation {world.generation} is in force")
                world.base, world.checkpoint = base, checkpoint
                world.rebuilds_begun = max(world.rebuilds_begun, self._rebuild)
                world.base_taken(generation, first_epoch, self._reset_to)
                return BaseTaken()
            case AdoptCheckpoint(source, name, commits_above, plans_above):
                found = world.checkpoints.get(source, Checkpoint())
                world.checkpoints[name] = found.adopted(commits_above, plans_above, with_state=not world.state_dropped)
                return CheckpointAdopted()
            case Planned() | GiveUp():
                raise AssertionError(effect)
            case _:
                assert_never(effect)

    def _append(self, effect: Append) -> Appended:
        log_offset = self.world.append(effect.partition, effect.record)
        kind = type(effect.record).__name__
        self.world.note(f"driver {self.number}: {kind} {_brief(effect.record)} -> {effect.partition}@{log_offset}")
        return Appended(effect.partition, log_offset)

    def _read_back(self, effect: ReadBack) -> ReadBackDone | EffectFailed:
        try:
            found = [self.world.read(effect.partition, offset) for offset in range(effect.first, effect.up_to)]
        except OffsetExpired as error:
            return EffectFailed(str(error))
        return ReadBackDone(highest_fence(record for record in found if isinstance(record, Fence)))

    # --- the query ---

    def _query(self, run: RunPlan) -> Actor:
        world = self.world
        if run.fresh:
            world.checkpoints[run.checkpoint] = Checkpoint()
        checkpoint = world.checkpoints.setdefault(run.checkpoint, Checkpoint())
        self.closing = CloseMachine(run, safeguards=world.safeguards)
        planned = max(checkpoint.plans, default=-1)
        committed = max(checkpoint.commits, default=-1)
        last = checkpoint.plans.get(planned)
        while True:
            yield self.pass_time()
            if len(world.stream) > len(run.start) and world.safeguards.growth_fenced:
                world.note(f"driver {self.number} stops: the stream has {len(world.stream)} partitions")
                return
            if world.reset_to is not None:
                world.note(f"driver {self.number} stops: the table is to go back to epoch {world.reset_to}")
                return
            if world.rebuilds_asked > self._rebuild:
                world.note(f"driver {self.number} stops: its state is to be made anew")
                return
            if planned <= committed or last is None:
                following = self._plan(run, last, planned + 1)
                if following is None:
                    yield from self._heartbeat(self.closing)
                    continue
                planned, last = planned + 1, following
                if planned in checkpoint.plans:
                    world.note(f"driver {self.number} dies: batch {planned} is planned by somebody else")
                    return
                checkpoint.plans[planned] = following
                yield self.pass_time()
            if not (yield from self._batch(run, self.closing, last, checkpoint)):
                return
            yield self.pass_time()
            if planned in checkpoint.commits:
                world.note(f"driver {self.number} dies: batch {planned} was committed by somebody else")
                return
            checkpoint.commits.add(planned)
            committed = planned
            world.remember_checkpoint(run.checkpoint)

    def _plan(self, run: RunPlan, before: PlannedBatch | None, batch_id: int) -> PlannedBatch | None:
        world = self.world
        ends = before.end if before is not None else ()
        count = len(run.start) if world.safeguards.growth_fenced else len(world.stream)
        starts = [*run.start, *(partition.start for partition in world.stream[len(run.start) :])][:count]
        starts[: len(ends)] = ends
        # A backlog is worked off in larger batches once the faults are over: that phase asks whether, not how.
        limit = world.workload.randint(1, world.options.batch_rows) * (1 if world.faults else 20)
        following = []
        for stream, start in zip(world.stream, starts, strict=False):
            first = max(start, stream.earliest)
            following.append(max(start, min(stream.end, first + limit)))
        config_version = world.config_version
        if following == starts:
            if not run.fresh or batch_id > 0:
                return None
            config_version = 0  # Spark runs a first batch in any case: an epoch without rows, of no config
        return PlannedBatch(batch_id=batch_id, start=tuple(starts), end=tuple(following), config_version=config_version)

    def _heartbeat(self, machine: CloseMachine) -> Actor:
        at_ms = self.world.now_ms
        yield self.pass_time()
        ends = tuple(partition.end for partition in self.world.stream[: len(machine.ends)])
        yield from self._close(machine, machine.step(Idle(ends=ends, at_ms=at_ms)))
        yield 30

    def _batch(
        self, run: RunPlan, machine: CloseMachine, plan: PlannedBatch, checkpoint: Checkpoint
    ) -> Generator[int, None, bool]:
        gaps: list[GapAck] = []
        shares: dict[int, OffsetRange] = {}
        for partition, (start, end) in enumerate(zip(plan.start, plan.end, strict=True)):
            first = min(max(start, self.world.stream[partition].earliest), end)
            if first > start:
                yield self.pass_time()
                gap = Gap(generation=run.generation, range=OffsetRange(start, first), reason=GapReason.EXPIRED)
                self._append(Append(partition, gap))
                gaps.append(GapAck(partition=partition, range=gap.range))
            if first < end:
                shares[partition] = OffsetRange(first, end)
        blocks = yield from self._tasks(
            {partition: partial(self._attempt, run, plan, partition, share) for partition, share in shares.items()}
        )
        if blocks is None:
            return False
        if len(shares) < len(plan.end):
            yield from self._heartbeat(machine)
        updates = yield from self._updates(run, plan, shares, checkpoint)
        if updates is None:
            return False
        at_ms = self.world.now_ms
        yield self.pass_time()
        self.world.transitions.add(("close", machine.state.value, CloseBatch.__name__))
        event = CloseBatch(
            plan=plan,
            blocks=tuple(blocks),
            gaps=tuple(gaps),
            updates=tuple(updates),
            stream_ends=tuple(partition.end for partition in self.world.stream[: len(plan.end)]),
            ends_read_at_ms=at_ms,
        )
        return (yield from self._close(machine, machine.step(event)))

    def _close(self, machine: CloseMachine, effects: list[CloseEffect]) -> Generator[int, None, bool]:
        while effects:
            yield self.pass_time()
            effect = effects.pop(0)
            event: CloseEvent
            match effect:
                case Append():
                    event = self._append(effect)
                case ReadBack():
                    event = self._read_back(effect)
                case CommitBatch():
                    return True
                case GiveUp():
                    self._gave_up(effect)
                    return False
                case _:
                    assert_never(effect)
            self.world.transitions.add(("close", machine.state.value, type(event).__name__))
            effects.extend(machine.step(event))
        return False

    # --- tasks ---

    def _tasks(self, tasks: Mapping[int, Callable[[], Attempt[Ack]]]) -> Generator[int, None, list[Ack] | None]:
        """What the attempts that succeeded were acknowledged; None if the batch failed."""
        world = self.world
        acks: list[Ack] = []
        failures = dict.fromkeys(tasks, 0)
        attempts = {task: begin() for task, begin in tasks.items()}
        self.attempts = attempts
        while attempts:
            yield self.pass_time()
            task = world.schedule.choice(list(attempts))
            attempt = attempts[task]
            if world.chance(world.options.task_failure):
                world.note(f"driver {self.number}: task {task} is given up")
                self.abandon(attempt)
            else:
                try:
                    next(attempt)
                    continue
                except StopIteration as done:
                    acks.extend(done.value)
                    del attempts[task]
                    continue
                except TaskFailed as failed:
                    world.note(f"driver {self.number}: task {task} fails: {failed}")
            failures[task] += 1
            if failures[task] >= ATTEMPTS_MAX:
                return None
            attempts[task] = tasks[task]()
        return acks

    def _updates(
        self, run: RunPlan, plan: PlannedBatch, shares: dict[int, OffsetRange], checkpoint: Checkpoint
    ) -> Generator[int, None, list[UpdateAck] | None]:
        """What follows the rows of a batch: nothing, where rows are only appended. None if the batch failed."""
        yield from ()
        return []

    def abandon(self, attempt: Attempt[Any]) -> None:
        """Nobody waits for it any more; it may go on writing."""
        if self.world.chance(self.world.options.orphan):
            self.world.spawn(_orphan(self.world, attempt), self.world.trouble.choice((1, 10, 50, 200)))

    def _attempt(self, run: RunPlan, plan: PlannedBatch, partition: int, share: OffsetRange) -> Attempt[BlockAck]:
        world = self.world
        acks: list[BlockAck] = []
        at = share.first
        epoch = run.epoch_of(plan.batch_id)
        while at < share.next:
            end = min(share.next, at + world.workload.randint(1, self.block_rows_max))
            if at < world.stream[partition].earliest:
                raise TaskFailed(f"offset {at} is gone")
            config = plan.config_version if world.safeguards.config_pinned else world.config_version
            block = row_block(
                generation=run.generation,
                epoch=epoch,
                config_version=config,
                range=OffsetRange(at, end),
                batch=world.rows(partition, at, end, config),
                timestamp_type="logAppend",
            )
            yield
            log_offset = world.append(partition, block)
            world.note(
                f"driver {self.number}: block of epoch {epoch} generation {run.generation} [{at}, {end}) config "
                f"{config} -> {partition}@{log_offset}"
            )
            acks.append(
                BlockAck(
                    partition=partition,
                    range=block.range,
                    rows=block.rows,
                    max_ingestion_ms=block.max_ingestion_ms,
                )
            )
            at = end
        return acks


def _orphan(world: World, attempt: Attempt[Any]) -> Actor:
    try:
        while True:
            next(attempt)
            yield world.schedule.choice((1, 5, 20))
    except (StopIteration, TaskFailed):
        return


def _brief(record: object) -> str:
    fields = ("epoch", "generation", "blocks_generation", "previous", "range", "last_closed")
    return " ".join(f"{name}={getattr(record, name)}" for name in fields if hasattr(record, name))
