# SPDX-License-Identifier: Apache-2.0
"""What one seed's world of completion is like: a swarm, as in `cremant.sim.options`."""

from __future__ import annotations

from random import Random

import msgspec

from cremant.model.completion import CompletionMode, StorePolicy


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities are per step of the actor they hit, times in ms of virtual time."""

    servers: int
    partitions: int
    replication: int
    policy: StorePolicy
    mode: CompletionMode
    upload_wait_ms: int
    safety_ms: int
    #: Rows of an epoch at most, of a segment, and its age at most.
    epoch_rows: int
    segment_rows: int
    segment_ms: int
    #: A message is lost (it or its answer), arrives twice, takes up to so long.
    loss: float
    duplication: float
    delay_ms: int
    #: A server is killed, stands still, stays away for so long at most, comes back with an empty disk.
    crash: float
    pause: float
    away_ms: int
    wipe: float
    #: A server does not read its log in this step.
    lag: float
    #: What a server builds differs from what the log says; a build fails.
    divergence: float
    build_failure: float
    build_ms: int
    #: The deep store begins to fail, hang or be slow.
    store_trouble: float
    #: The controller is killed, or stands still while another takes over.
    controller_crash: float
    controller_pause: float
    #: An operator wants what is there sealed; the epoch log is trimmed.
    force: float
    trim: float
    #: A message is lost on one way between two for a while.
    cut: float
    #: A file of a server that was killed is damaged.
    rot: float
    #: A peer takes up to so long to send a segment.
    transfer_ms: int
    #: A controller's clock is wrong by so much at most.
    skew_ms: int
    #: Operators move replicas anywhere, change the policy, delete a segment.
    move: float
    policies: float
    delete: float


def draw(seed: int) -> Options:
    rng = Random(f"{seed}/completion options")

    def some(*levels: float) -> float:
        return rng.choice((0.0, *levels))

    servers = rng.choice((1, 2, 3, 3, 4))
    replication = min(servers, rng.choice((1, 2, 2, 3)))
    policies = [StorePolicy.STORE_REQUIRED, StorePolicy.STORE_BEST_EFFORT]
    # Nothing can bring back what differs from the log: then no process is killed, and no disk is lost.
    divergence = some(0.05, 0.2)
    return Options(
        servers=servers,
        partitions=rng.choice((1, 1, 2)),
        replication=replication,
        policy=rng.choice(policies if replication < 2 else [*policies, StorePolicy.PEERS_ONLY]),
        mode=rng.choice((CompletionMode.DEFAULT, CompletionMode.DEFAULT, CompletionMode.DOWNLOAD)),
        upload_wait_ms=rng.choice((0, 1_000, 10_000)),
        safety_ms=rng.choice((40_000, 90_000, 300_000)),
        epoch_rows=rng.choice((100, 1_000, 20_000)),
        segment_rows=rng.choice((500, 5_000, 1_000_000)),
        segment_ms=rng.choice((5_000, 15_000, 40_000)),
        loss=some(0.02, 0.1, 0.3),
        duplication=some(0.05, 0.2),
        delay_ms=rng.choice((5, 100, 3_000)),
        crash=0.0 if divergence else rng.choice((0.0, 0.005, 0.02)),
        pause=some(0.01, 0.03),
        away_ms=rng.choice((2_000, 20_000, 40_000, 240_000)),
        wipe=0.0 if divergence else rng.choice((0.0, 0.3, 0.8)),
        lag=some(0.3, 0.8),
        divergence=divergence,
        build_failure=some(0.1, 0.4),
        build_ms=rng.choice((50, 3_000, 40_000)),
        store_trouble=some(0.02, 0.1),
        controller_crash=some(0.01, 0.04),
        controller_pause=some(0.01, 0.04),
        force=some(0.02, 0.1),
        trim=rng.choice((0.05, 0.3, 1.0)),
        cut=some(0.02, 0.1),
        rot=0.0 if divergence else some(0.2, 0.8),
        transfer_ms=rng.choice((0, 100, 5_000)),
        skew_ms=rng.choice((0, 0, 60_000)),
        move=some(0.02, 0.1),
        policies=some(0.02),
        delete=some(0.02),
    )
