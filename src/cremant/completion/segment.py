# SPDX-License-Identifier: Apache-2.0
"""Segment completion, the controller's half: one pure machine per segment.

Rules
- The durable state *is* the segment's metadata; the machine is made from it (`recover`) and changes nothing by itself:
  a step returns effects, and `Persist` must have succeeded before its `Reply` is sent (a lost compare-and-set: recover
  again and repeat the step).
- I-1: one report decides the cut, in IN_PROGRESS -> COMMITTING; `end` never changes afterwards. Reports name closed
  positions only. A cut that follows from the log alone (rows, bytes, forced) is the same on every replica, so the first
  to report it wins. Of the others (time, memory) the largest offset wins, once every live replica has reported or a
  while has passed; not while a live replica is far ahead of it, or not for long. Replicas that died or stopped are
  neither waited for nor chosen. Nobody loses rows by a cut: those behind it belong to the next segment.
- I-2: one compare-and-set makes the segment DONE, opens the next exactly at `end` and moves the partition on.
- The committer holds a lease, renewed while it shows progress, not by asking; when it lapsed, the next replica that is
  at the cut gets COMMIT for the same end under the next token. A token is given once; `CommitEnded` of an earlier one
  fails. Each further token's lease is twice as long, so a slow build cannot be taken over for ever; that of a committer
  which does not live ends as if it were the first.
- Every message may be late, doubled or reordered: answers are idempotent by token, and a stale one changes nothing.
- An upload beside the commit is recorded when it landed, if the segment still lacks an object: anything else that was
  written is the sender's to delete.
- No timers here: servers repeat their reports, time is an argument. What was reported is volatile: a controller that
  restarts waits anew.

Table (state, event, guard -> answer, next state): see TRANSITIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from cremant.completion.safeguards import ALL, Safeguards
from cremant.model.cluster import PartitionRecord
from cremant.model.limits import (
    COMMIT_LEASE_MAX_MS,
    COMMIT_LEASE_MS,
    WINNER_BEHIND_MS,
    WINNER_BEHIND_ROWS_MAX,
    WINNER_WAIT_MS,
)
from cremant.model.names import SegmentName
from cremant.model.offsets import Position
from cremant.model.segments import Copy, SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.cuts import FORCE_COMMIT, ROW_LIMIT, SIZE_LIMIT
from cremant.wire.messages import CommitEnd, CompletionStatus, SegmentConsumed, SegmentStored

#: Cuts that follow from the log alone: every replica reports the same one, sooner or later.
SAME_EVERYWHERE = (ROW_LIMIT, SIZE_LIMIT, FORCE_COMMIT)

# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Consumed:
    """A replica met a flush criterion; `at` is the closed position it could cut at."""

    instance: str
    at: Position
    reason: str = ROW_LIMIT


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """A committer sealed and verified its segment, and says what the store has of it."""

    message: CommitEnd


@dataclass(frozen=True, slots=True)
class CommitterProgressed:
    """A heartbeat shows that this replica's build or upload has come further since the last one."""

    instance: str


@dataclass(frozen=True, slots=True)
class Stored:
    """An upload that no commit waited for landed, or failed."""

    message: SegmentStored


Event = Consumed | CommitEnded | CommitterProgressed | Stored


@dataclass(frozen=True, slots=True)
class Reports:
    """What replicas have reported of an open segment since `since_ms`. Volatile."""

    since_ms: int
    at: Mapping[str, Position] = field(default_factory=dict)

    def plus(self, event: Consumed) -> Reports:
        return Reports(self.since_ms, {**self.at, event.instance: event.at})


# --- effects ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Write all of these in one compare-and-set against the records the machine was made from, before any reply."""

    segment: SegmentMetadata
    next_segment: SegmentMetadata | None = None
    partition: PartitionRecord | None = None


@dataclass(frozen=True, slots=True)
class RenewLease:
    """The lease runs until then. Volatile: a controller that restarts grants a fresh lease."""

    until_ms: int


@dataclass(frozen=True, slots=True)
class Reply:
    """`token` and `end` are meaningful with COMMIT, CATCH_UP, KEEP and HOLD (once decided); `store_url` is what the
    metadata names now, for `Stored`."""

    status: CompletionStatus
    end: Position | None = None
    token: int = 0
    #: Row of TRANSITIONS that answered.
    rule: str = ""
    store_url: str | None = None


@dataclass(frozen=True, slots=True)
class Remember:
    """Hand this to the next machine of the segment while it is open."""

    reports: Reports


Effect = Persist | RenewLease | Remember | Reply

# --- the table ----------------------------------------------------------------------------------------------------

#: (rule, state, event, guard, answer, next state)
TRANSITIONS: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("stranger", "any", "Consumed", "not a replica", "DISCARD", "same"),
    ("empty", "IN_PROGRESS", "Consumed", "nothing to cut", "HOLD", "same"),
    ("first-wins", "IN_PROGRESS", "Consumed", "a cut that is the same everywhere", "COMMIT", "COMMITTING"),
    ("may-report", "IN_PROGRESS", "Consumed", "live replicas have not reported yet, not for long", "HOLD", "same"),
    (
        "far-behind",
        "IN_PROGRESS",
        "Consumed",
        "a live replica is far ahead of all reports, not for long",
        "HOLD",
        "same",
    ),
    ("largest-wins", "IN_PROGRESS", "Consumed", "the largest offset is the caller's", "COMMIT", "COMMITTING"),
    ("other-wins", "IN_PROGRESS", "Consumed", "the largest offset is another's", "CATCH_UP", "COMMITTING, the other's"),
    ("commit-again", "COMMITTING", "Consumed", "the committer, at the cut", "COMMIT", "same"),
    ("catch-up", "COMMITTING", "Consumed", "before the cut", "CATCH_UP", "same"),
    ("take-over", "COMMITTING", "Consumed", "at the cut, the lease lapsed", "COMMIT", "COMMITTING, next token"),
    ("wait", "COMMITTING", "Consumed", "at the cut, the lease runs", "HOLD", "same"),
    ("keep", "DONE", "Consumed", "at or past the cut", "KEEP", "same"),
    ("catch-up-late", "DONE", "Consumed", "before the cut", "CATCH_UP", "same"),
    ("too-early", "IN_PROGRESS", "CommitEnded", "-", "FAILED", "same"),
    ("stale-token", "COMMITTING", "CommitEnded", "not the token, committer and end in force", "FAILED", "same"),
    ("commit", "COMMITTING", "CommitEnded", "the token in force", "COMMIT_SUCCESS", "DONE, next opened"),
    ("committed-again", "DONE", "CommitEnded", "the token that committed", "COMMIT_SUCCESS", "same"),
    ("committed-other", "DONE", "CommitEnded", "any other token", "FAILED", "same"),
    ("not-yet", "COMMITTING", "Stored", "-", "HOLD", "same"),
    ("stored", "DONE", "Stored", "landed, the committed content, no object is named yet", "KEEP", "STORED"),
    ("stored-again", "DONE", "Stored", "landed, the object that is named", "KEEP", "same"),
    ("stored-other", "any", "Stored", "landed, anything else", "DISCARD", "same"),
    ("not-stored", "DONE", "Stored", "failed, no object is named yet", "KEEP", "FAILED, with the cause"),
    ("not-stored-late", "any", "Stored", "failed, anything else", "DISCARD", "same"),
    ("renew", "COMMITTING", "CommitterProgressed", "the committer", "-", "same, lease renewed"),
    ("not-mine", "any", "CommitterProgressed", "anything else", "-", "same"),
)


class CompletionMachine:
    """Made from the durable record for each event; see the rules above."""

    def __init__(
        self, segment: SegmentMetadata, partition: PartitionRecord, lease_until_ms: int, table: str,
        reports: Reports | None, visible: Mapping[str, int], safeguards: Safeguards,
    ) -> None:  # fmt: skip
        self.segment = segment
        self.partition = partition
        self._lease_until_ms = lease_until_ms
        self._table = table
        self._reports = reports
        self._visible = visible
        self._safeguards = safeguards

    @classmethod
    def recover(
        cls, table: str, segment: SegmentMetadata, partition: PartitionRecord, *, renewed_until_ms: int | None = None,
        reports: Reports | None = None, visible: Mapping[str, int] | None = None, safeguards: Safeguards = ALL,
    ) -> CompletionMachine:  # fmt: skip
        """`renewed_until_ms`: the lease as this controller granted or renewed it (volatile). It goes before the
        record's, which another run of the controller may have written by another wall clock. `reports`: as remembered.
        `visible`: replica -> offset up to which it shows rows, of those that live and consume."""
        until_ms = segment.lease_until_ms if renewed_until_ms is None else renewed_until_ms
        return cls(segment, partition, until_ms, table, reports, visible or {}, safeguards)

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        match event:
            case Consumed():
                return self._consumed(event, now_ms)
            case CommitEnded(message=message):
                return self._commit_ended(message, now_ms)
            case CommitterProgressed(instance=instance):
                return self._committer_progressed(instance, now_ms)
            case Stored(message=message):
                return self._stored(message, now_ms)
            case _:
                assert_never(event)

    def _consumed(self, event: Consumed, now_ms: int) -> list[Effect]:
        if event.instance not in self.segment.replicas and event.instance not in self.partition.replicas:
            return [Reply(CompletionStatus.DISCARD, rule="stranger")]
        match self.segment.status:
            case SegmentStatus.IN_PROGRESS:
                return self._decide(event, now_ms)
            case SegmentStatus.COMMITTING:
                return self._while_committing(event, now_ms)
            case SegmentStatus.DONE:
                return [self._after_commit(event)]
            case _:
                assert_never(self.segment.status)

    def _decide(self, event: Consumed, now_ms: int) -> list[Effect]:
        if event.at.next_offset <= self.segment.start_offset:
            return [Reply(CompletionStatus.HOLD, rule="empty")]
        if event.reason in SAME_EVERYWHERE:
            return self._grant(self._cut_at(event.at), event.instance, now_ms, "first-wins")
        reports = (self._reports or Reports(now_ms)).plus(event)
        silent = [i for i in self._visible if i in self.partition.replicas and i not in reports.at]
        waited_ms = now_ms - reports.since_ms
        if silent and waited_ms < WINNER_WAIT_MS:
            return [Remember(reports), Reply(CompletionStatus.HOLD, rule="may-report")]
        winner = self._winner(event, reports)
        largest = reports.at[winner]
        ahead = max((self._visible[instance] for instance in silent), default=0)
        if ahead - largest.next_offset > WINNER_BEHIND_ROWS_MAX and waited_ms < WINNER_BEHIND_MS:
            return [Remember(reports), Reply(CompletionStatus.HOLD, rule="far-behind")]
        if winner == event.instance:
            return self._grant(self._cut_at(largest), winner, now_ms, "largest-wins")
        return self._grant(self._cut_at(largest), winner, now_ms, "other-wins", CompletionStatus.CATCH_UP)

    def _winner(self, event: Consumed, reports: Reports) -> str:
        """The caller, unless another that still consumes has reported more."""
        winner = event.instance
        for instance, at in sorted(reports.at.items()):
            if instance in self._visible and at.next_offset > reports.at[winner].next_offset:
                winner = instance
        return winner

    def _cut_at(self, end: Position) -> SegmentMetadata:
        return msgspec.structs.replace(
            self.segment, status=SegmentStatus.COMMITTING, end=end, end_offset=end.next_offset
        )

    def _grant(
        self, segment: SegmentMetadata, instance: str, now_ms: int, rule: str,
        status: CompletionStatus = CompletionStatus.COMMIT,
    ) -> list[Effect]:  # fmt: skip
        token = segment.commit_token + 1
        until_ms = now_ms + lease_ms(token)
        granted = msgspec.structs.replace(segment, committer=instance, commit_token=token, lease_until_ms=until_ms)
        return [Persist(granted), RenewLease(until_ms), Reply(status, end=granted.end, token=token, rule=rule)]

    def _while_committing(self, event: Consumed, now_ms: int) -> list[Effect]:
        end, token = self.segment.end, self.segment.commit_token
        assert end is not None
        if event.at.next_offset < end.next_offset:
            return [Reply(CompletionStatus.CATCH_UP, end=end, token=token, rule="catch-up")]
        if event.instance == self.segment.committer:
            return [Reply(CompletionStatus.COMMIT, end=end, token=token, rule="commit-again")]
        if self._lapsed(now_ms):
            taken = self.segment if self._safeguards.cut_fixed else self._cut_at(event.at)
            return self._grant(taken, event.instance, now_ms, "take-over")
        return [Reply(CompletionStatus.HOLD, end=end, token=token, rule="wait")]

    def _lapsed(self, now_ms: int) -> bool:
        """Of a committer that is known not to live only the shortest lease counts: whom nobody hears of makes no
        progress."""
        until_ms = self._lease_until_ms
        if self._visible and self.segment.committer not in self._visible:
            until_ms -= lease_ms(self.segment.commit_token) - COMMIT_LEASE_MS
        return until_ms <= now_ms

    def _after_commit(self, event: Consumed) -> Reply:
        end, token = self.segment.end, self.segment.commit_token
        assert end is not None
        if event.at.next_offset < end.next_offset:
            return Reply(CompletionStatus.CATCH_UP, end=end, token=token, rule="catch-up-late")
        return Reply(CompletionStatus.KEEP, end=end, token=token, rule="keep")

    def _commit_ended(self, message: CommitEnd, now_ms: int) -> list[Effect]:
        segment = self.segment
        if segment.status is SegmentStatus.IN_PROGRESS:
            return [Reply(CompletionStatus.FAILED, rule="too-early")]
        in_force = (
            message.token == segment.commit_token
            and message.instance == segment.committer
            and message.end == segment.end
        )
        if segment.status is SegmentStatus.DONE:
            same = in_force and message.checksum == segment.checksum
            status = CompletionStatus.COMMIT_SUCCESS if same else CompletionStatus.FAILED
            return [Reply(status, end=segment.end, rule="committed-again" if same else "committed-other")]
        if not in_force and self._safeguards.token_checked:
            return [Reply(CompletionStatus.FAILED, end=segment.end, rule="stale-token")]
        return [
            self._commit(message, now_ms),
            Reply(CompletionStatus.COMMIT_SUCCESS, end=segment.end, token=message.token, rule="commit"),
        ]

    def _commit(self, message: CommitEnd, now_ms: int) -> Persist:
        segment, end = self.segment, self.segment.end
        assert end is not None
        done = msgspec.structs.replace(
            segment, status=SegmentStatus.DONE, rows=message.rows, size_bytes=message.size_bytes,
            checksum=message.checksum, file_checksum=message.file_checksum, min_time_ms=message.min_time_ms,
            max_time_ms=message.max_time_ms, max_ingestion_ms=message.max_ingestion_ms,
            last_indexed_ms=message.last_indexed_ms, mark=message.mark, columns=message.columns,
            partitioning=message.partitioning, form=message.form,
            store_state=message.store_state, store_url=message.store_url, store_error=message.store_error,
            store_changed_ms=now_ms,
            copies={message.instance: Copy(checksum=message.checksum, verified_at_ms=now_ms)},
        )  # fmt: skip
        sequence = segment.sequence + 1
        name = str(SegmentName.new(self._table, segment.partition, sequence, now_ms))
        opened = SegmentMetadata(
            name=name, partition=segment.partition, sequence=sequence, status=SegmentStatus.IN_PROGRESS,
            start_offset=end.next_offset, start=end, created_ms=now_ms, replicas=self.partition.replicas,
            force_at_offset=_still_forced(segment, end),
        )  # fmt: skip
        moved = msgspec.structs.replace(self.partition, consuming=name, sequence=sequence)
        return Persist(done, opened, moved)

    def _stored(self, message: SegmentStored, now_ms: int) -> list[Effect]:
        segment = self.segment
        done = segment.status is SegmentStatus.DONE
        wanted = done and message.checksum == segment.checksum and segment.store_state is not StoreState.STORED
        wanted = wanted or (done and not self._safeguards.upload_checked)
        if message.error is not None:
            if not wanted:
                return [Reply(CompletionStatus.DISCARD, rule="not-stored-late")]
            state, rule = StoreState.FAILED, "not-stored"
        elif not done:
            # A commit may still be on its way; if none comes, the next committer's does, and this is not wanted then.
            return [Reply(CompletionStatus.HOLD, rule="not-yet")]
        elif not wanted:
            again = message.url == segment.store_url
            rule, status = (
                ("stored-again", CompletionStatus.KEEP) if again else ("stored-other", CompletionStatus.DISCARD)
            )
            return [Reply(status, rule=rule, store_url=segment.store_url)]
        else:
            state, rule = StoreState.STORED, "stored"
        recorded = msgspec.structs.replace(
            segment, store_state=state, store_url=message.url, store_error=message.error, store_changed_ms=now_ms,
            file_checksum=message.file_checksum if message.url else segment.file_checksum,
            size_bytes=message.size_bytes if message.url and message.size_bytes else segment.size_bytes,
        )  # fmt: skip
        return [Persist(recorded), Reply(CompletionStatus.KEEP, rule=rule, store_url=message.url)]

    def _committer_progressed(self, instance: str, now_ms: int) -> list[Effect]:
        if self.segment.status is SegmentStatus.COMMITTING and instance == self.segment.committer:
            return [RenewLease(now_ms + lease_ms(self.segment.commit_token))]
        return []


def _still_forced(segment: SegmentMetadata, end: Position) -> int | None:
    """A limit ended the segment before the offset up to which an operator wants rows sealed."""
    wanted = segment.force_at_offset
    return wanted if wanted is not None and wanted > end.next_offset else None


def lease_ms(token: int) -> int:
    """Length of the lease that comes with the n-th token of a segment."""
    return min(COMMIT_LEASE_MAX_MS, COMMIT_LEASE_MS << min(token - 1, 16))


def consumed_event(message: SegmentConsumed) -> Consumed:
    return Consumed(message.instance, message.at, message.reason)


def transition_table() -> str:
    """The table as Markdown, for the documentation."""
    head = ("rule", "state", "event", "guard", "answer", "next state")
    lines = [head, ("---",) * len(head), *TRANSITIONS]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
