# SPDX-License-Identifier: Apache-2.0
"""Repair of copies: what is missing of sealed segments, and what to do about it. Pure.

Rules

- Indexed by what is missing: a segment is looked at when its record changes, and when a replica has been away for
  long; a run looks only at what is in the index then (`Run.looked_at` says how much).
- An order is given again only after a backoff of its segment; so many run at once, and no more. A store that fails
  gets one upload at a time until one lands.
- Missing in the store: a live server that has verified the committed content is asked to upload it. The committer does
  so by itself; it is asked only when it had its time.
- Too few replicas: a live server gets the segment, single copies first. A replica that is away for long, or is one
  more than wanted, is given up only when all the others that are wanted have verified copies (I-6).
- No copy: whoever gets the segment reads its range of the epoch log again, if that has it. If not, and nobody who
  could bring one came back in time, the loss is recorded. A copy that turns up takes it back.

    step(situation, now_ms) -> orders          ended(upload, error, now_ms) when an upload order was carried out
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from cremant.completion.copies import holders_of, misses_store
from cremant.completion.liveness import Absence
from cremant.completion.orders import (
    Assign,
    Key,
    Order,
    Prune,
    RecordLoss,
    Situation,
    TakeBackLoss,
    Upload,
    Wants,
)
from cremant.completion.safeguards import ALL, Safeguards
from cremant.model.limits import (
    LOSS_AFTER_MS,
    LOSS_AWAY_MS,
    REPAIR_AWAY_MS,
    REPAIR_BACKOFF_FIRST_MS,
    REPAIR_BACKOFF_MAX_MS,
    REPAIR_MOVING_MAX,
    REPAIR_UPLOADS_MAX,
    SURPLUS_AFTER_MS,
    UPLOAD_PATIENCE_MS,
)
from cremant.model.segments import Loss, ReplicaState, SegmentMetadata, SegmentStatus, StoreState


@dataclass(frozen=True, slots=True)
class Run:
    """`looked_at`: records that this run read; `missing`: segments in the index after it."""

    orders: tuple[Order, ...] = ()
    looked_at: int = 0
    missing: int = 0


# --- the machine --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Need:
    """Since when a segment misses something, and how often it was tried to mend it in vain."""

    since_ms: int
    attempts: int = 0
    retry_at_ms: int = 0
    uploading: bool = False
    #: Somebody asked for it: nobody else's turn is waited for.
    hurried: bool = False
    cause: str = ""
    #: Live replicas that report an error of it, since when.
    failing_since_ms: dict[str, int] = field(default_factory=dict)
    #: Since when there are more replicas than wanted, and one could go.
    surplus_since_ms: int | None = None


class _Known(NamedTuple):
    segment: SegmentMetadata
    wants: Wants


class CopiesRepair:
    """Not thread-safe."""

    def __init__(self, safeguards: Safeguards = ALL) -> None:
        self._safeguards = safeguards
        self._known: dict[Key, _Known] = {}
        self._by_replica: dict[str, set[Key]] = {}
        self._needs: dict[Key, _Need] = {}
        self._absence = Absence()
        self._away: frozenset[str] = frozenset()
        self._uploads = 0
        self._store_failures = 0
        self._store_retry_at_ms = 0

    # --- the index ------------------------------------------------------------------------------------------------

    def put(self, table: str, segment: SegmentMetadata, wants: Wants, now_ms: int) -> None:
        """A record was written."""
        key = Key(table, segment.name)
        self._forget_replicas(key)
        if segment.status is not SegmentStatus.DONE:
            self._known.pop(key, None)
            return
        self._known[key] = _Known(segment, wants)
        for server in segment.replicas:
            self._by_replica.setdefault(server, set()).add(key)
        if _misses_something(segment, wants, self._away):
            self._needs.setdefault(key, _Need(now_ms))
        else:
            self._needs.pop(key, None)

    def remove(self, table: str, segment: str) -> None:
        key = Key(table, segment)
        self._forget_replicas(key)
        self._known.pop(key, None)
        self._needs.pop(key, None)

    def missing(self) -> frozenset[Key]:
        """What a run would look at."""
        return frozenset(self._needs)

    def without_copy(self) -> frozenset[tuple[str, int]]:
        """(table, partition) of segments of which only the epoch log can still have the rows."""
        known = ((key, self._known[key].segment) for key in self._needs)
        return frozenset(
            (key.table, segment.partition)
            for key, segment in known
            if segment.store_state is not StoreState.STORED and not set(holders_of(segment)) - self._away
        )

    def causes(self) -> dict[Key, str]:
        """Why segments could not be mended so far."""
        return {key: need.cause for key, need in self._needs.items() if need.cause}

    def hurry(self, key: Key) -> bool:
        """Somebody wants it mended now: no backoff. False when nothing of it is missing."""
        need = self._needs.get(key)
        if need is None:
            return False
        need.retry_at_ms = self._store_retry_at_ms = 0
        need.hurried = True
        return True

    def _forget_replicas(self, key: Key) -> None:
        before = self._known.get(key)
        for server in before.segment.replicas if before is not None else ():
            keys = self._by_replica.get(server, set())
            keys.discard(key)
            if not keys:
                self._by_replica.pop(server, None)

    # --- a run ----------------------------------------------------------------------------------------------------

    def notice(self, live: frozenset[str], now_ms: int) -> None:
        """Who is away, and for how long. What a server that stays away was a replica of enters the index."""
        before = self._away
        holders = {holder for key in self._needs for holder in holders_of(self._known[key].segment)}
        self._away = self._absence.notice(self._by_replica.keys() | holders, live, now_ms)
        for server in sorted(self._away ^ before):
            for key in sorted(self._by_replica.get(server, ())):
                known = self._known[key]
                if _misses_something(known.segment, known.wants, self._away):
                    self._needs.setdefault(key, _Need(now_ms))
                else:
                    self._needs.pop(key, None)

    def step(self, situation: Situation, now_ms: int) -> Run:
        """One run. Orders for one segment at most once per backoff; `notice` goes before."""
        orders: list[Order] = []
        urgent = sorted(self._needs, key=lambda key: (len(holders_of(self._known[key].segment)), key))
        moving = self._moving(situation)
        looked_at = 0
        for key in urgent:
            need = self._needs[key]
            if need.uploading or now_ms < need.retry_at_ms:
                continue
            looked_at += 1
            order = self._order(key, need, situation, now_ms, may_move=moving < REPAIR_MOVING_MAX)
            if order is None:
                continue
            orders.append(order)
            moving += isinstance(order, Assign)
            if isinstance(order, Upload):
                need.uploading = True
                self._uploads += 1
            else:
                need.retry_at_ms = now_ms + REPAIR_BACKOFF_FIRST_MS
        return Run(tuple(orders), looked_at, len(self._needs))

    def ended(self, upload: Upload, error: str, now_ms: int, *, of_store: bool = False) -> None:
        """`error` is "" when the object is in the store and the record says so. `of_store`: the store is at fault, not
        the server or its copy: what others hold cannot be uploaded either."""
        self._uploads -= 1
        need = self._needs.get(upload.key)
        if not error:
            self._store_failures = self._store_retry_at_ms = 0
            if need is not None:
                need.uploading, need.attempts, need.cause = False, 0, ""
            return
        if of_store:
            self._store_failures += 1
            self._store_retry_at_ms = now_ms + _backoff_ms(self._store_failures)
        if need is not None:
            need.uploading, need.cause = False, error
            need.attempts += 1
            need.retry_at_ms = now_ms + _backoff_ms(need.attempts)

    def _moving(self, situation: Situation) -> int:
        """Segments that live replicas have still to get."""
        count = 0
        for key in self._needs:
            segment = self._known[key].segment
            count += any(server in situation.live and server not in segment.copies for server in segment.replicas)
        return count

    def _order(self, key: Key, need: _Need, situation: Situation, now_ms: int, *, may_move: bool) -> Order | None:
        segment, wants = self._known[key]
        verified = _verified(segment, situation, key)
        stale = tuple(holder for holder in holders_of(segment) if holder not in segment.replicas)
        if stale and set(holders_of(segment)) - set(stale):
            return Prune(key, stale)
        if segment.lost is not None and verified:
            return TakeBackLoss(key)
        if not verified and segment.store_state is not StoreState.STORED:
            return self._without_copy(key, need, situation, now_ms, may_move=may_move)
        if key.table not in situation.moving and (order := self._replicas(key, need, situation, now_ms, may_move)):
            return order
        if misses_store(segment, wants.policy):
            return self._upload(key, segment, verified, now_ms)
        return None

    # --- replicas -------------------------------------------------------------------------------------------------

    def _replicas(
        self, key: Key, need: _Need, situation: Situation, now_ms: int, may_move: bool, from_log: bool = False
    ) -> Assign | None:
        """One more replica while too few are there or on their way; then those that stayed away are given up, and those
        that are more than wanted."""
        segment, wants = self._known[key]
        wanted = wants.replication
        # Recorded, too: who has just become a replica may be deleting what it had before, and still report it.
        verified = _verified(segment, situation, key) & segment.copies.keys() & set(segment.replicas)
        away = [server for server in segment.replicas if server in self._away]
        if away and (len(verified) >= wanted or not self._safeguards.others_verified):
            kept = tuple(server for server in segment.replicas if server not in self._away)
            return Assign(key, kept, "replicas that are away were replaced")
        counted = {
            server for server in segment.replicas
            if server not in self._away and not self._fails(key, need, server, situation, now_ms)
        }  # fmt: skip
        if len(counted) >= wanted:
            fewer = _without_surplus(key, segment, wanted, verified, situation)
            if fewer is None:
                need.surplus_since_ms = None
                return None
            if need.surplus_since_ms is None:
                need.surplus_since_ms = now_ms
            return fewer if now_ms - need.surplus_since_ms >= SURPLUS_AFTER_MS else None
        if not may_move:
            return None
        others = situation.live - situation.leaving - set(segment.replicas)
        if not others:
            return None
        server = min(others, key=lambda server: (len(self._by_replica.get(server, ())), server))
        source = "the epoch log" if from_log else "a copy"
        reason = f"{len(counted)} of {wanted} replicas: {server} gets it from {source}"
        return Assign(key, (*segment.replicas, server), reason)

    def _fails(self, key: Key, need: _Need, server: str, situation: Situation, now_ms: int) -> bool:
        """A live replica that has been reporting an error of the segment for long."""
        said = situation.said.get(key, {}).get(server)
        if said is None or said.state is not ReplicaState.ERROR:
            need.failing_since_ms.pop(server, None)
            return False
        return now_ms - need.failing_since_ms.setdefault(server, now_ms) >= REPAIR_AWAY_MS

    # --- the store ------------------------------------------------------------------------------------------------

    def _upload(self, key: Key, segment: SegmentMetadata, verified: Collection[str], now_ms: int) -> Upload | None:
        waits = segment.store_state is not StoreState.NONE and segment.committer in verified
        if waits and not self._needs[key].hurried and now_ms - segment.store_changed_ms < UPLOAD_PATIENCE_MS:
            return None
        slots = 1 if self._store_failures else REPAIR_UPLOADS_MAX
        if not verified or self._uploads >= slots or now_ms < self._store_retry_at_ms:
            return None
        ordered = sorted(verified)
        return Upload(key, ordered[self._needs[key].attempts % len(ordered)])

    # --- no copy --------------------------------------------------------------------------------------------------

    def _without_copy(
        self, key: Key, need: _Need, situation: Situation, now_ms: int, *, may_move: bool
    ) -> Order | None:
        segment = self._known[key].segment
        holders = holders_of(segment)
        serving = any(said.state is ReplicaState.ONLINE for said in situation.said.get(key, {}).values())
        earliest = situation.log_earliest.get((key.table, segment.partition))
        if serving or earliest is None or any(holder in situation.live for holder in holders):
            return None  # it is sealed again from a tail, comes with the holder's next report, or nobody knows
        if earliest <= segment.start.log_offset:
            if key.table in situation.moving:
                return None
            return self._replicas(key, need, situation, now_ms, may_move, from_log=True)
        patience_ms = LOSS_AWAY_MS if holders else LOSS_AFTER_MS
        since_ms = max((self._absence.since_ms(holder, now_ms) for holder in holders), default=need.since_ms)
        if segment.lost is not None or now_ms - since_ms < patience_ms:
            return None
        away = f"its holders {', '.join(holders)} are away" if holders else "no server has a copy"
        return RecordLoss(
            key,
            Loss(
                at_ms=now_ms, rows=segment.rows, start_offset=segment.start_offset,
                end_offset=segment.end_offset or segment.start_offset,
                cause=f"{away}, the store has none, and the epoch log begins behind it (at {earliest}, it began at "
                f"{segment.start.log_offset})",
            ),
        )  # fmt: skip


def _misses_something(segment: SegmentMetadata, wants: Wants, away: frozenset[str]) -> bool:
    holders = set(holders_of(segment))
    return (
        misses_store(segment, wants.policy)
        or segment.lost is not None
        or not holders.issuperset(segment.replicas)
        or not holders.issubset(segment.replicas)
        or not away.isdisjoint(segment.replicas)
        or len(segment.replicas) != wants.replication
    )


def _without_surplus(
    key: Key, segment: SegmentMetadata, wanted: int, verified: Collection[str], situation: Situation
) -> Assign | None:
    """Those of the partition's servers stay. None before all that stay have copies and the segment is safe by them."""
    homes = situation.homes.get((key.table, segment.partition), ())
    kept = set(sorted(segment.replicas, key=lambda server: server not in homes)[:wanted])
    safe = segment.store_state is StoreState.STORED or len(kept) >= 2
    if len(segment.replicas) <= wanted or not safe or not kept.issubset(verified):
        return None
    left = tuple(server for server in segment.replicas if server in kept)
    return Assign(key, left, f"{len(segment.replicas)} replicas are more than the {wanted} that are wanted")


def _verified(segment: SegmentMetadata, situation: Situation, key: Key) -> set[str]:
    """Live servers that report the committed content."""
    return {
        server
        for server, said in situation.said.get(key, {}).items()
        if server in situation.live and said.state is ReplicaState.ONLINE and said.checksum == segment.checksum
    }


def _backoff_ms(failures: int) -> int:
    return min(REPAIR_BACKOFF_MAX_MS, REPAIR_BACKOFF_FIRST_MS << min(failures - 1, 16))
