# SPDX-License-Identifier: Apache-2.0
"""The pipeline of an upsert table: the driver of the world of epochs, with the key coordinator behind the rows of a
batch, and a seed as the first batch of a fresh checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import numpy as np
import pyarrow as pa

from cremant.epoch.close import UpdateAck
from cremant.epoch.protocol import PlannedBatch, RunPlan
from cremant.epoch.updates import update_block
from cremant.model.offsets import OffsetRange
from cremant.model.upsert import Cut, Visibility
from cremant.pipeline.plan import SeedPlan
from cremant.pipeline.rebuild import deletes as deletes_of
from cremant.pipeline.rebuild import without_expired
from cremant.pipeline.updates import Updates
from cremant.sim.driver import Attempt, Driver
from cremant.sim.engine import Violation
from cremant.sim.upsert.coordinator import State, candidates_of, coordinated
from cremant.sim.upsert.hosted import Found
from cremant.sim.upsert.table import RECORD, rows_at
from cremant.sim.upsert.world import UpsertWorld
from cremant.sim.world import Checkpoint

#: How often a seed asks for a part of the table before its batch fails.
SEED_ATTEMPTS_MAX = 40


class SeedBatch(PlannedBatch, frozen=True, kw_only=True):
    """`expiry`: what of the rows in force is left out, fixed in the plan."""

    expiry: SeedPlan


class UpsertDriver(Driver):
    KEYED = True
    world: UpsertWorld

    @property
    def block_rows_max(self) -> int:
        """A backlog is worked off in larger blocks once the faults are over, too."""
        return self.world.options.block_rows * (1 if self.world.faults else 20)

    def _plan(self, run: RunPlan, before: PlannedBatch | None, batch_id: int) -> PlannedBatch | None:
        if run.fresh and batch_id == 0 and run.previous > 0:
            return SeedBatch(
                batch_id=0, start=run.start, end=run.start, config_version=run.config_version, seed=run.previous,
                expiry=self._expiry(run.previous),
            )  # fmt: skip
        return super()._plan(run, before, batch_id)

    def _updates(
        self, run: RunPlan, plan: PlannedBatch, shares: dict[int, OffsetRange], checkpoint: Checkpoint
    ) -> Generator[int, None, list[UpdateAck] | None]:
        world, guards, options = self.world, self.world.guards, self.world.options
        epoch = run.epoch_of(plan.batch_id)
        replayed = run.replay is not None and plan.batch_id == run.replay.batch_id
        state = self._state_before(plan.batch_id, checkpoint)
        expired: list[Updates] = []
        if isinstance(plan, SeedBatch):
            seed = yield from self._seed(plan.expiry)
            if seed is None:
                return None
            tasks, expired = seed
            world.observers.seeded(epoch, run.generation, plan.expiry)
        else:
            gone = any(share.first > plan.start[partition] for partition, share in shares.items())
            gone |= any(a < b and p not in shares for p, (a, b) in enumerate(zip(plan.start, plan.end, strict=True)))
            if replayed and gone and guards.replay_whole:
                world.note(f"driver {self.number}: messages of the replayed batch are gone, its checkpoint is lost")
                world.checkpoints.pop(run.checkpoint, None)
                return None
            tasks = self._candidates(plan, shares, epoch)
        state, decided = coordinated(state, tasks, options.state_partitions, epoch, guards)
        written = [*(expired if guards.expired_deleted else ()), *decided]
        acks = yield from self._tasks(
            {number: partial(self._write, run, epoch, updates) for number, updates in enumerate(written)}
        )
        if acks is not None:
            checkpoint.states[plan.batch_id] = state
        return acks

    def _state_before(self, batch_id: int, checkpoint: Checkpoint) -> State:
        """What the batch before left; Spark keeps a version for each of the last batches."""
        if not self.world.guards.state_follows_commits:
            batch_id = max(checkpoint.states, default=-1) + 1
        if batch_id == 0:
            return {}
        if batch_id - 1 not in checkpoint.states:
            raise Violation("state", f"there is no state of batch {batch_id - 1}")
        state: State = checkpoint.states[batch_id - 1]
        return state

    def _candidates(self, plan: PlannedBatch, shares: dict[int, OffsetRange], epoch: int) -> list[pa.RecordBatch]:
        """Of each task: partitions are dealt out to as many as there may be."""
        groups: list[list[tuple[int, pa.RecordBatch]]] = [[] for _ in range(self.world.options.tasks)]
        for partition, share in shares.items():
            rows = self.world.rows(partition, share.first, share.next, plan.config_version)
            groups[partition % len(groups)].append((partition, rows))
        return [candidates_of(group, epoch) for group in groups]

    def _write(self, run: RunPlan, epoch: int, updates: Updates) -> Attempt[UpdateAck]:
        world = self.world
        acks: list[UpdateAck] = []
        order = np.lexsort((updates.sub_row, updates.offset, updates.partition))
        while len(order):
            partitions = updates.partition[order]
            count = min(world.workload.randint(1, self.block_rows_max), int((partitions == partitions[0]).sum()))
            rows, order = order[:count], order[count:]
            block = update_block(
                generation=run.generation, epoch=epoch, offsets=updates.offset[rows], sub_rows=updates.sub_row[rows],
                ops=updates.op[rows],
            )  # fmt: skip
            yield
            partition = int(partitions[0])
            log_offset = world.append(partition, block)
            world.note(
                f"driver {self.number}: {count} updates of epoch {epoch} generation {run.generation} -> "
                f"{partition}@{log_offset}"
            )
            acks.append(UpdateAck(partition=partition, updates=count))
        return acks

    # --- a fresh checkpoint ---

    def _expiry(self, epoch: int) -> SeedPlan:
        """TTL: bounds that follow from the newest comparison value at `epoch`."""
        newest, ttl = self.world.observers.table.newest(epoch), self.world.options.ttl
        if not ttl or newest is None:
            return SeedPlan(epoch=epoch)
        return SeedPlan(epoch=epoch, expired_below=newest - ttl, deleted_below=newest - ttl / 2)

    def _seed(self, plan: SeedPlan) -> Generator[int, None, tuple[list[pa.RecordBatch], list[Updates]] | None]:
        """The rows in force at an epoch, tombstones too, as candidates with the epoch they came into force; and DELETEs
        of those that expired."""
        guards, epoch = self.world.guards, plan.epoch
        if not guards.state_rebuilt:
            return [], []
        visibility = Visibility.IN_FORCE if guards.tombstones_rebuilt else Visibility.VISIBLE
        tasks, expired = list[pa.RecordBatch](), list[Updates]()
        # The last segment of a partition may end meanwhile: whatever follows its start is asked for.
        parts: list[tuple[int, list[int], int | None]] = []
        for partition, cuts in enumerate(self.world.cuts[: self.world.observers.partitions_at(epoch)]):
            parts += [(partition, [number], None) for number in range(1, len(cuts))]
            parts.append((partition, [], cuts[-1].next_offset))
        for partition, numbers, tail_from in parts:
            found = yield from self._page(partition, numbers, tail_from, Cut(epoch=epoch, visibility=visibility))
            if found is None and guards.seed_whole:
                self.world.note(f"driver {self.number}: nobody answers for partition {partition}, the seed fails")
                return None
            if found is not None and len(found.offsets):
                batch, gone = without_expired(self._rows(partition, found), RECORD, plan)
                expired.append(deletes_of(gone, partition))
                tasks.append(candidates_of([(partition, batch)], batch.column("since").to_numpy()))
        gone_rows = sum(len(updates.op) for updates in expired)
        self.world.note(
            f"driver {self.number}: seed of {sum(map(len, tasks))} keys in force at epoch {epoch}, {gone_rows} expired"
        )
        return tasks, expired

    def _rows(self, partition: int, found: Found) -> pa.RecordBatch:
        batch = rows_at(partition, found.offsets, found.sub_rows, self.world.options.keys, self.world.options.spread)
        return batch.append_column("since", pa.array(found.since))

    def _page(
        self, partition: int, numbers: list[int], tail_from: int | None, cut: Cut
    ) -> Generator[int, None, Found | None]:
        """A sealed segment, or all rows from an offset on."""
        world = self.world
        for _ in range(SEED_ATTEMPTS_MAX if world.guards.seed_whole else 1):
            yield world.schedule.choice((1, 5, 20))
            hosted = world.schedule.choice(world.servers).hosted.get(partition)
            if hosted is None:
                continue
            answer = hosted.at_cut(cut, numbers, tail_from)
            if isinstance(answer, Found):
                return answer
        return None
