# SPDX-License-Identifier: Apache-2.0
"""The start protocol, step by step, and the comparison of a checkpoint with the log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cremant.epoch.checkpoint import Verdict, judge
from cremant.epoch.format import BlockHead, Head
from cremant.epoch.protocol import (
    Append,
    Appended,
    CheckpointState,
    EffectFailed,
    GiveUp,
    PlannedBatch,
    ReadBack,
    ReadBackDone,
    Replay,
    RunPlan,
)
from cremant.epoch.records import EpochMark, Fence, PartitionMark, Reset
from cremant.epoch.start import (
    AdoptCheckpoint,
    BaseTaken,
    CheckpointAdopted,
    CheckpointInspected,
    Effect,
    GenerationRefused,
    GenerationTaken,
    InspectCheckpoint,
    PartitionScan,
    PartitionsRead,
    Planned,
    ReadPartitions,
    ReadTo,
    Scanned,
    StartMachine,
    StartState,
    TakeBase,
    TakeGeneration,
    transition_table,
)
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import OffsetRange, Position


def mark(epoch: int, *ends: int, previous: int = 0, generation: int = 1, config: int = 1) -> EpochMark:
    return EpochMark(
        generation=generation,
        epoch=epoch,
        previous=previous,
        blocks_generation=generation,
        config_version=config,
        partitions=tuple(PartitionMark(end=end, rows=0) for end in ends),
    )


def block(epoch: int, generation: int = 1) -> BlockHead:
    return BlockHead(
        generation=generation,
        epoch=epoch,
        config_version=1,
        range=OffsetRange(0, 1),
        rows=1,
        rejected=0,
        filtered=0,
        max_ingestion_ms=None,
        timestamp_type="logAppend",
        content_hash="",
    )


def plan(batch: int, start: Sequence[int], end: Sequence[int], config: int = 1) -> PlannedBatch:
    return PlannedBatch(batch_id=batch, start=tuple(start), end=tuple(end), config_version=config)


class Starting:
    """A machine and the world it starts in: per partition the heads of its log, the checkpoint, the metadata store."""

    def __init__(
        self,
        *logs: list[Head],
        starts: tuple[int, ...] | None = None,
        checkpoint: CheckpointState | None = None,
        generation: int = 5,
        config: int = 1,
        reset_to: int | None = None,
        scan_from: dict[int, Position] | None = None,
    ) -> None:
        self.logs = [list(log) for log in logs]
        self.starts = starts if starts is not None else (0,) * len(logs)
        self.checkpoint = checkpoint
        self.generation = generation
        self.done: list[Effect] = []
        self.refuse: type[object] | None = None
        self.machine = StartMachine(config_version=config, reset_to=reset_to, scan_from=scan_from)

    def run(self) -> Effect:
        """Carries everything out; answers the last effect."""
        effects = self.machine.begin()
        while True:
            effect = effects.pop(0)
            self.done.append(effect)
            if isinstance(effect, Planned | GiveUp):
                return effect
            if self.refuse is not None and isinstance(effect, self.refuse):
                effects.extend(self.machine.step(GenerationRefused("somebody else")))
                continue
            effects.extend(self.machine.step(self.event(effect)))

    def event(self, effect: Effect):  # type: ignore[no-untyped-def]
        match effect:
            case TakeGeneration():
                return GenerationTaken(self.generation, "old" if self.checkpoint is not None else "")
            case Append(partition, record):
                self.logs[partition].append(record)  # type: ignore[arg-type]
                return Appended(partition, len(self.logs[partition]) - 1)
            case ReadPartitions():
                return PartitionsRead(self.starts)
            case ReadTo(partition, _, _):
                scan = PartitionScan(effect)
                for offset, head in enumerate(self.logs[partition]):
                    if offset >= scan.from_offset:
                        scan.add(offset, head)
                return Scanned(partition, scan)
            case ReadBack(partition, first, up_to):
                fences = [h.generation for h in self.logs[partition][first:up_to] if isinstance(h, Fence)]
                return ReadBackDone(max(fences, default=0))
            case InspectCheckpoint():
                return CheckpointInspected(self.checkpoint)
            case TakeBase():
                return BaseTaken()
            case AdoptCheckpoint():
                return CheckpointAdopted()
            case _:
                raise AssertionError(effect)

    def plan(self) -> RunPlan:
        last = self.run()
        assert isinstance(last, Planned), last
        return last.run

    def gives_up(self) -> GiveUp:
        last = self.run()
        assert isinstance(last, GiveUp), last
        return last

    def appended(self, kind: type[object]) -> list[tuple[int, object]]:
        return [(e.partition, e.record) for e in self.done if isinstance(e, Append) and isinstance(e.record, kind)]


def test_the_very_first_start_begins_at_the_first_offsets_of_the_table() -> None:
    starting = Starting([], [], starts=(7, 0), generation=1, config=3)
    assert starting.plan() == RunPlan(
        generation=1, base=1, checkpoint="generation-1", fresh=True, first_batch=0, replay=None, start=(7, 0),
        previous=0, config_version=3, fence_offset=0,
    )  # fmt: skip
    kinds = [type(e).__name__ for e in starting.done]
    assert kinds == [
        "TakeGeneration", "Append", "ReadPartitions", "Append", "ReadTo", "ReadTo", "TakeBase", "Planned",
    ]  # fmt: skip


def test_partition_0_is_fenced_before_any_other() -> None:
    starting = Starting([], [], [])
    starting.plan()
    assert starting.appended(Fence) == [(p, Fence(generation=5)) for p in (0, 1, 2)]


def test_a_resumed_checkpoint_goes_on_after_the_committed_epoch() -> None:
    log: list[Head] = [Fence(generation=4), block(8, 4), mark(8, 10, generation=4)]
    state = CheckpointState(plans=(plan(2, (0,), (5,)), plan(3, (5,), (10,))), committed=3)
    run = Starting(log, checkpoint=state).plan()
    assert (run.fresh, run.checkpoint, run.first_batch, run.replay) == (False, "generation-5", 4, None)
    assert run.epoch_of(4) == 9
    assert (run.start, run.previous) == ((10,), 8)


def test_a_batch_that_was_closed_but_not_committed_is_replayed_as_its_epoch() -> None:
    log: list[Head] = [Fence(generation=4), block(8, 4), mark(8, 10, generation=4)]
    state = CheckpointState(plans=(plan(2, (0,), (5,)), plan(3, (5,), (10,))), committed=2)
    run = Starting(log, checkpoint=state).plan()
    assert run.replay == Replay(batch_id=3, epoch=8)
    assert run.epoch_of(3) == 8
    assert run.epoch_of(run.first_batch) == 9
    assert run.first_batch == 4


def test_a_planned_batch_runs_again_as_an_epoch_that_nobody_has_seen() -> None:
    """Blocks of epoch 9 are in the log, its mark is not: the batch becomes epoch 10."""
    log: list[Head] = [Fence(generation=4), mark(8, 10, generation=4), block(9, 4)]
    state = CheckpointState(plans=(plan(3, (5,), (10,)), plan(4, (10,), (15,))), committed=3)
    run = Starting(log, checkpoint=state).plan()
    assert run.first_batch == 4
    assert run.epoch_of(4) == 10


def test_epochs_of_orphans_count_for_the_base_but_are_not_believed() -> None:
    """Generation 3 writes behind the Fence of 4: block and mark of epoch 20."""
    log: list[Head] = [mark(8, 10, generation=3), Fence(generation=4), block(20, 3), mark(20, 90, generation=3)]
    run = Starting(log).plan()
    assert (run.previous, run.start) == (8, (10,))
    assert run.epoch_of(run.first_batch) == 21


def test_the_committed_epoch_is_rolled_forward_with_the_generation_of_its_blocks() -> None:
    committed = mark(8, 10, 20, 30, generation=4)
    starting = Starting([Fence(generation=4), committed], [Fence(generation=4), committed], [Fence(generation=4)])
    starting.plan()
    [(partition, rolled)] = starting.appended(EpochMark)
    assert partition == 2
    assert isinstance(rolled, EpochMark)
    assert (rolled.epoch, rolled.generation, rolled.blocks_generation) == (8, 5, 4)
    assert rolled.partitions == committed.partitions


def test_a_mark_behind_our_fence_is_not_found_and_written_again() -> None:
    """The old driver's mark reaches partition 1 after our Fence: readers ignore it, so we write it."""
    committed = mark(8, 10, 20, generation=4)
    starting = Starting([Fence(generation=4), committed], [Fence(generation=4), Fence(generation=5), committed])
    starting.plan()
    assert [partition for partition, _ in starting.appended(EpochMark)] == [1]


def test_a_new_partition_is_fenced_and_begins_at_its_first_offset() -> None:
    committed = mark(8, 10, generation=4)
    starting = Starting([Fence(generation=4), committed], [], starts=(0, 33))
    run = starting.plan()
    assert run.start == (10, 33)
    assert (1, Fence(generation=5)) in starting.appended(Fence)
    assert starting.appended(EpochMark) == []


def test_a_list_of_partitions_that_is_older_than_the_last_epoch_is_not_used() -> None:
    gave_up = Starting([mark(8, 1, 1, 1, generation=4)], [mark(8, 1, 1, 1, generation=4)]).gives_up()
    assert "3 partitions" in gave_up.reason
    assert not gave_up.fenced


def test_a_higher_fence_in_front_of_ours_ends_the_start() -> None:
    gave_up = Starting([Fence(generation=6)], []).gives_up()
    assert gave_up.fenced
    assert "generation 6" in gave_up.reason


@pytest.mark.parametrize("refused", [TakeGeneration, TakeBase])
def test_a_refused_generation_ends_the_start(refused: type[object]) -> None:
    starting = Starting([], [])
    starting.refuse = refused
    assert starting.gives_up().fenced
    assert starting.machine.step(Appended(0, 0)) == []


def test_a_failed_effect_ends_the_start_without_calling_it_fenced() -> None:
    machine = StartMachine(config_version=1)
    machine.begin()
    machine.step(GenerationTaken(1, ""))
    assert machine.step(EffectFailed("disk full")) == [GiveUp(reason="disk full")]
    assert machine.state is StartState.STOPPED


def test_an_epoch_that_partition_0_does_not_know_breaks_rule_e3() -> None:
    gave_up = Starting(
        [mark(8, 1, 1, generation=4)], [mark(8, 1, 1, generation=4), mark(9, 2, 2, previous=8)]
    ).gives_up()
    assert gave_up.rule == "E-3"


def test_a_scan_may_begin_at_a_stored_position() -> None:
    """Position after the mark of epoch 8 at log offset 2: the mark is read, what lies in front of it is not."""
    log: list[Head] = [block(7, 4), block(8, 4), mark(8, 10, generation=4)]
    position = Position(log_offset=3, epoch=8, generation=4, next_offset=10)
    run = Starting(log, scan_from={0: position}).plan()
    assert (run.previous, run.start, run.base) == (8, (10,), 9)


def test_an_event_that_does_not_belong_is_refused_and_changes_nothing() -> None:
    machine = StartMachine(config_version=1)
    with pytest.raises(InvariantViolation):
        machine.step(BaseTaken())
    machine.begin()
    with pytest.raises(InvariantViolation):
        machine.begin()
    with pytest.raises(InvariantViolation, match="BaseTaken in state taking generation"):
        machine.step(BaseTaken())
    assert machine.state is StartState.TAKING_GENERATION
    starting = Starting([])
    starting.plan()
    with pytest.raises(InvariantViolation):
        starting.machine.step(EffectFailed("late"))


# --- an operator's Reset ---


def rewound() -> list[Head]:
    return [Fence(generation=4), mark(6, 5, 5, generation=4), mark(8, 10, 10, previous=6, generation=4)]


def test_a_reset_is_decided_in_partition_0_read_back_and_then_told_to_the_others() -> None:
    starting = Starting(rewound(), rewound(), reset_to=6)
    run = starting.plan()
    assert (run.previous, run.start, run.epoch_of(0)) == (6, (5, 5), 9)
    kinds = [type(e).__name__ for e in starting.done if isinstance(e, ReadBack) or _is_reset(e)]
    assert kinds == ["Append", "ReadBack", "Append"]


def _is_reset(effect: Effect) -> bool:
    return isinstance(effect, Append) and isinstance(effect.record, Reset)


def test_a_reset_that_was_told_to_some_partitions_only_is_told_to_the_rest() -> None:
    first = [*rewound(), Reset(generation=4, epoch=6)]
    starting = Starting(first, rewound(), first)
    starting.starts = (0, 0, 0)
    run = starting.plan()
    assert starting.appended(Reset) == [(1, Reset(generation=5, epoch=6))]
    assert (run.previous, run.start) == (6, (5, 5, 0))


def test_a_fenced_reset_stops_before_any_other_partition() -> None:
    starting = Starting(rewound(), rewound(), reset_to=6)
    event = starting.event

    def with_a_rival(effect: Effect):  # type: ignore[no-untyped-def]
        if isinstance(effect, Append) and isinstance(effect.record, Reset):
            starting.logs[0].append(Fence(generation=6))
        return event(effect)

    starting.event = with_a_rival  # type: ignore[method-assign]
    assert starting.gives_up().fenced
    assert [partition for partition, _ in starting.appended(Reset)] == [0]


def test_a_reset_to_an_epoch_that_was_never_closed_is_refused() -> None:
    assert Starting(rewound(), rewound(), reset_to=7).gives_up().rule == "E-4"


def test_a_reset_to_the_beginning_and_to_where_we_are() -> None:
    run = Starting(rewound(), rewound(), reset_to=0, starts=(1, 2)).plan()
    assert (run.previous, run.start) == (0, (1, 2))
    starting = Starting(rewound(), rewound(), reset_to=8)
    assert starting.plan().previous == 8
    assert starting.appended(Reset) == []


# --- the checkpoint ---

FIVE, TEN, MORE = (5,), (10,), (15,)
A, B, C = plan(3, FIVE, TEN), plan(4, TEN, MORE), plan(5, MORE, (20,))


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (CheckpointState(plans=(A,), committed=3), Verdict(resume=True, first_batch=4)),
        (CheckpointState(plans=(A,), committed=2), Verdict(resume=True, first_batch=4, replay_batch=3)),
        (CheckpointState(plans=(A, B), committed=3), Verdict(resume=True, first_batch=4)),
        (CheckpointState(plans=(A, B, C), committed=4), Verdict(resume=True, first_batch=4, repair=(3, 4))),
        (CheckpointState(plans=(A, B), committed=2),
         Verdict(resume=True, first_batch=4, replay_batch=3, repair=(2, 3))),
        (CheckpointState(plans=(A, plan(4, (9,), MORE)), committed=3),
         Verdict(resume=True, first_batch=4, repair=(3, 3))),
        (CheckpointState(plans=(A,), committed=1), Verdict.lost()),
        (CheckpointState(plans=(B, C), committed=4), Verdict.lost()),
        (CheckpointState(plans=(plan(3, FIVE, TEN, config=2),), committed=3), Verdict.lost()),
        (CheckpointState(plans=(plan(0, TEN, MORE),)), Verdict(resume=True, first_batch=0)),
        (CheckpointState(plans=(plan(0, FIVE, MORE),)), Verdict.lost()),
        (CheckpointState(plans=(plan(0, TEN, MORE),), committed=0), Verdict.lost()),
        (CheckpointState(), Verdict.lost()),
    ],
    ids=[
        "committed", "replayed", "next is planned", "too far", "two open plans", "next begins elsewhere",
        "commits missing", "ahead", "another config", "fresh", "fresh for another epoch", "another life", "empty",
    ],
)  # fmt: skip
def test_a_checkpoint_is_believed_where_it_says_what_the_log_says(state: CheckpointState, verdict: Verdict) -> None:
    assert judge(state, ends=TEN, config_version=1, start=TEN) == verdict


def test_a_plan_made_before_a_partition_was_added_is_kept() -> None:
    state = CheckpointState(plans=(plan(3, FIVE, TEN), plan(4, TEN, MORE)), committed=3)
    assert judge(state, ends=TEN, config_version=1, start=(10, 0)) == Verdict(resume=True, first_batch=4)


def test_a_plan_with_fewer_partitions_than_the_committed_epoch_is_removed() -> None:
    state = CheckpointState(plans=(plan(3, (5, 5), (10, 10)), plan(4, TEN, MORE)), committed=3)
    assert judge(state, ends=(10, 10), config_version=1, start=(10, 10)).repair == (3, 3)


def test_before_the_first_epoch_only_a_plan_from_the_very_start_is_believed() -> None:
    state = CheckpointState(plans=(plan(0, (7,), TEN),))
    assert judge(state, ends=None, config_version=0, start=(7,)).resume
    assert not judge(state, ends=None, config_version=0, start=(8,)).resume


def test_a_checkpoint_is_adopted_under_the_new_generation_before_the_base_names_it() -> None:
    log: list[Head] = [Fence(generation=4), mark(8, 10, generation=4)]
    starting = Starting(log, checkpoint=CheckpointState(plans=(A, B, C), committed=4))
    starting.plan()
    assert starting.done[-3:-1] == [
        AdoptCheckpoint("old", "generation-5", commits_above=3, plans_above=4),
        TakeBase(5, 5, "generation-5", 9, 8),
    ]


def test_the_table_of_transitions_can_be_printed() -> None:
    assert "| fencing first | Appended |" in transition_table()


def seed_plan(batch: int, at: tuple[int, ...], epoch: int) -> PlannedBatch:
    return PlannedBatch(batch_id=batch, start=at, end=at, config_version=1, seed=epoch)


@pytest.mark.parametrize(
    ("state", "previous", "verdict"),
    [
        (CheckpointState(plans=(seed_plan(0, TEN, 7),), committed=0), 7, Verdict(resume=True, first_batch=1)),
        (CheckpointState(plans=(seed_plan(0, TEN, 7), plan(1, TEN, MORE)), committed=0), 7,
         Verdict(resume=True, first_batch=1)),
        (CheckpointState(plans=(seed_plan(0, TEN, 8),)), 7, Verdict.lost()),
        (CheckpointState(plans=(seed_plan(0, TEN, 7),)), 7, Verdict.lost()),
        (CheckpointState(plans=(plan(0, TEN, MORE),)), 7, Verdict.lost()),
    ],
    ids=["closed and committed", "and the next is planned", "not closed", "closed, not committed", "left out"],
)  # fmt: skip
def test_a_seed_is_the_epoch_after_the_one_it_was_taken_at(
    state: CheckpointState, previous: int, verdict: Verdict
) -> None:
    """The seed of epoch 8 ends where 8 does: while it is not closed, it must not be taken for it."""
    assert judge(state, ends=TEN, config_version=1, start=TEN, previous=previous, keyed=True) == verdict


def test_before_the_first_epoch_a_table_with_keys_needs_no_seed() -> None:
    state = CheckpointState(plans=(plan(0, (7,), TEN),))
    assert judge(state, ends=None, config_version=0, start=(7,), keyed=True).resume
