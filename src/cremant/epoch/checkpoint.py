# SPDX-License-Identifier: Apache-2.0
"""Comparing a Spark checkpoint with the epoch log (start protocol, step 7). Pure.

    committed <= C <= planned, and planned end offsets and config of C equal the vector of mark(C)

A batch is C if it ends at C's vector with C's config version: in a table's life no two batches do, but a seed (of the
key coordinator's state) and the batch of the epoch that it was taken at; so a seed is C only if it follows that epoch.
Ids and epoch numbers do not identify it: ids restart in every fresh checkpoint, and the base changes with every
generation. A seed that was not closed is not gone on with: another one is as good.

    found in the checkpoint                    verdict
    a plan that is C, committed                resume after it
    a plan that is C, not committed            resume, replay it for its state (readers ignore its output);
                                               lost if it is a seed, which has nothing to read again by then
    no plan is C; the only plan starts at C,   resume: a fresh checkpoint that closed nothing yet; lost if it should
      nothing is committed                     have begun with a seed (its state would lack every key up to C)
    anything else                              lost: fresh checkpoint at C
"""

from __future__ import annotations

import msgspec

from cremant.epoch.protocol import CheckpointState, PlannedBatch, Replay


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`first_batch`: id of the first batch that is a new epoch. `replay_batch`: the id that is C already. `repair`:
    (highest commit, highest plan) that may stay, None if nothing must go."""

    resume: bool
    first_batch: int
    replay_batch: int | None = None
    repair: tuple[int, int] | None = None

    @staticmethod
    def lost() -> Verdict:
        return Verdict(resume=False, first_batch=0)

    def replay(self, epoch: int) -> Replay | None:
        return None if self.replay_batch is None else Replay(batch_id=self.replay_batch, epoch=epoch)


def judge(
    state: CheckpointState,
    *,
    ends: tuple[int, ...] | None,
    config_version: int,
    start: tuple[int, ...],
    previous: int = 0,
    keyed: bool = False,
    compare: bool = True,
) -> Verdict:
    """`ends`, `config_version`, `previous`: of mark(C), None if no epoch was ever closed. `start`: where the epoch
    after C begins in each partition. `keyed`: the checkpoint has state, which only a seed can begin where C > 0."""
    if not state.plans:
        return Verdict.lost()
    if not compare:
        return _believe(state)
    for plan in reversed(state.plans):
        is_epoch = ends is not None and plan.end == ends and plan.config_version == config_version
        if ends is not None and is_epoch and plan.seed in (None, previous):
            return _resume_at(plan, state, start, len(ends))
    only = state.plans[0]
    if (
        len(state.plans) == 1
        and only.batch_id == 0
        and state.committed is None
        and only.seed is None
        and not (keyed and ends is not None)
        and _starts_at(only, start, len(ends or ()))
    ):
        return Verdict(resume=True, first_batch=0)
    return Verdict.lost()


def _resume_at(current: PlannedBatch, state: CheckpointState, start: tuple[int, ...], closed: int) -> Verdict:
    batch = current.batch_id
    highest = state.plans[-1].batch_id
    committed = -1 if state.committed is None else state.committed
    if committed < batch - 1:
        return Verdict.lost()
    if committed < batch:
        if current.seed is not None:
            return Verdict.lost()
        repair = (committed, batch) if highest > batch else None
        return Verdict(resume=True, first_batch=batch + 1, replay_batch=batch, repair=repair)
    following = next((plan for plan in state.plans if plan.batch_id == batch + 1), None)
    keep = batch + 1 if following is not None and _starts_at(following, start, closed) else batch
    repair = (batch, keep) if committed > batch or highest > keep else None
    return Verdict(resume=True, first_batch=batch + 1, repair=repair)


def _starts_at(plan: PlannedBatch, start: tuple[int, ...], closed: int) -> bool:
    """The plan begins where the epoch after C does. It may have been made before the newest partitions were added, but
    never has fewer than the `closed` ones of C."""
    return closed <= len(plan.start) <= len(start) and plan.start == start[: len(plan.start)]


def _believe(state: CheckpointState) -> Verdict:
    """Without the comparison: go on wherever the checkpoint says."""
    committed = -1 if state.committed is None else state.committed
    return Verdict(resume=True, first_batch=committed + 1)
