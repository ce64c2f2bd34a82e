# SPDX-License-Identifier: Apache-2.0
"""The server's half of completing one segment: what to do next, given what is known (segment completion design).

Rules:

- The controller decides the cut; a replica only asks, and only with a closed position. What it answered is kept here
  and forgotten at any doubt: asking again is always safe.
- Built rows are installed only when the metadata (or COMMIT_SUCCESS) vouches for their checksum. Other content than the
  metadata says is never served: it is dropped, loudly, and the segment is fetched.
- A replica keeps asking until the segment is DONE, so that it takes over when the committer's lease lapses.
- Consumption never waits for any of this.

    nothing --criterion--> ask --COMMIT--> build --> commit --COMMIT_SUCCESS--> install
                            | --KEEP, HOLD with the cut --> build --> (DONE, same checksum) --> install
                            | --CATCH_UP-> read on, ask again
                            | --HOLD without a cut, no answer --> ask again, later
    DONE and far behind, or other content --> fetch --> install
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus
from cremant.segment.build import Built
from cremant.segment.cuts import Cut, reached
from cremant.wire.messages import CommitEndReply, CompletionStatus, SegmentConsumedReply

#: Between questions about a segment whose cut is not ours to make.
ASK_AGAIN_MS = 500
#: A replica behind the cut of a DONE segment reads on this long before it fetches the segment instead.
CATCH_UP_MS = 3_000


class StepKind(StrEnum):
    NOTHING = "nothing"
    ASK = "ask"
    BUILD = "build"
    COMMIT = "commit"
    INSTALL = "install"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class Step:
    """`cut` with ASK, `end` with BUILD and COMMIT, `token` with COMMIT."""

    kind: StepKind
    cut: Cut | None = None
    end: Position | None = None
    token: int = 0


NOTHING = Step(StepKind.NOTHING)


@dataclass(slots=True)
class Sealing:
    """What one replica knows about the completion of one segment."""

    segment: str
    answer: SegmentConsumedReply | None = None
    built: Built | None = None
    built_end: Position | None = None
    #: COMMIT_SUCCESS was heard for what we built: no need to wait for the view.
    committed: bool = False
    #: Our rows are not what the metadata says.
    diverged: bool = False
    ask_after_ms: int = 0
    done_since_ms: int | None = None

    def next_step(self, metadata: SegmentMetadata, closed: Position | None, wanted: Cut | None, now_ms: int) -> Step:
        """`metadata`: of this segment, as the view has it. `closed`: the last closed position of our tail, None when
        the tail does not hold the segment's first rows (any more) and never will."""
        if self.committed:
            return Step(StepKind.INSTALL)
        if metadata.status is SegmentStatus.DONE and metadata.end is not None:
            return self._when_done(metadata, metadata.end, closed, now_ms)
        return self._while_open(metadata, closed, wanted, now_ms) if closed is not None else NOTHING

    def _when_done(self, metadata: SegmentMetadata, end: Position, closed: Position | None, now_ms: int) -> Step:
        if self.done_since_ms is None:
            self.done_since_ms = now_ms
        if self.built is not None and self.built_end == end:
            if self.built.checksum == metadata.checksum:
                return Step(StepKind.INSTALL)
            self.diverged = True
        if self.diverged or closed is None:
            return Step(StepKind.FETCH)
        if reached(closed, end):
            return Step(StepKind.BUILD, end=end)
        if now_ms - self.done_since_ms >= CATCH_UP_MS and metadata.store_url is not None:
            return Step(StepKind.FETCH)
        return NOTHING

    def _while_open(self, metadata: SegmentMetadata, closed: Position, wanted: Cut | None, now_ms: int) -> Step:
        answer = self.answer
        if answer is not None and answer.end is not None and reached(closed, answer.end):
            # A decided cut never changes (I-1): whoever is there may build, whatever its part will be.
            ours = answer.status in (CompletionStatus.COMMIT, CompletionStatus.KEEP, CompletionStatus.HOLD)
            if ours and self.built_end != answer.end:
                return Step(StepKind.BUILD, end=answer.end)
            if answer.status is CompletionStatus.COMMIT:
                return Step(StepKind.COMMIT, end=answer.end, token=answer.token)
        if now_ms < self.ask_after_ms:
            return NOTHING
        end = answer.end if answer is not None and answer.end is not None else metadata.end
        if end is not None:
            # The cut is decided: asking makes sense once we are there.
            return Step(StepKind.ASK, cut=Cut(closed, "decided")) if reached(closed, end) else NOTHING
        return Step(StepKind.ASK, cut=wanted) if wanted is not None else NOTHING

    def answered(self, reply: SegmentConsumedReply, now_ms: int) -> None:
        self.answer = reply
        self.ask_after_ms = now_ms + ASK_AGAIN_MS

    def was_built(self, built: Built, end: Position) -> None:
        self.built, self.built_end = built, end

    def commit_answered(self, reply: CommitEndReply, now_ms: int) -> None:
        if reply.status is CompletionStatus.COMMIT_SUCCESS:
            self.committed = True
            return
        # Stale token, lapsed lease or a new leader: whoever commits now, asking again tells us our part.
        self.answer = None
        self.ask_after_ms = now_ms + ASK_AGAIN_MS

    def failed(self, retry_ms: int, now_ms: int) -> None:
        """A question, build or commit went wrong: everything heard is in doubt."""
        self.answer = None
        self.ask_after_ms = now_ms + retry_ms
