# SPDX-License-Identifier: Apache-2.0
"""What operators do to a live table: other policies, other replicas, segments deleted; with the real rebalance jobs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from cremant.cluster.rebalance import Unit
from cremant.controller.jobs import running_rebalance, write_job
from cremant.controller.rebalances import Options as RebalanceOptions
from cremant.controller.rebalances import Rebalances
from cremant.model.cluster import Role, segment_key, table_key
from cremant.model.completion import CompletionConfig, CompletionMode, StorePolicy
from cremant.model.jobs import JobStatus, RebalanceJob
from cremant.model.limits import COMMIT_LEASE_MS
from cremant.model.segments import SegmentStatus
from cremant.sim.completion.safeguards import WorldSafeguards
from cremant.sim.completion.world import TABLE

if TYPE_CHECKING:
    from cremant.sim.completion.controller import Controller


class ObservedRebalances(Rebalances):
    """Without what is taken away."""

    guards: WorldSafeguards

    def units(self, job: RebalanceJob) -> dict[str, Unit]:
        units = super().units(job)
        if not self.guards.last_copy_kept:
            units = {key: dataclasses.replace(unit, sole=frozenset()) for key, unit in units.items()}
        if not self.guards.break_waits:
            units = {key: dataclasses.replace(unit, able=frozenset(unit.target)) for key, unit in units.items()}
        return units


class Changes:
    """Of one controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._world = controller.world
        self._catalog = controller.catalog
        self._rebalances = ObservedRebalances(controller.catalog, controller.instances, controller.clock)
        self._rebalances.guards = controller.world.guards

    def run(self) -> None:
        """One second: running jobs, and now and then something new."""
        self._rebalances.run()
        world = self._world
        if world.chance(world.options.move):
            self.move_anywhere()
        if world.chance(world.options.policies):
            self.change_policy()
        if world.chance(world.options.delete):
            self.delete(world.trouble.choice(sorted(self._catalog.segments[TABLE])))

    @property
    def moving(self) -> bool:
        return running_rebalance(self._catalog, TABLE) is not None

    # --- replicas ---

    def move_anywhere(self) -> None:
        """A job with any target at all: what moves must be right wherever it goes."""
        world = self._world
        live = sorted(self._controller.instances.live(Role.SERVER))
        if self.moving or not live:
            return
        policy = self._controller.policy
        least = 2 if policy is StorePolicy.PEERS_ONLY else 1
        if len(live) < least:
            return
        replication = world.trouble.randint(least, min(3, len(live)))
        self._write(self._catalog.tables[TABLE].config.completion, replication)
        target = {number: tuple(world.trouble.sample(live, replication)) for number in self._catalog.partitions[TABLE]}
        self.move(target, downtime=world.trouble.random() < 0.3)

    def move(self, target: dict[int, tuple[str, ...]], *, downtime: bool = False) -> None:
        """A job with this target."""
        job = self._rebalances.plan(TABLE, RebalanceOptions(downtime=downtime))
        started = msgspec.structs.replace(job, target=target, status=JobStatus.IN_PROGRESS, ended_ms=0)
        write_job(self._catalog, started)
        self._world.happened.add("replicas move")
        self._world.note(f"{self._controller.name} moves to {target}, downtime {downtime}")

    # --- policies ---

    def change_policy(self, policy: StorePolicy | None = None) -> None:
        world, config = self._world, self._catalog.tables[TABLE].config
        allowed = [one for one in StorePolicy if one is not StorePolicy.PEERS_ONLY or config.replication >= 2]
        completion = msgspec.structs.replace(
            config.completion, store_policy=policy or world.trouble.choice(allowed),
            mode=world.trouble.choice(tuple(CompletionMode)),
            upload_wait_ms=world.trouble.choice((0, 1_000, COMMIT_LEASE_MS // 2 - 1)),
        )  # fmt: skip
        self._write(completion, config.replication)
        world.happened.add("the policy changes")
        world.note(f"{self._controller.name}: {completion.store_policy}, {completion.mode}")

    def _write(self, completion: CompletionConfig, replication: int) -> None:
        record = self._catalog.tables[TABLE]
        completion = msgspec.structs.replace(completion, peer_scheme="http" if replication > 1 else None)
        config = msgspec.structs.replace(record.config, completion=completion, replication=replication)
        changed = msgspec.structs.replace(record, config=config, config_version=record.config_version + 1)
        self._catalog.commit({table_key(TABLE): changed})

    # --- deletion ---

    def delete(self, name: str) -> None:
        """The record first, bytes after."""
        segment = self._catalog.segments[TABLE][name]
        if segment.status is not SegmentStatus.DONE:
            return
        self._catalog.commit({segment_key(TABLE, name): None})
        if segment.store_url is not None:
            self._controller.objects.delete(self._catalog.tables[TABLE], segment.store_url)
        self._world.happened.add("a segment was deleted")
        self._world.note(f"{self._controller.name}: {name} is deleted")
