# SPDX-License-Identifier: Apache-2.0
"""What one seed's world of upsert is like, and which of its safeguards are there."""

from __future__ import annotations

from random import Random

import msgspec

from cremant.completion import safeguards as copies
from cremant.sim import options as epochs


class Options(epochs.Options, frozen=True, kw_only=True):
    """Those of the world of epochs, and: `keys`: different ones; `spread`: how late a row may be, in comparison steps;
    `state_partitions`: reduce tasks of a batch; `tasks`: map tasks of a batch at most."""

    keys: int
    spread: int
    state_partitions: int
    tasks: int
    servers: int
    brokers: int
    #: What is sealed, or saved, is uploaded (0: the table has no deep store).
    upload: float
    #: A server writes a snapshot of a segment; a server gets a segment of a partition (that it need not consume).
    snapshot: float
    move: float
    #: A server loses its disks.
    wipe: float
    #: Rows of a sealed segment stand in another order than they came in.
    sorted_rows: bool
    #: The key coordinator's state is made anew, on schedule; keys whose comparison value is so far below the newest
    #: expire then (tombstones at half of that; 0: never).
    rebuild: float
    ttl: int
    #: Replaced rows of sealed segments go, so long after they were replaced; 0: never.
    compaction_ms: int
    #: How old what a broker knows may be, ms.
    view_age_ms: int
    #: An operator takes the table back to an epoch of a while ago.
    rewind: float


class Safeguards(msgspec.Struct, frozen=True, kw_only=True):
    """Of the coordinator, servers and brokers; True = in place."""

    #: Candidates are compared by (comparison, location), not by who comes last.
    order_total: bool = True
    #: State without its commit is not gone on with,
    state_follows_commits: bool = True
    #: ... and not adopted.
    state_dropped: bool = True
    #: A fresh checkpoint begins with the rows in force.
    state_rebuilt: bool = True
    #: ... tombstones among them.
    tombstones_rebuilt: bool = True
    #: ... of every partition, or the seed fails.
    seed_whole: bool = True
    #: What it leaves out as expired is DELETEd.
    expired_deleted: bool = True
    #: A batch is not replayed for its state when its messages are gone.
    replay_whole: bool = True
    #: A server's readers begin at the oldest snapshot of the segments they serve.
    snapshot_position: bool = True
    #: A fetched segment is served when it has everything that is closed here.
    fetched_caught_up: bool = True
    #: The log is kept from the newest snapshots of durable copies on.
    log_kept: bool = True
    #: ... and the ranges of segments that are not safe.
    unsafe_kept: bool = True
    #: ... where one copy is not safe.
    two_copies: bool = True
    #: A server answers at L when it has closed L, not before.
    cut_awaited: bool = True
    #: L is the lowest closed epoch of what a query uses, not the highest.
    cut_lowest: bool = True
    #: A second attempt of a part asks at the same L.
    cut_kept: bool = True
    #: A tail answers from the offset that the broker's view says.
    tail_from_offset: bool = True
    #: A broker never answers below what it has answered.
    floor_kept: bool = True
    #: Segments are compacted at an epoch that every replica has closed.
    compacted_at_mark: bool = True
    #: ... tombstones stay.
    tombstones_kept: bool = True
    #: A server refuses epochs below that of what it compacted.
    horizon_refused: bool = True
    #: No rewind goes below it.
    compacted_kept: bool = True
    #: No segment ends at an epoch that is to be taken back.
    cut_not_void: bool = True
    #: A server refuses epochs that a Reset took back.
    void_refused: bool = True
    #: An answer needs all partitions that the table had at L.
    growth_counted: bool = True
    #: ... also those that the broker's view lacks.
    partitions_known: bool = True
    #: In force at L: validFrom <= L < validUntil, half-open.
    half_open: bool = True

    @property
    def copies(self) -> copies.Safeguards:
        """Those of the controller, when it trims the log."""
        return copies.Safeguards(unsafe_kept=self.unsafe_kept, two_copies=self.two_copies)


ALL = Safeguards()


def draw(seed: int) -> Options:
    rng = Random(f"{seed}/upsert options")

    def some(*levels: float) -> float:
        return rng.choice((0.0, *levels))

    common = epochs.draw(seed)
    chosen = {name: getattr(common, name) for name in epochs.Options.__struct_fields__}
    chosen.update(
        staged=True,
        partitions=rng.choice((1, 2, 3, 3, 4)),
        safety_ms=rng.choice((600, 1200, 2000)),
        batch_rows=rng.choice((4, 12, 30)),
        segment_rows=rng.choice((3, 10, 30, 100_000)),
        replica_restart=some(0.03, 0.1),
        crash=some(0.004, 0.01),
        trim=some(0.1, 0.5),
        retention=some(0.02, 0.05),
    )
    return Options(
        **chosen,
        rewind=some(0.005, 0.02),
        rebuild=some(0.01),
        ttl=rng.choice((0, 0, 4, 30)),
        wipe=some(0.01, 0.03),
        sorted_rows=rng.random() < 0.3,
        keys=rng.choice((2, 6, 20, 60)),
        spread=rng.choice((1, 5, 40)),
        state_partitions=rng.choice((1, 2, 3)),
        tasks=rng.choice((1, 2, 4)),
        servers=rng.choice((1, 2, 3)),
        brokers=rng.choice((1, 2)),
        snapshot=some(0.05, 0.3),
        move=some(0.05, 0.2),
        compaction_ms=Random(f"{seed}/compaction").choice((0, 0, 40, 200)),
        upload=rng.choice((0.0, 0.3, 1.0)),
        view_age_ms=rng.choice((0, 10, 60, 400)),
    )
