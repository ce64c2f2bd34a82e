# SPDX-License-Identifier: Apache-2.0
"""Carries out the closing of epochs, and the heartbeats of idle partitions (decisions: `cremant.epoch.close`).

One lock around both keeps their order: a heartbeat never says "nothing new" between the blocks of an epoch and its
marks. After a failure or a fence this closer is spent, and so is the query.
"""

from __future__ import annotations

import threading

from cremant.epoch.close import BlockAck, CloseBatch, CloseMachine, CommitBatch, Effect, Event, GapAck, Idle, UpdateAck
from cremant.epoch.format import to_message
from cremant.epoch.protocol import (
    Append,
    Appended,
    EffectFailed,
    GiveUp,
    ReadBack,
    ReadBackDone,
    RunPlan,
    highest_fence,
)
from cremant.epoch.records import PartitionMark
from cremant.log.api import Log, LogReader
from cremant.model.errors import CremantError, Fenced, PeerError, WorldError
from cremant.pipeline.checkpoint import planned_batch
from cremant.pipeline.plan import EpochPlan
from cremant.pipeline.starter import give_up, heads_between

#: A moment for a close that is nearly through; a reader that is left open is closed with its log.
END_S = 0.2


class Closer:
    """Marks and heartbeats of one run. Thread-safe."""

    def __init__(self, log: Log, topic: str, incarnation: str, table: str, run: RunPlan) -> None:
        self._log = log
        self._topic = topic
        self._incarnation = incarnation
        self._table = table
        self._machine = CloseMachine(run)
        self._lock = threading.Lock()
        self._spent: CremantError | None = None
        self._reader: LogReader | None = None

    @property
    def epoch(self) -> int:
        """Last closed epoch, 0 before the first."""
        return self._machine.epoch

    @property
    def ends(self) -> tuple[int, ...]:
        """Per partition the stream offset up to which everything is in a closed epoch."""
        return self._machine.ends

    @property
    def lines(self) -> tuple[PartitionMark, ...]:
        """Per partition what the newest mark says; empty before the first."""
        return self._machine.lines

    def close(
        self, batch_id: int, plan: EpochPlan, blocks: tuple[BlockAck, ...], gaps: tuple[GapAck, ...],
        updates: tuple[UpdateAck, ...] = (),
    ) -> CommitBatch:  # fmt: skip
        """Closes the epoch of a batch whose blocks are all acknowledged. Raises Fenced, PeerError,
        InvariantViolation; Spark must not commit the batch then."""
        event = CloseBatch(
            plan=planned_batch(batch_id, plan),
            blocks=blocks,
            gaps=gaps,
            updates=updates,
            stream_ends=tuple(planned.stream_end for planned in plan.partitions),
            ends_read_at_ms=plan.at_ms or None,
        )
        with self._lock:
            self._check()
            outcome = self._carry_out(self._machine.step(event))
        if outcome is None:
            raise PeerError(f"table {self._table}: the closing of batch {batch_id} ended without an outcome")
        return outcome

    def heartbeat(self, ends: tuple[int, ...], at_ms: int) -> tuple[int, ...]:
        """Says that the stream ended at `ends` at `at_ms` (taken before reading them), in the partitions of which all
        up to there is closed; answers which. Messages of a batch in flight are in `ends` and not closed. Who closes one
        right now is not waited for: its marks say the same. Raises PeerError."""
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            effects = self._machine.step(Idle(ends=ends, at_ms=at_ms)) if self._spent is None else []
            self._carry_out(effects)
            return tuple(effect.partition for effect in effects if isinstance(effect, Append))
        finally:
            self._lock.release()

    def _highest_fence(self, effect: ReadBack) -> int:
        """The reader stays open: it stands where the next read-back begins."""
        if self._reader is None:
            self._reader = self._log.reader(self._topic, effect.partition, effect.first)
        elif self._reader.position != effect.first:
            self._reader.seek(effect.first)
        return highest_fence(head for _, head in heads_between(self._reader, effect.up_to, self._incarnation))

    def end(self) -> None:
        """Nothing more will be closed. Who is closing right now, and may wait for a log, is not waited for."""
        self._spent = self._spent or Fenced(f"table {self._table}: the run is over")
        if self._lock.acquire(timeout=END_S):
            try:
                if self._reader is not None:
                    self._reader.close()
                    self._reader = None
            finally:
                self._lock.release()

    def _check(self) -> None:
        if self._spent is not None:
            raise self._spent

    def _carry_out(self, effects: list[Effect]) -> CommitBatch | None:
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            match effect:
                case CommitBatch():
                    return effect
                case GiveUp():
                    self._spent = give_up(effect, self._table)
                    raise self._spent
                case _:
                    waiting.extend(self._machine.step(self._event_of(effect)))
        return None

    def _event_of(self, effect: Append | ReadBack) -> Event:
        try:
            if isinstance(effect, Append):
                message = to_message(effect.record, self._incarnation)
                return Appended(
                    effect.partition, self._log.append(self._topic, effect.partition, [message]).first_offset
                )
            return ReadBackDone(self._highest_fence(effect))
        except (WorldError, CremantError, OSError) as error:
            return EffectFailed(f"{type(effect).__name__}: {error}")
