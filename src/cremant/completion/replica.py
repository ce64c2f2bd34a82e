# SPDX-License-Identifier: Apache-2.0
"""Segment completion, a replica's half: what to do next about one segment, given what is seen. Pure.

Rules

- The controller decides the cut; a replica only asks, and only with a closed position. What it answered is kept here
  and forgotten at any doubt: asking again is always safe.
- Rows that were built under another schema or config than the committed ones are built again, in the committed form.
- Built rows are installed only when the metadata (or COMMIT_SUCCESS) vouches for their checksum. Other content than the
  metadata says is never served: it is dropped, loudly, and the segment is fetched.
- A replica keeps asking until the segment is DONE, so that it takes over when the committer's lease lapses.
- What a commit waits for is the table's policy at that moment: the upload (STORE_REQUIRED), the upload for a while
  (STORE_BEST_EFFORT; not at all when the store is known to be down), nothing (PEERS_ONLY).
- Once the segment is DONE, a replica builds it from its own rows, or fetches it, whichever works first; in DOWNLOAD
  mode it fetches, and builds only when fetching fails and fails. There is no deadline for reading on.
- Consumption never waits for any of this.

Table (what is seen, guard -> step): see TRANSITIONS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cremant.completion.safeguards import ALL, Safeguards
from cremant.model.completion import CompletionConfig, CompletionMode, StorePolicy
from cremant.model.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import Built
from cremant.segment.cuts import Cut, reached
from cremant.wire.messages import CommitEndReply, CompletionStatus, SegmentConsumedReply

_AS_WRITTEN_BY_NOBODY = CompletionConfig()
#: Between questions about a segment whose cut is not ours to make.
ASK_AGAIN_MS = 500
#: A replica behind the cut of a DONE segment reads on this long before it fetches the segment beside.
CATCH_UP_MS = 3_000
#: Builds in a row that failed on something that time does not mend, before the replica says that it is in ERROR.
BUILDS_BEFORE_ERROR = 3
#: In DOWNLOAD mode a replica that has the rows builds them after so many fetches that failed.
FETCHES_BEFORE_BUILD = 3


class StepKind(StrEnum):
    NOTHING = "nothing"
    ASK = "ask"
    BUILD = "build"
    UPLOAD = "upload"
    COMMIT = "commit"
    INSTALL = "install"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class Step:
    """`cut` with ASK; `end` with BUILD, UPLOAD and COMMIT; `token` with the latter two; what to say of the store with
    COMMIT. `rule`: row of TRANSITIONS."""

    kind: StepKind
    rule: str
    cut: Cut | None = None
    end: Position | None = None
    token: int = 0
    store_state: StoreState = StoreState.NONE
    store_url: str | None = None
    store_error: str | None = None


@dataclass(frozen=True, slots=True)
class UploadSeen:
    """The upload of the attempt in force. `hurried`: the store is not known to work, no commit should wait."""

    url: str | None = None
    error: str | None = None
    hurried: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """What the driver sees. `metadata`: of this segment, as the view has it. `closed`: the last closed position of our
    tail, None when the tail does not hold the segment's first rows (any more) and never will. `wanted`: the cut that a
    criterion asks for. `has_source`: the store or another server may have the sealed segment. `fetching`: we are at
    it."""

    metadata: SegmentMetadata
    closed: Position | None = None
    wanted: Cut | None = None
    policy: StorePolicy = StorePolicy.STORE_REQUIRED
    completion: CompletionConfig = _AS_WRITTEN_BY_NOBODY
    upload: UploadSeen | None = None
    has_source: bool = False
    fetching: bool = False


#: (rule, status seen, guard, step)
TRANSITIONS: tuple[tuple[str, str, str, str], ...] = (
    ("committed", "any", "COMMIT_SUCCESS was heard", "INSTALL"),
    ("same", "DONE", "built, and it is the committed content", "INSTALL"),
    ("differs", "DONE", "built in the committed form, and it is other content", "FETCH, loudly"),
    ("compacted", "DONE", "others have let go of rows that the tail still has", "FETCH"),
    ("no-rows", "DONE", "the tail does not reach back to the segment's start", "FETCH"),
    ("download", "DONE", "DOWNLOAD mode, and somebody may have it", "FETCH"),
    ("own-rows", "DONE", "own rows reach the cut; in DOWNLOAD mode after fetches that failed", "BUILD"),
    ("cannot-build", "DONE", "own rows reach the cut, a build failed a moment ago, somebody may have it", "FETCH"),
    ("far-behind", "DONE", "own rows have not reached the cut for a while, somebody may have it", "FETCH, reading on"),
    ("reading-on", "DONE", "else", "NOTHING"),
    ("no-part", "open", "the tail does not reach back to the segment's start", "NOTHING"),
    ("build", "open", "at the cut; told COMMIT, or KEEP or HOLD in DEFAULT mode", "BUILD"),
    ("peers", "open", "told COMMIT, built, PEERS_ONLY", "COMMIT with NONE"),
    ("upload", "open", "told COMMIT, built, the store is wanted", "UPLOAD"),
    ("uploading", "open", "the upload runs; STORE_REQUIRED, or not for too long", "NOTHING"),
    ("stored", "open", "the upload landed", "COMMIT with STORED"),
    ("pending", "open", "STORE_BEST_EFFORT, the upload takes too long or the store is not known to work",
     "COMMIT with PENDING"),
    ("not-stored", "open", "STORE_BEST_EFFORT, the upload failed", "COMMIT with FAILED"),
    ("store-down", "open", "STORE_REQUIRED, the upload failed a moment ago", "NOTHING"),
    ("upload-again", "open", "STORE_REQUIRED, the upload failed a while ago", "UPLOAD"),
    ("ask", "open", "a criterion is met, and no cut is decided", "ASK"),
    ("ask-again", "open", "a cut is decided, and own rows reach it", "ASK"),
    ("wait", "open", "else", "NOTHING"),
)  # fmt: skip


class Effort:
    """Progress that keeps a lease: an attempt that fails where an earlier one failed adds nothing to it."""

    def __init__(self) -> None:
        self.furthest = 0
        self._steps = 0

    def begin(self) -> None:
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        self.furthest = max(self.furthest, self._steps)


@dataclass(slots=True)
class Sealing:
    """What one replica knows about the completion of one segment."""

    segment: str
    answer: SegmentConsumedReply | None = None
    built: Built | None = None
    built_end: Position | None = None
    #: In the form of the metadata, not as we thought that it would be committed.
    built_as_committed: bool = False
    #: COMMIT_SUCCESS was heard for what we built: no need to wait for the view.
    committed: bool = False
    #: Our rows are not what the metadata says.
    diverged: bool = False
    #: Of the attempt that we were told to commit last.
    token: int = 0
    #: Token whose upload was begun, when, how often it failed, and when it is tried again.
    upload_token: int | None = None
    upload_since_ms: int = 0
    upload_failures: int = 0
    upload_after_ms: int | None = None
    building: Effort = field(default_factory=Effort)
    uploading: Effort = field(default_factory=Effort)
    ask_after_ms: int = 0
    build_after_ms: int = 0
    build_failures: int = 0
    fetch_after_ms: int = 0
    fetch_failures: int = 0
    done_since_ms: int | None = None
    #: When the first report was due, the cut was heard of, and own rows were seen to reach it; to tell what takes long.
    asked_ms: int | None = None
    decided_ms: int | None = None
    reached_ms: int | None = None
    safeguards: Safeguards = ALL

    @property
    def progress(self) -> int:
        """For the heartbeat: any other number than before renews the committer's lease."""
        return self.building.furthest + self.uploading.furthest

    @property
    def broken(self) -> bool:
        """Our rows cannot be built. It is tried on; others commit, and then it is fetched."""
        return self.build_failures >= BUILDS_BEFORE_ERROR

    @property
    def commits(self) -> bool:
        """We were told to commit it: others wait for what we do."""
        return self.answer is not None and self.answer.status is CompletionStatus.COMMIT

    def next_step(self, seen: Sight, now_ms: int) -> Step:
        step = self._next_step(seen, now_ms)
        if step.kind is StepKind.ASK and self.asked_ms is None:
            self.asked_ms = now_ms
        if step.kind is StepKind.BUILD and self.reached_ms is None:
            self.reached_ms = now_ms
        return step

    def _next_step(self, seen: Sight, now_ms: int) -> Step:
        if self.committed:
            return Step(StepKind.INSTALL, "committed")
        if seen.metadata.status is SegmentStatus.DONE and seen.metadata.end is not None:
            return self._when_done(seen, seen.metadata.end, now_ms)
        if seen.closed is None:
            return Step(StepKind.NOTHING, "no-part")
        return self._while_open(seen, seen.closed, now_ms)

    # --- DONE -----------------------------------------------------------------------------------------------------

    def _when_done(self, seen: Sight, end: Position, now_ms: int) -> Step:
        if self.done_since_ms is None:
            self.done_since_ms = now_ms
        if self.built is not None and self.built_end == end:
            if self.built.checksum == seen.metadata.checksum or not self.safeguards.content_compared:
                return Step(StepKind.INSTALL, "same")
            # Schema or config changed around the commit: the same rows are built once more, in the committed form.
            same_rows = self.built_as_committed or self.built.form == seen.metadata.form
            self.diverged = same_rows and not seen.metadata.compacted_at
        may_fetch = not seen.fetching and now_ms >= self.fetch_after_ms
        if self.diverged or seen.closed is None or seen.metadata.compacted_at:
            rule = "differs" if self.diverged else "compacted" if seen.metadata.compacted_at else "no-rows"
            return Step(StepKind.FETCH, rule) if may_fetch else Step(StepKind.NOTHING, "reading-on")
        downloads = seen.completion.mode is CompletionMode.DOWNLOAD and seen.has_source
        if downloads and may_fetch:
            return Step(StepKind.FETCH, "download")
        if reached(seen.closed, end) and not (downloads and self.fetch_failures < FETCHES_BEFORE_BUILD):
            if now_ms >= self.build_after_ms:
                return Step(StepKind.BUILD, "own-rows", end=end)
            if seen.has_source and may_fetch:
                return Step(StepKind.FETCH, "cannot-build")
        elif seen.has_source and may_fetch and now_ms - self.done_since_ms >= CATCH_UP_MS:
            return Step(StepKind.FETCH, "far-behind")
        return Step(StepKind.NOTHING, "reading-on")

    # --- open -----------------------------------------------------------------------------------------------------

    def _while_open(self, seen: Sight, closed: Position, now_ms: int) -> Step:
        answer = self.answer
        if answer is not None and answer.end is not None and reached(closed, answer.end):
            # A decided cut never changes (I-1): whoever is there may build, whatever its part will be.
            builds = answer.status is CompletionStatus.COMMIT or (
                answer.status in (CompletionStatus.KEEP, CompletionStatus.HOLD)
                and seen.completion.mode is CompletionMode.DEFAULT
            )
            if builds and self.built_end != answer.end and now_ms >= self.build_after_ms:
                return Step(StepKind.BUILD, "build", end=answer.end)
            if answer.status is CompletionStatus.COMMIT and self.built_end == answer.end:
                return self._commit(seen, answer.end, answer.token, now_ms)
        if now_ms < self.ask_after_ms:
            return Step(StepKind.NOTHING, "wait")
        end = answer.end if answer is not None and answer.end is not None else seen.metadata.end
        if end is not None:
            # The cut is decided: asking makes sense once we are there.
            if reached(closed, end):
                return Step(StepKind.ASK, "ask-again", cut=Cut(closed, "decided"))
        elif seen.wanted is not None:
            return Step(StepKind.ASK, "ask", cut=seen.wanted)
        return Step(StepKind.NOTHING, "wait")

    def _commit(self, seen: Sight, end: Position, token: int, now_ms: int) -> Step:
        if seen.policy is StorePolicy.PEERS_ONLY:
            return Step(StepKind.COMMIT, "peers", end=end, token=token)
        upload = seen.upload
        if upload is None or self.upload_token != token:
            return Step(StepKind.UPLOAD, "upload", end=end, token=token)
        if upload.url is not None:
            return Step(
                StepKind.COMMIT, "stored", end=end, token=token, store_state=StoreState.STORED, store_url=upload.url
            )
        if seen.policy is StorePolicy.STORE_REQUIRED and self.safeguards.upload_awaited:
            return self._until_stored(upload, end, token, now_ms)
        if upload.error is not None:
            return Step(
                StepKind.COMMIT, "not-stored", end=end, token=token, store_state=StoreState.FAILED,
                store_error=upload.error,
            )  # fmt: skip
        if upload.hurried or now_ms - self.upload_since_ms >= seen.completion.upload_wait_ms:
            return Step(StepKind.COMMIT, "pending", end=end, token=token, store_state=StoreState.PENDING)
        return Step(StepKind.NOTHING, "uploading")

    def _until_stored(self, upload: UploadSeen, end: Position, token: int, now_ms: int) -> Step:
        if upload.error is None:
            return Step(StepKind.NOTHING, "uploading")
        if self.upload_after_ms is None:
            self.upload_after_ms = now_ms + min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS << min(self.upload_failures, 16))
            self.upload_failures += 1
        if now_ms < self.upload_after_ms:
            return Step(StepKind.NOTHING, "store-down")
        return Step(StepKind.UPLOAD, "upload-again", end=end, token=token)

    # --- what happened --------------------------------------------------------------------------------------------

    def answered(self, reply: SegmentConsumedReply, now_ms: int) -> None:
        if reply.status is CompletionStatus.COMMIT and self.token != reply.token:
            # Another attempt, another lease: what was done before counts anew.
            self.token, self.building, self.uploading = reply.token, Effort(), Effort()
        if reply.end is not None and self.decided_ms is None:
            self.decided_ms = now_ms
        self.answer = reply
        self.ask_after_ms = now_ms + ASK_AGAIN_MS

    def was_built(self, built: Built, end: Position, *, as_committed: bool = False) -> None:
        self.built, self.built_end, self.built_as_committed = built, end, as_committed
        self.build_failures = 0

    def upload_began(self, token: int, now_ms: int) -> None:
        if token != self.upload_token:
            self.upload_token, self.upload_since_ms, self.upload_failures = token, now_ms, 0
        self.upload_after_ms = None
        self.uploading.begin()

    def commit_answered(self, reply: CommitEndReply, now_ms: int) -> None:
        if reply.status is CompletionStatus.COMMIT_SUCCESS:
            self.committed = True
            return
        # Stale token, lapsed lease or a new leader: whoever commits now, asking again tells us our part.
        self.answer = None
        self.ask_after_ms = now_ms + ASK_AGAIN_MS

    def failed(self, kind: StepKind, retry_ms: int, now_ms: int, *, passing: bool = True) -> None:
        """A step went wrong. A fetch says nothing about the others; else everything heard is in doubt. `passing`: what
        is in its way is the world (a full disk, a peer), not these rows."""
        after_ms = now_ms + retry_ms
        if kind is StepKind.FETCH:
            self.fetch_failures += 1
            self.fetch_after_ms = after_ms
            return
        if kind is StepKind.INSTALL:  # its files are in an unknown state
            self.built = self.built_end = None
            self.committed = False
        if kind in (StepKind.BUILD, StepKind.INSTALL):
            self.build_after_ms = after_ms
            self.build_failures += not passing
        self.answer = None
        self.ask_after_ms = after_ms

    def hurry(self) -> None:
        """An operator wants no waiting for retries."""
        self.ask_after_ms = self.build_after_ms = self.fetch_after_ms = self.build_failures = 0


def transition_table() -> str:
    """The table as Markdown, for the documentation."""
    head = ("rule", "status", "guard", "step")
    lines = [head, ("---",) * len(head), *TRANSITIONS]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
