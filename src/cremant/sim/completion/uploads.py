# SPDX-License-Identifier: Apache-2.0
"""A server's uploads, as `server/uploads.py` does them: the real breaker and the real messages, in virtual time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cremant.completion.breaker import Breaker, BreakerState
from cremant.model.completion import StorePolicy
from cremant.model.errors import CremantError, StoreFailed, Unavailable
from cremant.model.limits import STORE_CALL_MS, UPLOADS_RUNNING_MAX
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.sim.completion.world import INCARNATION, TABLE
from cremant.sim.engine import Actor
from cremant.store.deepstore import segment_object
from cremant.wire.messages import CompletionStatus, SegmentStored, SegmentStoredReply

if TYPE_CHECKING:
    from cremant.sim.completion.process import Process

_COMMIT_COMES_FIRST_MS = 30_000
_DAMAGED = "the local file is damaged"


@dataclass(slots=True, eq=False)
class Upload:
    segment: str
    name: str
    content: str
    url: str | None = None
    error: str | None = None
    hurried: bool = False
    ended: bool = False
    claimed: bool = False
    report_at_ms: float = math.inf
    reporting: bool = False


class Uploads:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._uploads: dict[str, Upload] = {}
        self._retry_at_ms: dict[str, int] = {}
        self._breaker = Breaker()
        self._running = 0

    # --- breaker, with every transition noted ---

    def _noted(self, event: str, before: BreakerState, after: str) -> None:
        self._world.took("breaker", f"{before} {event}", after)

    def _admits(self) -> bool:
        before = self._breaker.state
        admitted = self._breaker.admit(self._world.now_ms)
        if before is not BreakerState.CLOSED:
            word = "admitted" if admitted else "refused"
            self._noted("admit", before, f"{self._breaker.state} {word}")
        return admitted

    def _failed(self, cause: str) -> None:
        before = self._breaker.state
        self._breaker.failed(self._world.now_ms, cause)
        self._noted("failed", before, self._breaker.state)

    def _succeeded(self) -> None:
        self._noted("succeeded", self._breaker.state, BreakerState.CLOSED)
        self._breaker.succeeded()

    def slow(self) -> None:
        self._failed("an upload took too long")

    # --- for commits and repairs ---

    def begin(self, segment: str, token: int, content: str, *, required: bool) -> Upload:
        """The upload of this content for this attempt; the one that is under way, if there is one."""
        file_checksum = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        name = segment_object(TABLE, INCARNATION, segment, token, file_checksum)
        if not self._world.guards.names_say_content:
            name = f"{segment}.parquet"
        known = self._uploads.get(name)
        if known is not None and not (known.ended and known.error is not None):
            return known
        made = Upload(segment, name, content, hurried=self._breaker.state is not BreakerState.CLOSED)
        if not self._admits() and not required:
            made.error, made.ended = "the deep store has failed again and again", True
            return made
        self._uploads[name] = made
        self._world.spawn(self._process.while_alive(self._put(made)), 1)
        return made

    def claim(self, upload: Upload) -> bool:
        upload.claimed = self._uploads.get(upload.name) is upload
        return upload.claimed

    def named(self, upload: Upload) -> None:
        self._uploads.pop(upload.name, None)

    def unnamed(self, upload: Upload) -> None:
        upload.claimed, upload.report_at_ms = False, 0

    # --- in the background ---

    def _put(self, upload: Upload) -> Actor:
        while self._running >= UPLOADS_RUNNING_MAX:
            yield from self._process.rests(100)
        store = self._world.store
        self._running, store.running = self._running + 1, store.running + 1
        store.running_max = max(store.running_max, store.running)
        try:
            yield from self._put_now(upload)
        finally:
            self._running, store.running = self._running - 1, store.running - 1

    def _put_now(self, upload: Upload) -> Actor:
        world, store = self._world, self._world.store
        if upload.segment in self._process.server.rotten:
            self._process.doubt(upload.segment)
            self._ended(upload, None, _DAMAGED)
            return
        began_ms = world.now_ms
        while store.mode == "hanging" and world.now_ms - began_ms < STORE_CALL_MS:
            yield 500
        if store.mode == "failing":
            yield from self._process.rests(20)
            self._ended(upload, None, "the store refuses")
            return
        yield world.schedule.randint(2_000, 9_000) if store.mode == "slow" else world.schedule.randint(5, 300)
        late = store.mode == "hanging" or world.now_ms - began_ms > 2 * STORE_CALL_MS
        if late:
            world.spawn(self._lands_late(upload), world.schedule.randint(1_000, 60_000))
        else:
            self._write(upload)
        if not self._process.lives:
            return
        yield from self._process.rests(1)
        if late:
            self._ended(upload, None, "the deadline passed")
        else:
            self._ended(upload, f"s3://{upload.name}", None)

    def _lands_late(self, upload: Upload) -> Actor:
        """It was given up, and comes into the store all the same."""
        while self._world.store.mode == "hanging":
            yield 1_000
        self._write(upload)
        self._world.note(f"{self._process.id}: {upload.name} lands late")
        self._world.happened.add("an object landed late")

    def _write(self, upload: Upload) -> None:
        url = f"s3://{upload.name}"
        store = self._world.store
        store.objects.put(url, upload.content)
        store.written_ms[url] = self._world.now_ms

    def _ended(self, upload: Upload, url: str | None, error: str | None) -> None:
        world = self._world
        upload.url, upload.error, upload.ended = url, error, True
        world.happened.add("uploaded" if error is None else "upload failed")
        upload.report_at_ms = min(upload.report_at_ms, world.now_ms + _COMMIT_COMES_FIRST_MS)
        if error is None:
            self._succeeded()
        else:
            self._failed(error)
            self._retry_at_ms[upload.segment] = world.now_ms + world.trouble.choice((500, 3_000, 15_000))

    def look(self) -> None:
        """Reports what ended, begins what is due."""
        world = self._world
        for upload in [u for u in self._uploads.values() if u.ended and u.report_at_ms <= world.now_ms]:
            if not upload.reporting:
                upload.reporting = True
                world.spawn(self._process.while_alive(self._settle(upload)), 1)
        if self._process.policy is StorePolicy.PEERS_ONLY:
            return
        busy = {upload.segment for upload in self._uploads.values()}
        for metadata in self._process.hosted_metadata():
            due = self._retry_at_ms.get(metadata.name, 0) <= world.now_ms
            if due and metadata.name not in busy and self._lacks_object(metadata) and self._admits():
                content = self._process.disk[metadata.name]
                self.unnamed(self.begin(metadata.name, metadata.commit_token, content, required=True))

    def _lacks_object(self, metadata: SegmentMetadata) -> bool:
        return (
            metadata.store_state in (StoreState.PENDING, StoreState.FAILED)
            and metadata.committer == self._process.id
            and metadata.status is SegmentStatus.DONE
            and metadata.name in self._process.disk
        )

    def _settle(self, upload: Upload) -> Actor:
        try:
            reply = yield from self.report(upload)
        except CremantError:
            reply = None
        upload.reporting = False
        if reply is None or reply.status in (CompletionStatus.HOLD, CompletionStatus.NOT_LEADER):
            upload.report_at_ms = self._world.now_ms + self._world.trouble.choice((500, 3_000, 15_000))

    def report(self, upload: Upload) -> Generator[int, None, SegmentStoredReply]:
        message = SegmentStored(
            instance=self._process.id, table=TABLE, incarnation=INCARNATION, segment=upload.segment,
            checksum=upload.content, file_checksum=upload.content, url=upload.url, error=upload.error,
        )  # fmt: skip
        reply = yield from self._process.say(lambda controller: controller.commits.stored(message))
        if reply.status is CompletionStatus.KEEP:
            self._forget(upload)
        elif reply.status not in (CompletionStatus.HOLD, CompletionStatus.NOT_LEADER) and not upload.claimed:
            self._forget(upload)
            if upload.url is not None and upload.url != reply.store_url:
                self._world.store.objects.remove(upload.url)
        return reply

    def _forget(self, upload: Upload) -> None:
        self._uploads.pop(upload.name, None)
        self._retry_at_ms[upload.segment] = self._world.now_ms + _COMMIT_COMES_FIRST_MS

    def upload_now(self, metadata: SegmentMetadata) -> Actor:
        """As the controller's repair orders it. Raises CremantError."""
        content = self._process.disk[metadata.name]
        upload = self.begin(metadata.name, metadata.commit_token, content, required=True)
        for _ in range(100):
            if upload.ended:
                break
            yield from self._process.rests(1_000)
        if not upload.ended:
            self.unnamed(upload)
            raise StoreFailed("the upload takes long")
        reply = yield from self.report(upload)
        if upload.error is not None:
            raise Unavailable(upload.error) if upload.error == _DAMAGED else StoreFailed(upload.error)
        if reply.store_url is None:
            raise Unavailable("the controller does not want it")
