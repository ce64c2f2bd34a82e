# SPDX-License-Identifier: Apache-2.0
"""The start of a table's query: eight steps from a new generation to a run plan (design: epoch-log.md, Starting).

Driver: `effects = machine.begin()`, carry them out in order, feed each one's event to `step`, go on with the effects
it returns, until `Planned` or `GiveUp`.

Why it is sound:
- Partition 0 decides. Its Fence is acknowledged before any other partition is fenced, so whatever an older generation
  managed to commit there has all its blocks in front of our Fences: C can be rolled forward without recomputing it.
- An older generation that starts at the same time finds our Fence before its own, or loses the compare-and-set.
- A batch of the checkpoint is recognised by its end offsets and config, not by its id: ids start again at 0 in a
  fresh checkpoint, and an epoch is base + id for the base of the generation that wrote it.
- The base makes the first new batch the epoch after every epoch number seen anywhere.

States and what moves them (the table is TRANSITIONS, printed by `transition_table`):

    new -> taking generation -> fencing first -> listing -> fencing rest -> scanning -> rolling forward
        -> [resetting first -> checking reset -> resetting rest]
        -> inspecting -> [adopting] -> taking base -> planned;   from any: stopped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from cremant.epoch.checkpoint import Verdict, judge
from cremant.epoch.protocol import (
    Append,
    Appended,
    EffectFailed,
    GiveUp,
    ReadBack,
    ReadBackDone,
    RunPlan,
    as_markdown,
)
from cremant.epoch.records import EpochMark, Fence, Reset
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.epoch.scan import PartitionScan
from cremant.epoch.start_messages import (
    AdoptCheckpoint,
    BaseTaken,
    CheckpointAdopted,
    CheckpointInspected,
    Effect,
    Event,
    GenerationRefused,
    GenerationTaken,
    InspectCheckpoint,
    PartitionsRead,
    Planned,
    ReadPartitions,
    ReadTo,
    Scanned,
    TakeBase,
    TakeGeneration,
)
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import Position


class StartState(StrEnum):
    NEW = "new"
    TAKING_GENERATION = "taking generation"
    FENCING_FIRST = "fencing first"
    LISTING = "listing"
    FENCING_REST = "fencing rest"
    SCANNING = "scanning"
    ROLLING_FORWARD = "rolling forward"
    RESETTING_FIRST = "resetting first"
    CHECKING_RESET = "checking reset"
    RESETTING_REST = "resetting rest"
    INSPECTING = "inspecting"
    ADOPTING = "adopting"
    TAKING_BASE = "taking base"
    PLANNED = "planned"
    STOPPED = "stopped"
    # Only without a safeguard:
    LISTING_EARLY = "listing early (ablated)"
    SCANNING_EARLY = "scanning early (ablated)"


class StartMachine:
    """`config_version`: of the table now. `scan_from`: per partition a stored position at or before the last closed
    epoch of that partition (the start of its consuming segment); absent = from the beginning of the log. `reset_to`:
    an operator takes the table back to this closed epoch; who hands out generations may say so, too. `keyed`: batches
    leave state behind (upsert tables)."""

    def __init__(
        self,
        *,
        config_version: int,
        scan_from: Mapping[int, Position] | None = None,
        reset_to: int | None = None,
        keyed: bool = False,
        safeguards: Safeguards = ALL,
    ) -> None:
        self.state = StartState.NEW
        self._config_version = config_version
        self._scan_from = dict(scan_from or {})
        self._reset_to = reset_to
        self._keyed = keyed
        self._safeguards = safeguards
        self._generation = 0
        self._old_checkpoint = ""
        self._start_offsets: tuple[int, ...] = ()
        #: Partitions whose event the state still waits for.
        self._waiting: set[int] = set()
        self._scans: dict[int, PartitionScan] = {}
        self._epoch_max_early: int | None = None
        #: Mark of the committed epoch C; None before the first.
        self._committed: EpochMark | None = None
        self._run: RunPlan | None = None
        self._verdict = Verdict.lost()

    def begin(self) -> list[Effect]:
        if self.state is not StartState.NEW:
            raise InvariantViolation("start", f"begin() in state {self.state}")
        self.state = StartState.TAKING_GENERATION
        return [TakeGeneration()]

    def step(self, event: Event) -> list[Effect]:
        """Raises InvariantViolation for an event that the state does not expect; nothing has changed then. A machine
        that gave up answers nothing to the effects that were still under way."""
        if self.state is StartState.STOPPED:
            return []
        if self.state is not StartState.PLANNED and isinstance(event, EffectFailed):
            return self._give_up(event.reason)
        if self.state is not StartState.PLANNED and isinstance(event, GenerationRefused):
            return self._give_up(event.reason, fenced=True)
        handler = TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise InvariantViolation("start", f"{type(event).__name__} in state {self.state}")
        return handler(self, event)

    # --- steps 1 to 3: generation, Fences ---

    def _generation_taken(self, event: GenerationTaken) -> list[Effect]:
        self._generation = event.generation
        self._old_checkpoint = event.checkpoint
        if event.reset_to is not None:
            self._reset_to = event.reset_to
        guards = self._safeguards
        if not (guards.first_partition_fenced_first and guards.base_after_scan):
            self.state = StartState.LISTING_EARLY
            return [ReadPartitions()]
        self.state = StartState.FENCING_FIRST
        return [self._fence(0)]

    def _first_fenced(self, event: Appended) -> list[Effect]:
        self.state = StartState.LISTING
        return [ReadPartitions()]

    def _partitions_read(self, event: PartitionsRead) -> list[Effect]:
        self._start_offsets = event.start_offsets
        self.state = StartState.FENCING_REST
        return self._fence_all(range(1, len(event.start_offsets)))

    def _fence_all(self, partitions: range) -> list[Effect]:
        self._waiting = set(partitions)
        if not self._waiting:
            return self._scan()
        return [self._fence(partition) for partition in partitions]

    def _rest_fenced(self, event: Appended) -> list[Effect]:
        self._waiting.remove(event.partition)
        return [] if self._waiting else self._scan()

    # --- step 4: scan ---

    def _scan(self) -> list[Effect]:
        self.state = StartState.SCANNING
        self._waiting = set(range(len(self._start_offsets)))
        return [self._read_to(partition, self._generation) for partition in range(len(self._start_offsets))]

    def _read_to(self, partition: int, generation: int) -> ReadTo:
        beginning = Position(log_offset=0, epoch=0, generation=0, next_offset=0)
        return ReadTo(partition, self._scan_from.get(partition, beginning), generation)

    def _scanned(self, event: Scanned) -> list[Effect]:
        self._waiting.remove(event.partition)
        self._scans[event.partition] = event.scan
        if event.scan.fenced:
            return self._fenced_by(event.scan.generation_in_force)
        if not event.scan.done:
            return self._give_up(f"partition {event.partition} of the epoch log ends before our Fence")
        return [] if self._waiting else self._roll_forward()

    # --- step 5: roll the committed epoch forward ---

    def _roll_forward(self) -> list[Effect]:
        try:
            self._committed = self._scans[0].last_mark
        except InvariantViolation as error:
            return self._give_up(error.message, rule=error.rule)
        committed, listed = self._committed, len(self._start_offsets)
        if committed is not None and committed.partition_count > listed:
            return self._give_up(
                f"epoch {committed.epoch} has {committed.partition_count} partitions, the list of partitions {listed}: "
                "it is older than that epoch"
            )
        ahead = max(scan.closed_epoch for scan in self._scans.values())
        if ahead > self._scans[0].closed_epoch and not isinstance(self._scans[0].decision, Reset):
            return self._give_up(
                f"epoch {ahead} is closed in another partition, partition 0 closed {self._scans[0].closed_epoch}",
                rule="E-3",
            )
        appends: list[Effect] = []
        for partition in range(1, len(self._start_offsets)):
            appends.extend(self._missing(partition))
        self.state = StartState.ROLLING_FORWARD
        self._waiting = {effect.partition for effect in appends if isinstance(effect, Append)}
        return appends or self._reset()

    def _missing(self, partition: int) -> list[Effect]:
        """What partition 0 has decided and this partition does not say yet."""
        decision, here = self._scans[0].decision, self._scans[partition]
        if isinstance(decision, Reset):
            already = isinstance(here.decision, Reset) and here.decision.epoch == decision.epoch
            return [] if already else [Append(partition, Reset(generation=self._generation, epoch=decision.epoch))]
        if decision is None or partition >= decision.partition_count or here.closed_epoch >= decision.epoch:
            return []
        names = decision.blocks_generation if self._safeguards.blocks_generation else self._generation
        mark = msgspec.structs.replace(decision, generation=self._generation, blocks_generation=names)
        return [Append(partition, mark)]

    def _rolled_forward(self, event: Appended) -> list[Effect]:
        self._waiting.discard(event.partition)
        return [] if self._waiting else self._reset()

    # --- an operator's Reset: partition 0 first, which decides ---

    def _reset(self) -> list[Effect]:
        if self._reset_to is None or self._reset_to == self._closed_epoch():
            return self._inspect()
        try:
            self._committed = self._scans[0].mark_of(self._reset_to) if self._reset_to else None
        except InvariantViolation as error:
            return self._give_up(error.message, rule=error.rule)
        self.state = StartState.RESETTING_FIRST
        return [Append(0, Reset(generation=self._generation, epoch=self._reset_to))]

    def _first_reset(self, event: Appended) -> list[Effect]:
        self.state = StartState.CHECKING_RESET
        return [ReadBack(0, first=self._fence_offset() + 1, up_to=event.log_offset)]

    def _reset_checked(self, event: ReadBackDone) -> list[Effect]:
        if event.highest_fence > self._generation:
            return self._fenced_by(event.highest_fence)
        self._waiting = set(range(1, len(self._start_offsets)))
        if not self._waiting:
            return self._inspect()
        self.state = StartState.RESETTING_REST
        reset = Reset(generation=self._generation, epoch=self._closed_epoch())
        return [Append(partition, reset) for partition in range(1, len(self._start_offsets))]

    def _rest_reset(self, event: Appended) -> list[Effect]:
        self._waiting.remove(event.partition)
        return [] if self._waiting else self._inspect()

    # --- steps 7 and 6: compare the checkpoint, take the base ---

    def _inspect(self) -> list[Effect]:
        if not self._old_checkpoint:
            return self._take_base(Verdict.lost())
        self.state = StartState.INSPECTING
        return [InspectCheckpoint(self._old_checkpoint)]

    def _checkpoint_inspected(self, event: CheckpointInspected) -> list[Effect]:
        committed = self._committed
        if event.state is None:
            return self._take_base(Verdict.lost())
        self._verdict = judge(
            event.state,
            ends=tuple(line.end for line in committed.partitions) if committed is not None else None,
            config_version=committed.config_version if committed else 0,
            start=self._start_vector(),
            previous=committed.previous if committed else 0,
            keyed=self._keyed,
            compare=self._safeguards.checkpoint_compared,
        )
        if not self._verdict.resume:
            return self._take_base(self._verdict)
        self.state = StartState.ADOPTING
        commits, plans = self._verdict.repair or event.state.highest
        return [AdoptCheckpoint(self._old_checkpoint, self._own_checkpoint(), commits_above=commits, plans_above=plans)]

    def _checkpoint_adopted(self, event: CheckpointAdopted) -> list[Effect]:
        return self._take_base(self._verdict)

    def _take_base(self, verdict: Verdict) -> list[Effect]:
        epoch_max = max(scan.epoch_max for scan in self._scans.values())
        if self._epoch_max_early is not None and not self._safeguards.base_after_scan:
            epoch_max = self._epoch_max_early
        closed = self._closed_epoch()
        self._run = RunPlan(
            generation=self._generation,
            base=epoch_max + 1 - verdict.first_batch,
            checkpoint=self._own_checkpoint(),
            fresh=not verdict.resume,
            first_batch=verdict.first_batch,
            replay=verdict.replay(closed),
            start=self._start_vector(),
            previous=closed,
            config_version=self._config_version,
            fence_offset=self._fence_offset(),
        )
        self.state = StartState.TAKING_BASE
        return [TakeBase(self._generation, self._run.base, self._run.checkpoint, epoch_max + 1, closed)]

    def _base_taken(self, event: BaseTaken) -> list[Effect]:
        assert self._run is not None
        self.state = StartState.PLANNED
        return [Planned(self._run)]

    # --- shared ---

    def _closed_epoch(self) -> int:
        return self._committed.epoch if self._committed is not None else 0

    def _fence_offset(self) -> int:
        offset = self._scans[0].fence_offset
        assert offset is not None  # the scan of partition 0 is done
        return offset

    def _start_vector(self) -> tuple[int, ...]:
        """Ends of the committed epoch; partitions that were not in it begin at their first offset (E-7)."""
        ends = tuple(line.end for line in self._committed.partitions) if self._committed is not None else ()
        return ends + self._start_offsets[len(ends) :]

    def _own_checkpoint(self) -> str:
        return f"generation-{self._generation}"

    def _fence(self, partition: int) -> Append:
        return Append(partition, Fence(generation=self._generation))

    def _fenced_by(self, generation: int) -> list[Effect]:
        return self._give_up(f"generation {generation} has taken over from generation {self._generation}", fenced=True)

    def _give_up(self, reason: str, *, fenced: bool = False, rule: str = "") -> list[Effect]:
        self.state = StartState.STOPPED
        return [GiveUp(reason=reason, fenced=fenced, rule=rule)]

    # --- what the ablated orders need (never in production) ---

    def _partitions_read_early(self, event: PartitionsRead) -> list[Effect]:
        self._start_offsets = event.start_offsets
        count = len(event.start_offsets)
        if self._safeguards.base_after_scan:
            self.state = StartState.FENCING_REST
            self._waiting = set(range(count))
            return [self._fence(partition) for partition in reversed(range(count))]
        self.state = StartState.SCANNING_EARLY
        self._waiting = set(range(count))
        return [self._read_to(partition, 0) for partition in range(count)]

    def _scanned_early(self, event: Scanned) -> list[Effect]:
        self._waiting.remove(event.partition)
        self._epoch_max_early = max(self._epoch_max_early or 0, event.scan.epoch_max)
        if self._waiting:
            return []
        self.state = StartState.FENCING_FIRST
        return [self._fence(0)]


#: (state, event) -> what happens. Besides, in every state: EffectFailed and GenerationRefused stop the start.
TRANSITIONS: dict[tuple[StartState, type[Any]], Callable[[StartMachine, Any], list[Effect]]] = {
    (StartState.TAKING_GENERATION, GenerationTaken): StartMachine._generation_taken,
    (StartState.FENCING_FIRST, Appended): StartMachine._first_fenced,
    (StartState.LISTING, PartitionsRead): StartMachine._partitions_read,
    (StartState.FENCING_REST, Appended): StartMachine._rest_fenced,
    (StartState.SCANNING, Scanned): StartMachine._scanned,
    (StartState.ROLLING_FORWARD, Appended): StartMachine._rolled_forward,
    (StartState.RESETTING_FIRST, Appended): StartMachine._first_reset,
    (StartState.CHECKING_RESET, ReadBackDone): StartMachine._reset_checked,
    (StartState.RESETTING_REST, Appended): StartMachine._rest_reset,
    (StartState.INSPECTING, CheckpointInspected): StartMachine._checkpoint_inspected,
    (StartState.ADOPTING, CheckpointAdopted): StartMachine._checkpoint_adopted,
    (StartState.TAKING_BASE, BaseTaken): StartMachine._base_taken,
    (StartState.LISTING_EARLY, PartitionsRead): StartMachine._partitions_read_early,
    (StartState.SCANNING_EARLY, Scanned): StartMachine._scanned_early,
}


def transition_table() -> str:
    """The table as Markdown, for the documentation."""
    return as_markdown(TRANSITIONS)


__all__ = [
    "AdoptCheckpoint", "BaseTaken", "CheckpointAdopted", "CheckpointInspected", "Effect", "Event", "GenerationRefused",
    "GenerationTaken", "InspectCheckpoint", "PartitionScan", "PartitionsRead", "Planned", "ReadPartitions", "ReadTo",
    "Scanned", "StartMachine", "StartState", "TakeBase", "TakeGeneration", "transition_table",
]  # fmt: skip
