# SPDX-License-Identifier: Apache-2.0
"""Nouns that the start and the close machine share with their driver: plans, checkpoints, runs, appends.

Driver's promise: every effect but the last ends in exactly one event, or in `EffectFailed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from cremant.epoch.format import Head
from cremant.epoch.records import Fence, Record


class PlannedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of Spark's offset log: what a batch reads, fixed before it first runs and for all its replays.

    The source's offset JSON carries all of it but the id: `{"start": [...], "end": [...], "config": 3}`. `start` is
    the vector of the epoch before; where a partition is new, its first offset. Lengths: len(start) == len(end).
    `seed`: the epoch whose rows in force this batch brings to the key coordinator, instead of new rows of the stream.
    """

    batch_id: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    config_version: int
    seed: int | None = None


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What a Spark checkpoint directory says. `plans`: offset log, ascending, those still kept (at least the last two).
    `committed`: highest id of the commit log, None if it is empty."""

    plans: tuple[PlannedBatch, ...] = ()
    committed: int | None = None

    @property
    def highest(self) -> tuple[int, int]:
        """(commit, plan); -1 for none."""
        return -1 if self.committed is None else self.committed, self.plans[-1].batch_id if self.plans else -1


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """`batch_id` already is epoch `epoch`, closed; Spark runs it again for its state and commits it, no marks."""

    batch_id: int
    epoch: int


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a query needs to run: the outcome of the start protocol.

    `start`: per partition, where the first new batch begins (of a fresh checkpoint: the source's initial offset).
    `previous`: last closed epoch, 0 if none. `config_version`: for batches that are not planned yet.
    `checkpoint`: directory name, `fresh` if it must be made; the first new batch has id `first_batch`.
    `fence_offset`: log offset of this generation's Fence in partition 0. Partitions are those of `start` for the whole
    run: when the stream grows, stop the query and start it again (E-7).
    """

    generation: int
    base: int
    checkpoint: str
    fresh: bool
    first_batch: int
    replay: Replay | None
    start: tuple[int, ...]
    previous: int
    config_version: int
    fence_offset: int

    def epoch_of(self, batch_id: int) -> int:
        """The epoch that a batch is written as."""
        if self.replay is not None and batch_id == self.replay.batch_id:
            return self.replay.epoch
        return self.base + batch_id


# --- effects of both machines ---


class Append(msgspec.Struct, frozen=True):
    """Append `record` to `partition` of the epoch log and wait for the acknowledgement -> Appended."""

    partition: int
    record: Record


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """The run ends here (no event follows). `fenced`: another generation took over, do not retry without the lease;
    otherwise start again with backoff. `rule` names the invariant if one does not hold."""

    reason: str
    fenced: bool = False
    rule: str = ""


class ReadBack(msgspec.Struct, frozen=True):
    """Read the heads of `partition` with log offsets in [first, up_to) -> ReadBackDone(highest_fence(heads)).

    All of them: where the log has dropped some, the Fence that we look for may be among them -> EffectFailed."""

    partition: int
    first: int
    up_to: int


# --- events of both machines ---


class Appended(msgspec.Struct, frozen=True):
    """`log_offset`: of the record in its partition."""

    partition: int
    log_offset: int


class ReadBackDone(msgspec.Struct, frozen=True):
    """`highest_fence`: highest generation of a Fence read, 0 if there was none."""

    highest_fence: int


class EffectFailed(msgspec.Struct, frozen=True):
    """The outcome of an effect is a failure or unknown; the machine gives up, the next start sorts it out."""

    reason: str


def highest_fence(heads: Iterable[Head]) -> int:
    """Highest generation among the Fences of `heads`, 0 if there is none."""
    return max((head.generation for head in heads if isinstance(head, Fence)), default=0)


def as_markdown(transitions: Mapping[Any, Callable[..., Any]]) -> str:
    """The transitions of a machine, (state, event class) -> method, as a Markdown table."""
    rows = [
        f"| {state.value} | {event.__name__} | `{action.__name__}` |" for (state, event), action in transitions.items()
    ]
    return "\n".join(["| state | event | action |", "|---|---|---|", *rows])
