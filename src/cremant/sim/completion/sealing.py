# SPDX-License-Identifier: Apache-2.0
"""Sealing on a server, as `server/sealing.py` does it: the real machine of a replica, its steps in virtual time."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cremant.completion.replica import Sealing, Sight, Step, StepKind, UploadSeen
from cremant.model.completion import StorePolicy
from cremant.model.errors import CremantError, Unavailable
from cremant.model.limits import FETCHES_RUNNING_MAX
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import Built
from cremant.sim.completion.controller import Controller
from cremant.sim.completion.fetching import fetch
from cremant.sim.completion.uploads import Upload
from cremant.sim.completion.world import INCARNATION, TABLE, Killed, content_of
from cremant.sim.engine import Actor
from cremant.wire.messages import CommitEnd, CompletionStatus, SegmentConsumed

if TYPE_CHECKING:
    from cremant.sim.completion.process import Process


class Sealer:
    """Of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._id = process.id
        self._sealings: dict[str, Sealing] = {}
        self._attempts: dict[str, Upload] = {}
        self._fetching: set[str] = set()
        self._fetches = 0
        #: Segments with a step under way, fetches left out.
        self.busy: set[str] = set()

    def progress(self, segment: str) -> int:
        return self._sealings[segment].progress if segment in self._sealings else 0

    def hurry(self, segment: str) -> bool:
        """False: nothing of it is going on here."""
        if segment not in self._sealings:
            return False
        self._sealings[segment].hurry()
        return True

    def look(self) -> None:
        unsealed = [
            one.metadata for one in self._process.hosted.values() if one.metadata.name not in self._process.disk
        ]
        opened = [one for one in self._process.opened.values() if one.name not in self._process.hosted]
        for metadata in (*unsealed, *opened):
            name = metadata.name
            sealing = self._sealings.setdefault(name, Sealing(name, safeguards=self._world.guards.machines))
            if name in self.busy:
                continue
            step = sealing.next_step(self._seen(metadata, sealing), self._world.now_ms)
            self._world.took("replica", step.kind, step.rule)
            if step.kind is not StepKind.NOTHING:
                running = self._fetching if step.kind is StepKind.FETCH else self.busy
                running.add(name)
                self._world.spawn(self._run(metadata, step, sealing, running), 1)

    def _seen(self, metadata: SegmentMetadata, sealing: Sealing) -> Sight:
        tail, config = self._process.tails.get(metadata.partition), self._process.record.config
        closed = wanted = None
        if tail is not None and tail.first_offset <= metadata.start_offset:
            closed = tail.closings.last
            if metadata.status is SegmentStatus.IN_PROGRESS:
                age_ms = self._process.cluster_now_ms - metadata.created_ms
                wanted = tail.closings.wanted_cut(
                    metadata.start_offset, config.flush, age_ms, force_at_offset=metadata.force_at_offset
                )
        upload = self._attempts.get(metadata.name)
        seen = None
        if upload is not None:
            if not upload.ended:
                sealing.uploading.step()
            seen = UploadSeen(upload.url, upload.error, upload.hurried)
        return Sight(
            metadata, closed, wanted, self._process.policy, config.completion, seen,
            has_source=metadata.store_url is not None or any(holder != self._id for holder in metadata.copies),
            fetching=metadata.name in self._fetching,
        )  # fmt: skip

    def _run(self, metadata: SegmentMetadata, step: Step, sealing: Sealing, running: set[str]) -> Actor:
        world, name = self._world, metadata.name
        try:
            yield from self._act(metadata, step, sealing)
            if name in self._process.hosted:
                self._process.hosted[name].error = None
        except Killed:
            return
        except CremantError as error:
            world.note(f"{self._id}: {step.kind} of {name} fails: {error}")
            sealing.failed(step.kind, world.trouble.choice((250, 1_000, 5_000)), world.now_ms)
            if name in self._process.hosted:
                self._process.hosted[name].error = str(error)
        running.discard(name)

    def _act(self, metadata: SegmentMetadata, step: Step, sealing: Sealing) -> Actor:
        match step.kind:
            case StepKind.ASK:
                yield from self._ask(metadata, step, sealing)
            case StepKind.BUILD:
                yield from self._build(metadata, step, sealing)
            case StepKind.UPLOAD:
                self._upload(metadata, step, sealing)
            case StepKind.COMMIT:
                yield from self._commit(metadata, step, sealing)
            case StepKind.INSTALL:
                assert sealing.built is not None
                assert sealing.built_end is not None
                self._install(metadata, sealing.built.checksum, sealing.built_end)
            case _:
                while self._fetches >= FETCHES_RUNNING_MAX:
                    yield from self._process.rests(100)
                content = yield from self._fetch(metadata)
                assert metadata.end is not None
                self._install(metadata, content, metadata.end)

    def _fetch(self, metadata: SegmentMetadata) -> Generator[int, None, str]:
        self._fetches += 1
        try:
            return (yield from fetch(self._process, metadata))
        finally:
            self._fetches -= 1

    def _ask(self, metadata: SegmentMetadata, step: Step, sealing: Sealing) -> Actor:
        assert step.cut is not None
        message = SegmentConsumed(
            instance=self._id, table=TABLE, incarnation=INCARNATION, segment=metadata.name, at=step.cut.at,
            reason=step.cut.reason,
        )  # fmt: skip
        reply = yield from self._process.say(lambda controller: controller.commits.consumed(message))
        if reply.status is CompletionStatus.COMMIT:
            self._world.observers.told_to_commit(metadata.name, reply.token, self._id)
        self._world.note(f"{self._id}: {metadata.name} at {step.cut.at.next_offset}: {reply.status} {reply.token}")
        sealing.answered(reply, self._world.now_ms)

    def _build(self, metadata: SegmentMetadata, step: Step, sealing: Sealing) -> Actor:
        world, end = self._world, step.end
        assert end is not None
        sealing.built = sealing.built_end = None
        sealing.building.begin()
        for _ in range(4):
            yield from self._process.rests(world.schedule.randint(1, world.build_ms))
            sealing.building.step()
        if self._process.server.full or world.chance(world.options.build_failure):
            world.happened.add("disk full")
            raise Unavailable("no space left on the disk")
        content = content_of(metadata, end.next_offset)
        if self._process.server.diverges or world.chance(world.options.divergence):
            content += f" as {self._id} has it"
        path = Path(metadata.name)
        rows = end.next_offset - metadata.start_offset
        sealing.was_built(Built(path, rows, len(content), content, content, {}, None, None, None), end)

    def _upload(self, metadata: SegmentMetadata, step: Step, sealing: Sealing) -> None:
        assert sealing.built is not None
        required = self._process.policy is StorePolicy.STORE_REQUIRED
        begun = self._process.uploads.begin(metadata.name, step.token, sealing.built.checksum, required=required)
        before = self._attempts.get(metadata.name)
        if before is not None and before is not begun:
            self._process.uploads.unnamed(before)
        self._attempts[metadata.name] = begun
        sealing.upload_began(step.token, self._world.now_ms)

    def _commit(self, metadata: SegmentMetadata, step: Step, sealing: Sealing) -> Actor:
        built, end, name = sealing.built, step.end, metadata.name
        assert built is not None
        assert end is not None
        upload = self._attempts.get(name)
        if upload is not None and step.store_state is StoreState.STORED and not self._process.uploads.claim(upload):
            del self._attempts[name]
            return
        if upload is not None and step.store_state is StoreState.PENDING and not upload.hurried:
            self._process.uploads.slow()
        message = CommitEnd(
            instance=self._id, table=TABLE, incarnation=INCARNATION, segment=name, token=step.token, end=end,
            rows=built.rows, size_bytes=built.size_bytes, checksum=built.checksum, file_checksum=built.file_checksum,
            store_state=step.store_state, store_url=step.store_url, store_error=step.store_error,
        )  # fmt: skip

        def deliver(controller: Controller) -> Any:
            reply = controller.commits.ended(message)
            if reply.status is CompletionStatus.COMMIT_SUCCESS and self._world.guards.persisted_first:
                self._world.observers.commit_accepted(message)
            return reply

        try:
            reply = yield from self._process.say(deliver)
        except Unavailable:
            self._world.happened.add("commit without an answer")
            raise
        self._world.note(f"{self._id}: commit of {name} with {step.token}, {step.store_state}: {reply.status}")
        sealing.commit_answered(reply, self._world.now_ms)
        upload = self._attempts.get(name)
        if upload is None or reply.status is CompletionStatus.NOT_LEADER:
            return
        del self._attempts[name]
        said_all = step.store_state in (StoreState.STORED, StoreState.FAILED)
        if reply.status is CompletionStatus.COMMIT_SUCCESS and said_all:
            self._process.uploads.named(upload)
        else:
            self._process.uploads.unnamed(upload)

    def _install(self, metadata: SegmentMetadata, content: str, end: Position) -> None:
        if metadata.name not in self._process.disk:
            self._process.install(metadata, content, end)
            self._sealings.pop(metadata.name, None)
