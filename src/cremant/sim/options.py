# SPDX-License-Identifier: Apache-2.0
"""What one seed's world is like. Swarm: each fault is off in some worlds, rare in some, frequent in others, because
faults that always come together hide each other."""

from __future__ import annotations

from random import Random

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities are per step of the actor they hit, times in ms of virtual time."""

    partitions: int
    replicas: int
    #: Upsert tables stage rows until their epoch closes; append tables show them on arrival.
    staged: bool
    safety_ms: int
    #: The driver is gone at once; its tasks may go on.
    crash: float
    #: The same, between the marks of an epoch: the next start must roll it forward.
    crash_between_marks: float
    #: The driver stands still for a while, as under SIGSTOP, and another one is started.
    pause: float
    pause_ms: int
    #: A task that lost its driver, or was given up for dead, goes on writing.
    orphan: float
    #: A task attempt fails half-way and is tried again.
    task_failure: float
    #: Before a start: the checkpoint is gone, or is one of a while ago.
    checkpoint_lost: float
    checkpoint_stale: float
    config_change: float
    growth: float
    #: The stream forgets its oldest messages, also some that were never read.
    retention: float
    replica_restart: float
    #: A closed position is stored.
    store: float
    #: The epoch log is trimmed to the oldest stored position.
    trim: float
    #: Rows of a batch and partition at most; rows of a block at most; stream offsets of a segment at least.
    batch_rows: int
    block_rows: int
    segment_rows: int


def draw(seed: int) -> Options:
    rng = Random(f"{seed}/options")

    def some(*levels: float) -> float:
        return rng.choice((0.0, *levels))

    return Options(
        partitions=rng.choice((1, 2, 2, 3, 4)),
        replicas=rng.choice((1, 2, 2, 3)),
        staged=rng.random() < 0.25,
        safety_ms=rng.choice((600, 1200, 2000)),
        crash=some(0.004, 0.015, 0.04),
        crash_between_marks=some(0.1, 0.3),
        pause=some(0.01, 0.03, 0.06),
        pause_ms=rng.choice((15, 40, 100, 400)),
        orphan=some(0.3, 0.8),
        task_failure=some(0.03, 0.1),
        checkpoint_lost=some(0.1, 0.4),
        checkpoint_stale=some(0.1, 0.4),
        config_change=some(0.02, 0.1),
        growth=some(0.02),
        retention=some(0.02, 0.05),
        replica_restart=some(0.02, 0.08),
        store=rng.choice((0.1, 0.3, 1.0)),
        trim=some(0.05),
        batch_rows=rng.choice((4, 12, 30)),
        block_rows=rng.choice((2, 5, 40)),
        segment_rows=rng.choice((1, 20, 60, 100_000)),
    )
