# SPDX-License-Identifier: Apache-2.0
"""Segment completion, the controller's half: one pure machine per segment.

Rules
- The durable state *is* the segment's metadata; the machine is made from it (`recover`) and changes nothing by itself:
  a step returns effects, and `Persist` must have succeeded before its `Reply` is sent (a lost compare-and-set: recover
  again and repeat the step).
- I-1: the first report decides the cut, in IN_PROGRESS -> COMMITTING; `end` never changes afterwards. Reports name
  closed positions only, so a row-limit cut is the same on every replica.
- I-2: one compare-and-set makes the segment DONE, opens the next exactly at `end` and moves the partition on.
- The committer holds a lease, renewed while it shows progress; when it lapsed, the next replica that is at the
  cut gets COMMIT for the same end under the next token. A token is given once; `CommitEnded` of an earlier one fails.
  Each further token's lease is twice as long, so a slow build cannot be taken over for ever.
- Every message may be late, doubled or reordered: answers are idempotent by token, and a stale one changes nothing.
- No timers here: servers repeat their reports, time is an argument.

Table (state, event, guard -> answer, next state): see TRANSITIONS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import msgspec

from cremant.model.cluster import PartitionRecord
from cremant.model.limits import COMMIT_LEASE_MAX_MS, COMMIT_LEASE_MS
from cremant.model.names import SegmentName
from cremant.model.offsets import Position
from cremant.model.segments import Copy, SegmentMetadata, SegmentStatus, StoreState
from cremant.wire.messages import CommitEnd, CompletionStatus, SegmentConsumed

# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Consumed:
    """A replica met a flush criterion; `at` is the closed position it could cut at."""

    instance: str
    at: Position


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """A committer sealed, verified and stored its segment."""

    message: CommitEnd


@dataclass(frozen=True, slots=True)
class CommitterProgressed:
    """A heartbeat shows that this replica's build or upload has come further since the last one."""

    instance: str


Event = Consumed | CommitEnded | CommitterProgressed

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
    """`token` and `end` are meaningful with COMMIT, CATCH_UP, KEEP and HOLD (once decided)."""

    status: CompletionStatus
    end: Position | None = None
    token: int = 0
    #: Row of TRANSITIONS that answered.
    rule: str = ""


Effect = Persist | RenewLease | Reply

# --- the table ----------------------------------------------------------------------------------------------------

#: (rule, state, event, guard, answer, next state)
TRANSITIONS: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("stranger", "any", "Consumed", "not a replica", "DISCARD", "same"),
    ("empty", "IN_PROGRESS", "Consumed", "nothing to cut", "HOLD", "same"),
    ("first-wins", "IN_PROGRESS", "Consumed", "a position past the start", "COMMIT", "COMMITTING"),
    ("commit-again", "COMMITTING", "Consumed", "the committer, at the cut", "COMMIT", "same, lease renewed"),
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
    ("renew", "COMMITTING", "CommitterProgressed", "the committer", "-", "same, lease renewed"),
    ("not-mine", "any", "CommitterProgressed", "anything else", "-", "same"),
)


class CompletionMachine:
    """Made from the durable record for each event; see the rules above."""

    def __init__(self, segment: SegmentMetadata, partition: PartitionRecord, lease_until_ms: int, table: str) -> None:
        self.segment = segment
        self.partition = partition
        self._lease_until_ms = lease_until_ms
        self._table = table

    @classmethod
    def recover(
        cls, table: str, segment: SegmentMetadata, partition: PartitionRecord, *, renewed_until_ms: int = 0
    ) -> CompletionMachine:
        """`renewed_until_ms`: the lease as renewed since (volatile), if later than the record's."""
        return cls(segment, partition, max(segment.lease_until_ms, renewed_until_ms), table)

    def step(self, event: Event, now_ms: int) -> list[Effect]:
        match event:
            case Consumed():
                return self._consumed(event, now_ms)
            case CommitEnded(message=message):
                return self._commit_ended(message, now_ms)
            case CommitterProgressed(instance=instance):
                return self._committer_progressed(instance, now_ms)
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
        decided = msgspec.structs.replace(
            self.segment, status=SegmentStatus.COMMITTING, end=event.at, end_offset=event.at.next_offset
        )
        return self._grant(decided, event.instance, now_ms, "first-wins")

    def _grant(self, segment: SegmentMetadata, instance: str, now_ms: int, rule: str) -> list[Effect]:
        token = segment.commit_token + 1
        until_ms = now_ms + lease_ms(token)
        granted = msgspec.structs.replace(segment, committer=instance, commit_token=token, lease_until_ms=until_ms)
        return [
            Persist(granted),
            RenewLease(until_ms),
            Reply(CompletionStatus.COMMIT, end=granted.end, token=token, rule=rule),
        ]

    def _while_committing(self, event: Consumed, now_ms: int) -> list[Effect]:
        end, token = self.segment.end, self.segment.commit_token
        assert end is not None
        if event.at.next_offset < end.next_offset:
            return [Reply(CompletionStatus.CATCH_UP, end=end, token=token, rule="catch-up")]
        if event.instance == self.segment.committer:
            return [
                RenewLease(now_ms + lease_ms(self.segment.commit_token)),
                Reply(CompletionStatus.COMMIT, end=end, token=token, rule="commit-again"),
            ]
        if self._lease_until_ms <= now_ms:
            return self._grant(self.segment, event.instance, now_ms, "take-over")
        return [Reply(CompletionStatus.HOLD, end=end, token=token, rule="wait")]

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
        if not in_force:
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
            last_indexed_ms=message.last_indexed_ms, columns=message.columns,
            store_state=StoreState.STORED if message.store_url else StoreState.NONE, store_url=message.store_url,
            copies={message.instance: Copy(checksum=message.checksum, verified_at_ms=now_ms)},
        )  # fmt: skip
        sequence = segment.sequence + 1
        name = str(SegmentName.new(self._table, segment.partition, sequence, now_ms))
        opened = SegmentMetadata(
            name=name, partition=segment.partition, sequence=sequence, status=SegmentStatus.IN_PROGRESS,
            start_offset=end.next_offset, start=end, created_ms=now_ms, replicas=self.partition.replicas,
            schema_version=segment.schema_version,
        )  # fmt: skip
        moved = msgspec.structs.replace(self.partition, consuming=name, sequence=sequence)
        return Persist(done, opened, moved)

    def _committer_progressed(self, instance: str, now_ms: int) -> list[Effect]:
        if self.segment.status is SegmentStatus.COMMITTING and instance == self.segment.committer:
            return [RenewLease(now_ms + lease_ms(self.segment.commit_token))]
        return []


def lease_ms(token: int) -> int:
    """Length of the lease that comes with the n-th token of a segment."""
    return min(COMMIT_LEASE_MAX_MS, COMMIT_LEASE_MS << min(token - 1, 16))


def consumed_event(message: SegmentConsumed) -> Consumed:
    return Consumed(message.instance, message.at)


def transition_table() -> str:
    """The table as Markdown, for the documentation."""
    head = ("rule", "state", "event", "guard", "answer", "next state")
    lines = [head, ("---",) * len(head), *TRANSITIONS]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
