# SPDX-License-Identifier: Apache-2.0
"""Commits and uploads on a server, with the controller's own machine and a real store that can be held or broken."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cremant.cluster.partitions import open_partition
from cremant.completion.breaker import BreakerState
from cremant.completion.segment import CommitEnded, CompletionMachine, Persist, Reply, Stored, consumed_event
from cremant.log.memory import MemoryLog
from cremant.model.completion import CompletionConfig, StorePolicy
from cremant.model.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    NoResource,
    NotFound,
    StoreFailed,
    Unavailable,
)
from cremant.model.limits import BREAKER_FAILURES
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.build import PARQUET_FILE
from cremant.segment.tail import SpillQuota
from cremant.server import uploads as uploads_module
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.metrics import ServerMetrics
from cremant.server.partition import Partition, PartitionId
from cremant.server.peers import PeerService
from cremant.server.sealing import Sealer
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.upload import UploadCause
from cremant.server.uploads import Uploads
from cremant.shell.journal import Journal
from cremant.store.deepstore import DirectoryStore
from cremant.wire.messages import (
    CommitEnd,
    CommitEndReply,
    CompletionStatus,
    SegmentConsumed,
    SegmentConsumedReply,
    SegmentStored,
    SegmentStoredReply,
)

REQUIRED, BEST_EFFORT, PEERS_ONLY = StorePolicy
INCARNATION = "00000000000000aa"


class HeldStore(DirectoryStore):
    """A directory whose uploads wait while `open` is not set, and fail while `broken`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.broken = ""
        self.puts = 0

    def put(self, name: str, source: Path) -> str:
        self.puts += 1
        assert self.open.wait(60), "a test forgot to open the store"
        if self.broken:
            raise Unavailable(self.broken)
        return super().put(name, source)


class Controller:
    """One partition's records, changed by the controller's machine alone."""

    id = "me"

    def __init__(self, replicas: tuple[str, ...]) -> None:
        self.partition, segment = open_partition("trips", 0, 0, replicas, 0)
        self.segments = {segment.name: segment}

    def call(self, path: str, message: Any, reply_type: type[Any], timeout_ms: int = 0) -> Any:
        match message:
            case SegmentConsumed():
                reply = self.step(message.segment, consumed_event(message))
                return SegmentConsumedReply(status=reply.status, end=reply.end, token=reply.token)
            case CommitEnd():
                return CommitEndReply(status=self.step(message.segment, CommitEnded(message)).status)
            case SegmentStored() if message.segment not in self.segments:  # of a table that was dropped
                return SegmentStoredReply(status=CompletionStatus.DISCARD, store_url=None)
            case SegmentStored():
                reply = self.step(message.segment, Stored(message))
                return SegmentStoredReply(status=reply.status, store_url=reply.store_url)
        raise AssertionError(path)

    def step(self, segment: str, event: Any, now_ms: int = 0) -> Reply:
        replied: Reply | None = None
        machine = CompletionMachine.recover("trips", self.segments[segment], self.partition, renewed_until_ms=1)
        for effect in machine.step(event, now_ms):
            if isinstance(effect, Persist):
                self.segments[effect.segment.name] = effect.segment
                if effect.next_segment is not None and effect.partition is not None:
                    self.segments[effect.next_segment.name] = effect.next_segment
                    self.partition = effect.partition
            elif isinstance(effect, Reply):
                replied = effect
        assert replied is not None
        return replied

    def poke(self) -> None:
        pass

    def cluster_now_ms(self) -> int:
        return int(time.time() * 1000)


class World:
    """A server that replicates one partition; `look` is a turn of everything that looks, the view included."""

    def __init__(self, kit: Any, root: Path, policy: StorePolicy, *, wait_ms: int = 200) -> None:
        self.kit = kit
        self.log = MemoryLog(lambda: int(time.time() * 1000))
        self.epochs = kit.EpochLog(self.log).create()
        self.files = ServerFiles(root / "server")
        self.store = HeldStore(root / "store")
        self.controller = Controller(("me", "other"))
        self.table = HostedTable(kit.table_record(100))
        self.set_policy(policy, wait_ms=wait_ms)
        own = PartitionId("trips", INCARNATION, 0)
        self.partition = Partition(own, kit.START, self.files.tail_directory(own), SpillQuota())
        self.table.partitions[0] = self.partition
        tables, member = {"trips": self.table}, self._member()
        self.uploads = Uploads(tables, self.files, self.store, member, has_store=True)
        fetcher = SegmentFetcher("me", self.store, lambda: None, fsync=False)
        self.sealer = Sealer(tables, self.files, member, fetcher, self.uploads, fsync=False)

    def _member(self) -> Any:
        return self.controller

    def set_policy(self, policy: StorePolicy, *, wait_ms: int = 200) -> None:
        completion = CompletionConfig(store_policy=policy, upload_wait_ms=wait_ms, peer_scheme="http")
        record = self.table.record
        config = msgspec.structs.replace(record.config, replication=2, completion=completion)
        self.table.update(msgspec.structs.replace(record, config=config))

    def write(self, rows: int = 100) -> None:
        self.epochs.write(rows)
        while self.partition.turn(self.log, int(time.time() * 1000)):
            pass

    def look(self) -> None:
        with self.table.lock:
            for metadata in self.controller.segments.values():
                if metadata.status is SegmentStatus.DONE:
                    known = self.table.segments.setdefault(metadata.name, HostedSegment(metadata))
                    known.metadata = metadata
                else:
                    self.table.open[0] = metadata
        self.sealer.look()
        self.uploads.look()

    def until(self, condition: Callable[[], Any]) -> Any:
        def looked() -> Any:
            self.look()
            return condition()

        return self.kit.eventually(looked)

    def done(self, number: int = 0) -> SegmentMetadata | None:
        segment = sorted(self.controller.segments.values(), key=lambda s: s.sequence)[number : number + 1]
        return segment[0] if segment and segment[0].status is SegmentStatus.DONE else None

    def sealed(self, number: int = 0) -> SegmentMetadata | None:
        done = self.done(number)
        hosted = self.table.segments.get(done.name) if done is not None else None
        return done if hosted is not None and hosted.sealed is not None else None

    def objects(self) -> list[str]:
        return [found.name for found in self.store.list("")]


@pytest.fixture
def make_world(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(uploads_module, "_VIEW_LAG_S", 0.0)
    made: list[World] = []

    def make(policy: StorePolicy, **options: Any) -> World:
        made.append(World(kit, tmp_path, policy, **options))
        return made[-1]

    yield make
    for world in made:
        world.store.open.set()
        world.sealer.stop()
        world.uploads.stop()
        world.partition.close()
        world.files.close()


def test_metrics_show_what_waits_for_the_store(make_world: Any) -> None:
    world = make_world(BEST_EFFORT)
    registry, hosting = CollectorRegistry(), Hosting(world.files, world.log)
    peers = PeerService(hosting, bytes_per_s=0)
    ServerMetrics(registry, hosting, world.sealer, world.sealer._fetcher, peers, world.uploads)
    world.store.broken = "down"
    world.write()
    world.until(world.sealed)
    shown = generate_latest(registry).decode()
    assert "pinot_server_segmentUploadBacklog 1.0" in shown
    assert "pinot_server_deepStoreDown 0.0" in shown
    assert 'pinot_server_segmentUploadFailures_total{cause="storeDown"} ' in shown
    world.store.broken = ""
    world.until(lambda: world.uploads.backlog == 0)
    assert "pinot_server_segmentUploadBacklog 0.0" in generate_latest(registry).decode()
    peers.close()


@pytest.mark.parametrize("policy", [REQUIRED, BEST_EFFORT])
def test_with_a_store_that_works_a_commit_names_its_object(make_world: Any, policy: StorePolicy) -> None:
    world = make_world(policy, wait_ms=14_999)
    world.write()
    sealed = world.until(world.sealed)
    assert sealed.store_state is StoreState.STORED
    assert [f"file://{world.store.root}/{name}" for name in world.objects()] == [sealed.store_url]
    world.until(lambda: not world.uploads._uploads)
    assert (world.store.puts, world.uploads.backlog) == (1, 0)


def test_every_event_of_a_segment_has_its_time_its_actor_and_a_cause(make_world: Any, tmp_path: Path) -> None:
    """Steps of sealing and uploads run on threads that nobody's request began."""
    journal, log = Journal(tmp_path / "journal", "server", "Server_a_1"), logging.getLogger("cremant")
    log.setLevel(logging.INFO)
    log.addHandler(journal)
    try:
        world = make_world(REQUIRED)
        world.store.broken = "down"
        world.write()
        world.until(lambda: world.uploads.failed)
        world.store.broken = ""
        sealed = world.until(world.sealed)
        world.until(lambda: "segment uploaded" in {event["event"] for event in journal.story(sealed.name)})
    finally:
        log.removeHandler(journal)
    events = journal.story(sealed.name)
    assert {"segment built", "an upload failed", "segment uploaded"} <= {event["event"] for event in events}
    assert [event for event in events if not (event["at"] and event["instance"] and event.get("cause"))] == []


def test_with_peers_only_nothing_is_uploaded(make_world: Any) -> None:
    world = make_world(PEERS_ONLY)
    world.store.broken = "must not be asked"
    world.write()
    sealed = world.until(world.sealed)
    assert (sealed.store_state, sealed.store_url, world.store.puts) == (StoreState.NONE, None, 0)
    assert world.uploads.backlog == 0


def test_a_store_that_hangs_holds_up_no_commit_and_what_lands_later_is_recorded(make_world: Any) -> None:
    world = make_world(BEST_EFFORT)
    world.store.open.clear()
    world.write()
    sealed = world.until(world.sealed)
    assert (sealed.store_state, sealed.store_url) == (StoreState.PENDING, None)
    assert world.uploads.backlog == 1
    world.store.open.set()
    stored = world.until(lambda: world.done().store_url and world.done())
    assert stored.store_state is StoreState.STORED
    assert world.store.name_of(stored.store_url) in world.objects()
    world.until(lambda: world.uploads.backlog == 0 and not world.uploads._uploads)


def test_a_store_that_fails_is_recorded_with_its_cause_and_tried_again(make_world: Any) -> None:
    world = make_world(BEST_EFFORT, wait_ms=14_999)
    world.store.broken = "no route to the store"
    world.write()
    sealed = world.until(world.sealed)
    assert (sealed.store_state, sealed.store_error) == (StoreState.FAILED, "no route to the store")
    world.store.broken = ""
    stored = world.until(lambda: world.done().store_url and world.done())
    assert (stored.store_state, stored.store_error) == (StoreState.STORED, None)


def test_commits_do_not_wait_for_a_store_that_has_hung_again_and_again(make_world: Any) -> None:
    world = make_world(BEST_EFFORT, wait_ms=100)
    world.store.open.clear()
    for number in range(BREAKER_FAILURES):
        world.write()
        assert world.until(lambda number=number: world.sealed(number)).store_state is StoreState.PENDING
    assert world.uploads.breaker.state is BreakerState.OPEN
    world.set_policy(BEST_EFFORT, wait_ms=14_999)
    world.write()
    sealed = world.until(lambda: world.sealed(BREAKER_FAILURES))
    assert sealed.store_state in (StoreState.FAILED, StoreState.PENDING)
    assert sealed.store_url is None
    world.store.open.set()
    world.until(lambda: all(world.done(n).store_state is StoreState.STORED for n in range(BREAKER_FAILURES + 1)))
    assert world.uploads.breaker.state is BreakerState.CLOSED


def test_where_the_store_is_required_a_commit_waits_and_rows_stay_visible(make_world: Any) -> None:
    world = make_world(REQUIRED)
    world.store.broken = "read-only"
    world.write()
    world.until(lambda: world.store.puts >= 2)
    (segment,) = world.controller.segments.values()
    assert segment.status is SegmentStatus.COMMITTING
    assert "read-only" in world.table.problems[segment.name]
    assert world.partition.tail.snapshot.rows == 100
    world.write(30)
    assert world.partition.tail.snapshot.rows == 130
    world.store.broken = ""
    assert world.until(world.sealed).store_state is StoreState.STORED
    assert world.partition.tail.snapshot.rows == 30


def test_a_policy_that_is_changed_while_a_commit_waits_takes_effect_on_it(make_world: Any) -> None:
    world = make_world(REQUIRED)
    world.store.open.clear()
    world.write()
    world.until(lambda: world.store.puts == 1)
    assert world.done() is None
    world.set_policy(BEST_EFFORT)
    assert world.until(world.sealed).store_state is StoreState.PENDING
    world.write()
    world.set_policy(PEERS_ONLY)
    assert world.until(lambda: world.sealed(1)).store_state is StoreState.NONE


def test_the_late_upload_of_a_committer_that_was_replaced_is_deleted(make_world: Any) -> None:
    """The lease lapsed while its upload hung; another replica committed the same content under its own name."""
    world = make_world(REQUIRED)
    world.store.open.clear()
    world.write()
    world.until(lambda: world.store.puts == 1)
    (mine,) = world.controller.segments.values()
    (upload,) = world.uploads._uploads.values()
    asked = SegmentConsumed(
        instance="other", table="trips", incarnation=INCARNATION, segment=mine.name, at=mine.end, reason="rowLimit"
    )
    assert world.controller.step(mine.name, consumed_event(asked), now_ms=2).status is CompletionStatus.COMMIT
    ended = CommitEnd(
        instance="other", table="trips", incarnation=INCARNATION, segment=mine.name, token=2, end=mine.end, rows=100,
        size_bytes=1, checksum=upload.checksum, file_checksum=upload.file_checksum, store_state=StoreState.STORED,
        store_url="file:///of-the-other",
    )  # fmt: skip
    assert world.controller.step(mine.name, CommitEnded(ended)).status is CompletionStatus.COMMIT_SUCCESS
    world.until(world.sealed)
    world.store.open.set()
    world.until(lambda: world.uploads.discarded_total == 1)
    world.until(lambda: world.objects() == [])
    assert world.done().store_url == "file:///of-the-other"


def test_an_upload_is_given_up_or_named_by_a_commit_never_both(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit may claim the object at any moment, also while it is being given up."""
    world = make_world(REQUIRED)
    world.store.open.clear()
    world.write()
    world.until(lambda: world.store.puts == 1)
    (upload,) = world.uploads._uploads.values()
    world.store.open.set()
    assert upload.ended.wait(20)
    claimed: list[bool] = []
    claims = threading.Thread(target=lambda: claimed.append(world.uploads.claim(upload)), daemon=True)
    forget = world.uploads._forget

    def late(given_up: Any) -> None:
        claims.start()
        claims.join(0.2)
        forget(given_up)

    monkeypatch.setattr(world.uploads, "_forget", late)
    world.uploads._discard(upload, None)
    claims.join(10)
    assert claimed == [False]
    world.kit.eventually(lambda: world.objects() == [])


def test_of_a_table_that_is_dropped_while_its_commit_waits_nothing_stays(make_world: Any) -> None:
    world = make_world(REQUIRED)
    world.store.open.clear()
    world.write()
    world.until(lambda: world.store.puts == 1)
    assert files_of(world), "what was built, and its other name for the upload"
    world.files.tail_directory(world.partition.id).mkdir(parents=True, exist_ok=True)
    world.controller.segments.clear()
    world.sealer._tables.pop("trips")
    world.partition.close()
    world.files.remove_table("trips", INCARNATION)
    world.store.open.set()
    world.until(lambda: not world.uploads._uploads and not world.objects())
    world.until(lambda: not files_of(world))
    # Directories go a moment after the files in them.
    world.until(lambda: not any(any(path.iterdir()) for path in world.files.root.iterdir() if path.is_dir()))
    world.until(lambda: not list(world.store.root.iterdir()))  # its directories go a moment after the object


def files_of(world: World) -> list[Path]:
    held = {"lock", "server.lock"}
    return [path for path in world.files.root.rglob("*") if path.is_file() and path.name not in held]


def test_a_restarted_server_sees_to_the_objects_that_its_commits_lack(make_world: Any) -> None:
    """From the view alone: the process that committed is gone."""
    world = make_world(BEST_EFFORT, wait_ms=0)
    world.store.broken = "down"
    world.write()
    world.until(world.sealed)
    world.store.broken = ""
    again: Any = world.controller
    world.uploads.stop()
    world.uploads = Uploads({"trips": world.table}, world.files, world.store, again, has_store=True)
    assert world.uploads.backlog == 1
    world.until(lambda: world.done().store_state is StoreState.STORED)


def test_a_verified_copy_is_uploaded_on_request_and_recorded(make_world: Any) -> None:
    world = make_world(PEERS_ONLY)
    world.write()
    sealed = world.until(world.sealed)
    url = world.uploads.upload_now(world.table, sealed, 30)
    assert (world.done().store_state, world.done().store_url) == (StoreState.STORED, url)
    assert world.uploads.upload_now(world.table, sealed, 30) == url
    with pytest.raises(Conflict, match="has content"):
        world.uploads.upload_now(world.table, msgspec.structs.replace(sealed, checksum="sha256:other"), 30)
    with pytest.raises(NotFound, match="not on this server"):
        world.uploads.upload_now(world.table, msgspec.structs.replace(sealed, name="trips__9__9__x"), 30)


def test_a_damaged_copy_and_a_store_that_fails_are_said_to_whoever_asked_for_an_upload(make_world: Any) -> None:
    world = make_world(PEERS_ONLY)
    world.write()
    sealed = world.until(world.sealed)
    world.store.broken = "quota exceeded"
    with pytest.raises(StoreFailed, match="could not be uploaded: quota exceeded"):
        world.uploads.upload_now(world.table, sealed, 30)
    assert (world.done().store_state, world.done().store_error) == (StoreState.FAILED, "quota exceeded")
    path = world.table.segments[sealed.name].sealed.directory / PARQUET_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Corrupt, match="expected sha256:"):
        world.uploads.upload_now(world.table, sealed, 30)
    assert world.uploads.failed == {UploadCause.STORE_DOWN: 1, UploadCause.CHECKSUM: 1}
    assert not world.table.segments[sealed.name].verified, "it is to be looked through, dropped and fetched"


def test_what_was_given_up_is_never_named(make_world: Any) -> None:
    world = make_world(REQUIRED)
    world.store.open.clear()
    world.write()
    world.until(lambda: world.store.puts == 1)
    (upload,) = world.uploads._uploads.values()
    world.uploads.named(upload)
    assert not world.uploads.claim(upload)


def test_a_later_try_of_an_object_outlives_the_one_that_failed(make_world: Any) -> None:
    world = make_world(PEERS_ONLY)
    world.write()
    sealed = world.until(world.sealed)
    hosted = world.table.segments[sealed.name]
    world.store.broken = "quota exceeded"
    failed = world.uploads._begin_own(world.table, sealed, hosted)
    assert failed.ended.wait(30)
    world.store.broken = ""
    world.store.open.clear()
    again = world.uploads._begin_own(world.table, sealed, hosted)
    assert (again.name, again is failed) == (failed.name, False)
    world.uploads._report(failed)  # who reports does not know of the later try
    world.uploads.named(failed)
    assert world.uploads.claim(again)
    world.uploads.unnamed(again)
    world.store.open.set()
    assert world.until(lambda: world.done().store_url) == again.url


@pytest.mark.parametrize(
    ("error", "why", "of_store"),
    [
        (Unavailable("no route"), UploadCause.STORE_DOWN, True),
        (DeadlineExceeded("no answer within 5000 ms"), UploadCause.TIMEOUT, True),
        (NoResource("full"), UploadCause.STORE_FULL, True),
        (AlreadyExists("exists with other bytes"), UploadCause.REFUSED, False),
        (NotFound("the file is gone"), UploadCause.NOT_HELD, False),
        (ValueError("a bug"), UploadCause.INTERNAL, False),
    ],
)
def test_failures_are_counted_by_cause_and_only_those_of_the_store_open_the_breaker(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, why: UploadCause, of_store: bool
) -> None:
    world = make_world(PEERS_ONLY)
    world.write()
    sealed = world.until(world.sealed)

    def fails(name: str, source: Path) -> str:
        raise error

    monkeypatch.setattr(world.store, "put", fails)
    for _ in range(BREAKER_FAILURES):
        with pytest.raises(Unavailable) as told:
            world.uploads.upload_now(world.table, sealed, 30)
        assert isinstance(told.value, StoreFailed) is of_store
    assert world.uploads.failed == {why: BREAKER_FAILURES}
    assert (world.uploads.breaker.state is BreakerState.CLOSED) is not of_store


def test_a_damaged_object_under_the_right_name_is_in_nobodys_way(make_world: Any) -> None:
    world = make_world(PEERS_ONLY)
    world.write()
    sealed = world.until(world.sealed)
    first = world.uploads.upload_now(world.table, sealed, 30)
    damaged = Path(first.removeprefix("file://"))
    whole = damaged.read_bytes()
    damaged.write_bytes(b"torn")
    lacking = msgspec.structs.replace(world.done(), store_state=StoreState.FAILED, store_url=None)
    world.controller.segments[sealed.name] = lacking
    second = world.uploads.upload_now(world.table, sealed, 30)
    assert second != first
    assert Path(second.removeprefix("file://")).read_bytes() == whole
    assert damaged.read_bytes() == b"torn", "swept by age: a record may still name it"
    assert world.uploads.failed == {}
    assert world.done().size_bytes == len(whole)


def test_a_disk_without_hard_links_uploads_too(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    world = make_world(REQUIRED)
    world.write()
    sealed = world.until(world.sealed)
    assert (sealed.store_state, len(world.objects())) == (StoreState.STORED, 1)


def test_an_upload_that_finds_no_room_for_its_files_fails_and_is_tried_again(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(REQUIRED)
    make_scratch, refused = world.files.new_scratch, list[int]()

    def no_room() -> Path:
        if world.sealer.steps._built and not refused:
            refused.append(1)
            raise OSError(28, "No space left on device")
        return make_scratch()

    monkeypatch.setattr(world.files, "new_scratch", no_room)
    world.write()
    world.until(world.sealed)
    assert refused
    assert world.done().store_state is StoreState.STORED
    assert world.uploads.failed == {UploadCause.LOCAL_DISK: 1}
    assert world.uploads.breaker.state is BreakerState.CLOSED
    assert not any(not upload.ended.is_set() for upload in world.uploads._uploads.values())


def test_an_object_that_a_commit_may_name_is_neither_deleted_nor_asked_about_all_the_time(
    make_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "UPLOAD_UNNAMED_MS", -1)
    world = make_world(REQUIRED)
    (tmp_path / "rows").write_bytes(b"rows")
    (opened,) = world.controller.segments
    upload = world.uploads.begin(
        world.table, opened, 1, tmp_path / "rows", checksum="c", file_checksum="sha256:f", required=True
    )
    assert upload.ended.wait(30)
    assert world.uploads.claim(upload)
    upload.report_at_s = 0.0
    world.uploads.look()
    assert upload.report_at_s > 0.0
    assert world.objects() == [upload.name]
    world.uploads.unnamed(upload)
    world.uploads.look()
    world.kit.eventually(lambda: not world.objects())
