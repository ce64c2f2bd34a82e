# SPDX-License-Identifier: Apache-2.0
"""Versions of sealed segments from other servers, the store and the log: complete, or the segment is not served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from versions_kit import INCARNATION, UpsertLog, shown, upsert_log, upsert_record

from cremant.completion.copies import with_versions
from cremant.epoch.records import Fence, Reset
from cremant.log.memory import MemoryLog
from cremant.model.cluster import ClusterView, LiveInstance, PipelineRecord, Rewind, Role, TableView
from cremant.model.completion import StorePolicy
from cremant.model.errors import NotFound, Unavailable
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.model.segments import ReplicaState, SegmentMetadata, StoredVersions, StoreState
from cremant.model.upsert import CompactionConfig, Cut, UpsertConfig
from cremant.segment.compact import compact_segment
from cremant.segment.locations import Locations, locations_of
from cremant.segment.reader import SealedSegment, derive
from cremant.segment.snapshot import Snapshot, pack
from cremant.segment.tail import SpillQuota
from cremant.segment.versions import UNSET, Flags, Versions
from cremant.server import validity
from cremant.server.files import ServerFiles
from cremant.server.partition import Partition, PartitionId
from cremant.server.replay import Replay
from cremant.server.reports import _superseded
from cremant.server.rest_versions import POSITIONS, SEGMENT, VersionsService, snapshot_of
from cremant.server.table import HostedSegment, HostedTable
from cremant.server.validity import VersionsKeeper, VersionsSource, lacking_versions
from cremant.server.versions_fetch import VersionsClient
from cremant.server.versions_upload import VersionsUploads
from cremant.shell.app import RunningServer, make_app, serve
from cremant.store.deepstore import DirectoryStore, checksum_of
from cremant.wire.messages import CompletionStatus, VersionsStored, VersionsStoredReply

EPOCHS = 16
OWN = PartitionId("trips", INCARNATION, 1)


class Server:
    """One that has sealed epochs 4 to 7 of partition 1, and reads the log from `start` on."""

    def __init__(self, world: World, name: str, start: int) -> None:
        self.id = name
        self.world = world
        self.files = ServerFiles(world.root / name)
        self.table = HostedTable(upsert_record())
        self.partition = Partition(
            OWN, world.epochs.positions[1][start], world.root / name / "tail", SpillQuota(),
            upsert=self.table.record.config.upsert,
        )  # fmt: skip
        self.table.partitions[1] = self.partition
        self.service = VersionsService(SimpleNamespace(tables={"trips": self.table}))  # type: ignore[arg-type]
        self.client = VersionsClient(name, world.store)
        self.keeper = VersionsKeeper(
            {"trips": self.table}, self.files, world.log, self.client, name, lambda: world.view
        )  # fmt: skip
        self._handles: list[RunningServer] = []

    def install(self) -> HostedSegment:
        self.table.install(self.world.metadata, self.world.sealed, verified=True)
        return self.hosted

    @property
    def hosted(self) -> HostedSegment:
        return self.table.segments[self.world.metadata.name]

    def read(self, until: int = EPOCHS) -> None:
        while self.partition.position.epoch < until:
            assert self.partition.turn(self.world.log, 0), self.partition.error
        assert self.partition.error is None

    def serve(self) -> None:
        started = threading.Event()
        app = make_app("server", self.service.routes(), ready=lambda: (True, ""))
        self._thread = threading.Thread(
            target=serve, args=(app, "127.0.0.1", 0),
            kwargs={
                "insecure": False, "on_handle": self._handles.append, "on_started": lambda url: started.set(),
            },
        )  # fmt: skip
        self._thread.start()
        assert started.wait(20)
        self.world.live[self.id] = self._handles[0].url

    def get(self, path: str, **query: Any) -> httpx.Response:
        return httpx.get(self.world.live[self.id] + path, params=query)

    def close(self) -> None:
        for handle in self._handles:
            handle.stop()
            self._thread.join(10)
        self.keeper.stop()
        self.service.close()
        self.partition.close()
        self.files.close()

    def check(self, newest: int = EPOCHS) -> None:
        versions = self.hosted.versions
        assert versions is not None
        first, end = self.world.metadata.start_offset, self.world.metadata.end_offset or 0
        for epoch in range(7, newest + 1):
            assert shown(versions, epoch) == self.world.epochs.expected(1, first, end, epoch), epoch


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = MemoryLog(lambda: 0)
        self.epochs: UpsertLog = upsert_log(self.log, partitions=2, keys=150)
        for epoch in range(1, EPOCHS + 1):
            if epoch in (6, 12):
                self.epochs.start()
            self.epochs.write(13)
        made: tuple[SegmentMetadata, SealedSegment] = self.epochs.sealed(root, 1, 3, 7)
        self.metadata, self.sealed = made
        self.store = DirectoryStore(root / "store")
        self.live: dict[str, str] = {}
        self.pipeline = PipelineRecord(generation=3, keyed_from=1)
        self.servers: list[Server] = []

    def server(self, name: str, start: int) -> Server:
        self.servers.append(Server(self, name, start))
        return self.servers[-1]

    def peer(self, until: int = EPOCHS) -> Server:
        """It consumed the segment's rows itself."""
        made = self.server("peer", 3)
        made.read(until)
        made.install()
        made.serve()
        return made

    @property
    def view(self) -> ClusterView:
        live = tuple(LiveInstance(id=name, role=Role.SERVER, url=url) for name, url in self.live.items())
        online = {self.metadata.name: dict.fromkeys(self.live, ReplicaState.ONLINE)}
        table = TableView(
            record=upsert_record(), partitions=(), segments=(self.metadata,), external=online,
            pipeline_record=self.pipeline,
        )  # fmt: skip
        return ClusterView(version=1, controller_nonce="n", instances=live, tables={"trips": table})

    def trim(self, epoch: int) -> None:
        """The log has only what follows this epoch."""
        self.log.trim(epoch_topic("trips", INCARNATION), 1, self.epochs.positions[1][epoch].log_offset)

    def versions_at(self, epoch: int) -> Versions:
        """The segment's, with the updates up to this epoch."""
        replay = Replay.from_rows(self.log, OWN, self.metadata, "gone")
        while replay.turn():
            pass
        versions = replay.result(lambda: locations_of(self.sealed.batches)).versions
        versions.roll_back(epoch)
        return versions

    def put_into_store(self, epoch: int) -> None:
        name, checksum = self.metadata.name, self.metadata.checksum or ""
        position = self.epochs.positions[1][epoch]
        path = self.root / "packed"
        path.write_bytes(pack(Snapshot(self.versions_at(epoch), position), segment=name, checksum=checksum))
        stored = StoredVersions(
            url=self.store.put("one.versions", path), position=position,
            size_bytes=path.stat().st_size, file_checksum=checksum_of(path),
        )  # fmt: skip
        self.metadata = msgspec.structs.replace(self.metadata, versions=stored, store_state=StoreState.STORED)

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def follower(world: World) -> Callable[[int], Server]:
    """A server with the segment's rows and without their versions, which has read up to an epoch."""

    def make(until: int = EPOCHS) -> Server:
        made = world.server("me", 7)
        made.read(until)
        made.install()
        return made

    return make


def _missing(server: Server, epoch: int = EPOCHS) -> list[str]:
    found = server.table.resolve((server.world.metadata.name,), (), Cut(epoch=epoch))
    return found.missing


def test_a_segment_without_versions_is_not_served_until_a_peer_has_sent_them(world: World) -> None:
    world.peer()
    world.trim(EPOCHS)
    me = world.server("me", EPOCHS)
    me.install()
    assert lacking_versions(me.table) == [me.hosted]
    assert _missing(me) == [world.metadata.name]
    me.keeper.bring(me.table, me.hosted)
    assert _missing(me) == []
    assert me.keeper.brought == {VersionsSource.PEER: 1}
    me.check()
    for _ in range(3):  # and they go on
        world.epochs.write(40)
    me.read(EPOCHS + 3)
    me.check(EPOCHS + 3)


def test_versions_of_a_peer_that_is_behind_are_brought_forward(world: World) -> None:
    world.peer(until=9)
    world.trim(9)
    me = world.server("me", 9)
    me.read()
    me.install()
    me.keeper.bring(me.table, me.hosted)
    assert me.keeper.brought == {VersionsSource.PEER: 1}
    me.check()


def test_versions_of_a_peer_that_is_ahead_wait_for_the_partition(world: World) -> None:
    """The partition has read nothing yet, the peer is at epoch 16."""
    world.peer()
    me = world.server("me", 7)
    me.install()
    me.keeper.bring(me.table, me.hosted)
    assert me.hosted.versions is not None
    assert me.hosted.versions.epoch == EPOCHS
    me.check()
    me.read()  # the updates that are in already are skipped
    me.check()


def test_without_peers_the_store_has_them_as_of_some_position(world: World, follower: Callable[..., Server]) -> None:
    world.put_into_store(8)
    me = follower()
    world.trim(8)
    me.keeper.bring(me.table, me.hosted)
    assert me.keeper.brought == {VersionsSource.STORE: 1}
    me.check()


def test_stored_versions_of_epochs_that_were_taken_back_are_continued_from_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object has updates up to epoch 14, the table went back to epoch 10: they are not served before they are taken
    back, and then are those of a server that was there all the time."""
    there = world.server("there", 3)
    there.read()
    there.install()
    world.put_into_store(14)
    assert world.metadata.versions is not None
    stored = msgspec.structs.replace(world.metadata.versions, position=world.epochs.positions[1][9])
    world.metadata = msgspec.structs.replace(world.metadata, versions=stored)
    world.trim(9)
    me = world.server("me", 10)
    me.table.rewinds = (Rewind(to_epoch=10),)
    me.install()
    with monkeypatch.context() as patched:
        patched.setattr(validity, "_FORWARD_S", 0.2)
        with pytest.raises(Unavailable, match="its versions are as of epoch"):
            me.keeper.bring(me.table, me.hosted)
    assert me.hosted.versions is None
    world.epochs.generation += 1
    for partition in range(2):
        world.epochs.append(partition, Fence(generation=world.epochs.generation))
        world.epochs.append(partition, Reset(generation=world.epochs.generation, epoch=10))
    for server in (there, me):
        while server.partition.turn(world.log, 0):
            pass
        assert server.partition.error is None
    me.keeper.bring(me.table, me.hosted)
    assert me.keeper.brought == {VersionsSource.STORE: 1}
    assert me.hosted.versions is not None
    assert there.hosted.versions is not None
    assert me.hosted.versions.epoch == there.hosted.versions.epoch == 10
    for epoch in range(7, 11):
        assert shown(me.hosted.versions, epoch) == shown(there.hosted.versions, epoch), epoch


def test_without_anybody_the_log_has_them(world: World, follower: Callable[..., Server]) -> None:
    me = follower()
    world.trim(3)
    me.keeper.bring(me.table, me.hosted)
    assert me.keeper.brought == {VersionsSource.LOG: 1}
    me.check()


def test_rows_from_before_a_table_had_keys_are_not_asked_for_as_of_then(
    world: World, follower: Callable[..., Server]
) -> None:
    me = follower()
    world.pipeline = msgspec.structs.replace(world.pipeline, keyed_from=None)
    me.keeper.look()
    assert not me.keeper._busy, "nothing was ever said of its rows"
    world.pipeline = msgspec.structs.replace(world.pipeline, keyed_from=9)
    me.keeper.bring(me.table, me.hosted)
    assert me.hosted.versions is not None
    assert me.hosted.versions.horizon == 9
    assert me.table.resolve((world.metadata.name,), (), Cut(epoch=8)).refused == [1]
    me.check()


def test_what_nobody_has_is_said_with_every_source(world: World, follower: Callable[..., Server]) -> None:
    peer = world.peer()
    world.put_into_store(8)
    me = follower()
    world.trim(12)
    peer.hosted.versions = None
    with pytest.raises(Unavailable) as raised:
        me.keeper.bring(me.table, me.hosted)
    text = str(raised.value)
    assert "peer: status 404, this server does not know which rows" in text
    assert "one.versions: " in text
    assert "epoch log: " in text
    assert text.count("the epoch log begins at") == 2
    me.keeper._run(me.table, me.hosted)
    assert me.hosted.error == str(raised.value)
    assert _missing(me) == [world.metadata.name]


def test_the_keeper_does_it_by_itself(world: World, follower: Callable[..., Server], kit: Any) -> None:
    world.peer()
    me = follower()
    me.keeper.start()
    kit.eventually(lambda: me.hosted.versions is not None)
    me.check()
    assert me.hosted.error is None


def test_a_partition_that_goes_on_meanwhile_is_caught_up_with(world: World, follower: Callable[..., Server]) -> None:
    """Turns and bringing interleave at any point: what is attached has all that the partition has."""
    world.peer(until=8)
    me = follower(8)
    stop = threading.Event()

    def consume() -> None:
        while not stop.is_set():
            me.partition.turn(world.log, 0)

    for _ in range(20):
        world.epochs.write(5)
    thread = threading.Thread(target=consume)
    thread.start()
    me.keeper.bring(me.table, me.hosted)
    me.read(0)
    stop.set()
    thread.join()
    me.read(EPOCHS + 20)
    me.check(EPOCHS + 20)


# --- what a server says ---


def test_names_are_looked_up_and_other_content_is_refused(world: World) -> None:
    peer = world.peer()
    path = f"/tables/trips_REALTIME/segments/{world.metadata.name}/versions"
    assert peer.get(path).status_code == 200
    assert peer.get(path, checksum="other").status_code == 409
    assert peer.get("/tables/trips/segments/nothing/versions").status_code == 404
    assert peer.get("/tables/others/segments/nothing/versions").status_code == 404
    assert peer.get(path, notBefore="x").status_code == 400
    assert peer.get("/updates", table="trips").status_code == 400
    assert peer.get("/updates", **{"table": "trips", "from": "0", "segments": "nothing"}).status_code == 404


def test_a_server_waits_a_moment_for_an_epoch_that_others_have_closed(world: World) -> None:
    peer = world.peer(until=EPOCHS)
    world.epochs.write(5)
    path = f"/tables/trips/segments/{world.metadata.name}/versions"
    reading = threading.Timer(0.2, lambda: peer.read(EPOCHS + 1))
    reading.start()
    answer = peer.get(path, notBefore=EPOCHS + 1, waitMs=5_000)
    reading.join()
    assert answer.status_code == 200
    me = world.server("me", 7)
    me.install()
    me.keeper.bring(me.table, me.hosted)
    me.check(EPOCHS + 1)
    assert peer.get(path, notBefore=99, waitMs=50).status_code == 200, "then it says what it has"


def test_versions_that_lost_their_reader_are_not_passed_on(world: World) -> None:
    """They are as of an earlier epoch than the partition: with its position they would miss updates for ever."""
    peer = world.peer(until=9)
    assert peer.partition.versions is not None
    peer.partition.versions.detach(world.metadata.name)
    peer.read()
    assert peer.get(f"/tables/trips/segments/{world.metadata.name}/versions").status_code == 404
    updates = {"table": "trips", "segments": world.metadata.name, "from": "9"}
    assert peer.get("/updates", **updates).status_code == 404
    _in_store(world)
    made = Uploader(world, server=peer)
    made.look()
    assert _stored(world) == []


@pytest.mark.parametrize("after", [7, 8, 11, 15, 16])
def test_pulled_updates_bring_versions_to_where_the_other_server_is(world: World, after: int) -> None:
    peer = world.peer()
    name = world.metadata.name
    answer = peer.get("/updates", **{"table": "trips_REALTIME", "segments": name, "from": str(after)})
    with pa.ipc.open_stream(answer.content) as reader:
        pulled = reader.read_all()
    positions = msgspec.json.decode(pulled.schema.metadata[POSITIONS], type=dict[str, Position])
    assert positions == {name: world.epochs.positions[1][EPOCHS]}
    assert set(pulled.column(SEGMENT).to_pylist()) <= {name}
    versions = world.versions_at(after)
    epochs = pulled.column("$epoch").to_numpy()
    for epoch in np.unique(epochs).tolist():
        of_epoch = pulled.filter(pa.array(epochs == epoch))
        columns = (of_epoch.column(column).to_numpy() for column in ("$offset", "$subRow", "op"))
        versions.apply(epoch, *columns)
    versions.closed(EPOCHS)
    peer.hosted.versions = versions
    peer.check()


def test_updates_from_before_a_compaction_are_refused(world: World) -> None:
    """Rows that were replaced by then are gone, and so are their updates."""
    peer = world.peer()
    assert peer.hosted.versions is not None
    peer.hosted.versions.horizon = 9
    updates = {"table": "trips", "segments": world.metadata.name}
    assert peer.get("/updates", **updates, **{"from": "9"}).status_code == 200
    refused = peer.get("/updates", **updates, **{"from": "8"})
    assert refused.status_code == 409
    assert "from epoch 9 on" in refused.json()["error"]


# --- to the store ---


class Controller:
    """What the controller does with stored versions, and what the record says then."""

    def __init__(self, world: World, server: Server) -> None:
        self.id = server.id
        self.world = world
        self.heard: list[StoredVersions] = []
        self.replies: list[CompletionStatus] = []

    def call(self, path: str, message: VersionsStored, kind: type[VersionsStoredReply]) -> VersionsStoredReply:
        assert path == "/internal/v1/versionsStored"
        self.heard.append(message.versions)
        if self.replies:
            return VersionsStoredReply(status=self.replies.pop())
        known = self.world.metadata
        changed = with_versions(known, message.checksum, message.versions)
        if changed is None:
            return VersionsStoredReply(status=CompletionStatus.DISCARD)
        before = known.versions.url if known.versions is not None else None
        self.world.metadata = changed
        unnamed = before if before != message.versions.url else None
        return VersionsStoredReply(status=CompletionStatus.KEEP, unnamed=unnamed)


class Uploader:
    def __init__(
        self, world: World, policy: StorePolicy = StorePolicy.STORE_REQUIRED, server: Server | None = None
    ) -> None:
        self.server = server or world.peer()
        self.server.hosted.snapshot = self.server.partition.position
        self.controller = Controller(world, self.server)
        uploads: Any = SimpleNamespace(policy=lambda table: policy)
        self.uploads = VersionsUploads(
            {"trips": self.server.table}, self.server.files, world.store, self.controller, uploads,  # type: ignore[arg-type]
            lambda: world.view,
        )  # fmt: skip

    def look(self) -> int:
        """After the view has come."""
        self.server.hosted.metadata = self.controller.world.metadata
        return self.uploads.look()

    def due(self) -> None:
        for uploaded in self.uploads._uploaded.values():
            uploaded.due_s = 0.0


def _stored(world: World) -> list[str]:
    return [found.name for found in world.store.list("trips/")]


def _in_store(world: World) -> None:
    world.metadata = msgspec.structs.replace(world.metadata, store_state=StoreState.STORED)


def test_versions_follow_their_rows_into_the_store_and_are_replaced_when_they_changed(world: World) -> None:
    made = Uploader(world)
    assert made.look() == 0, "the rows are not stored"
    _in_store(world)
    assert made.look() == 1
    assert made.look() == 0, "not due"
    first = _stored(world)
    assert len(first) == 1
    for _ in range(3):
        world.epochs.write(60)
    made.server.read(EPOCHS + 3)
    made.due()
    assert made.look() == 1
    assert len(_stored(world)) == 1, "the former object is gone"
    assert _stored(world) != first
    made.server.close()
    world.servers.clear()
    world.live.clear()
    me = world.server("me", EPOCHS + 3)  # every server is lost, and the log before
    me.install()
    world.trim(EPOCHS + 3)
    me.keeper.bring(me.table, me.hosted)
    assert me.keeper.brought == {VersionsSource.STORE: 1}
    me.check(EPOCHS + 3)


def test_what_did_not_change_is_only_said_to_hold(world: World) -> None:
    _in_store(world)
    made = Uploader(world)
    made.look()
    assert world.metadata.versions is not None
    before = world.metadata.versions
    world.epochs.mark()  # an epoch of nothing
    made.server.read(EPOCHS + 1)
    made.due()
    assert made.look() == 1
    assert (world.metadata.versions.url, made.uploads.landed_total) == (before.url, 1)
    assert world.metadata.versions.position == world.epochs.positions[1][EPOCHS + 1]
    made.uploads._uploaded.clear()  # a new process does not know what it uploaded
    assert made.look() == 1
    assert made.uploads.landed_total == 2


@pytest.mark.parametrize("epochs", [0, 1])
def test_versions_that_are_gone_from_the_store_are_uploaded_again(world: World, epochs: int) -> None:
    _in_store(world)
    made = Uploader(world)
    made.look()
    for name in _stored(world):
        world.store.delete(name)
    for _ in range(epochs):
        world.epochs.mark()
    made.server.read(EPOCHS + epochs)
    made.due()
    made.look()
    assert world.metadata.versions is not None
    assert [world.store.name_of(world.metadata.versions.url)] == _stored(world)


def test_the_first_server_that_serves_it_sees_to_it(world: World) -> None:
    _in_store(world)
    made = Uploader(world)
    world.live["another"] = "http://127.0.0.1:1"
    assert made.look() == 0, "another serves it, and comes before peer"
    del world.live["another"]
    world.live["zed"] = "http://127.0.0.1:1"
    assert made.look() == 1


def test_tables_without_a_store_upload_nothing(world: World) -> None:
    _in_store(world)
    assert Uploader(world, StorePolicy.PEERS_ONLY).look() == 0


def test_a_controller_that_does_not_record_it_is_asked_again(world: World) -> None:
    _in_store(world)
    made = Uploader(world)
    made.controller.replies = [CompletionStatus.NOT_LEADER]
    with pytest.raises(Unavailable, match="the controller answered NOT_LEADER"):
        made.look()
    assert made.look() == 1
    assert len(_stored(world)) == 1


# --- compaction meanwhile ---------------------------------------------------------------------------------------------


def _compacted(world: World, kept: Flags, epoch: int) -> tuple[SegmentMetadata, SealedSegment]:
    """The record and the file once only some of the rows are left."""
    directory = world.root / "compacted"
    directory.mkdir()
    made = compact_segment(directory, world.sealed, kept, fsync=False)
    metadata = msgspec.structs.replace(
        world.metadata, checksum=made.checksum, file_checksum=made.file_checksum, rows=made.rows, compacted_at=epoch
    )
    return metadata, derive(directory, metadata.name, made.checksum, fsync=False)


def test_versions_of_files_that_were_damaged_are_not_those_of_compacted_ones_that_came_instead(world: World) -> None:
    me = world.server("me", 3)
    me.read(EPOCHS - 2)
    before = me.install().versions
    assert before is not None
    world.metadata, compacted = _compacted(world, before.kept(9), 9)
    assert 0 < compacted.rows < before.rows
    assert me.table.exchange(me.hosted, world.sealed, None)  # what the verifier does
    me.table.install(world.metadata, compacted, verified=True)
    assert me.hosted.versions is None
    assert _missing(me) == [world.metadata.name]
    me.read()
    world.sealed = compacted
    me.keeper.bring(me.table, me.hosted)
    assert me.hosted.versions is not None
    assert (me.hosted.versions.rows, me.hosted.versions.horizon) == (compacted.rows, 9)
    first, end = world.metadata.start_offset, world.metadata.end_offset or 0
    expected = world.epochs.expected(1, first, end, EPOCHS)
    assert shown(me.hosted.versions, EPOCHS) == {at: ends for at, ends in expected.items() if ends[1] > 9}


def test_versions_of_compacted_rows_are_not_given_to_a_file_that_still_has_all(world: World) -> None:
    """The view has it already, the server's record not yet. The rows that are left may be dense."""
    versions = world.versions_at(EPOCHS)
    kept = np.arange(versions.rows) >= versions.rows // 2
    me = world.server("me", EPOCHS)
    me.install()
    world.metadata, _ = _compacted(world, kept, 9)
    left, path = versions.compacted(kept, 9), world.root / "left"
    position, checksum = world.epochs.positions[1][EPOCHS], world.metadata.checksum or ""
    path.write_bytes(pack(Snapshot(left, position), segment=world.metadata.name, checksum=checksum))
    stored = StoredVersions(
        url=world.store.put("left.versions", path), position=position, size_bytes=path.stat().st_size,
        file_checksum=checksum_of(path),
    )  # fmt: skip
    world.metadata = msgspec.structs.replace(world.metadata, versions=stored, store_state=StoreState.STORED)
    me.keeper.bring(me.table, me.hosted)
    assert me.hosted.versions is None


def test_versions_of_all_rows_are_not_stored_for_the_compacted_content(world: World) -> None:
    """The record says already that it was compacted, the file here is the former one."""
    _in_store(world)
    made = Uploader(world)
    versions = made.server.hosted.versions
    assert versions is not None
    world.metadata, _ = _compacted(world, versions.kept(9), 9)
    hosted = made.server.hosted
    hosted.metadata = world.metadata
    made.uploads.upload(made.server.table, hosted, hosted.metadata)
    assert _stored(world) == []
    assert world.metadata.versions is None
    with pytest.raises(NotFound, match="other content"):
        snapshot_of(made.server.table, hosted, world.metadata.checksum)


def test_a_segment_of_which_all_rows_were_replaced_is_reported_as_such(world: World) -> None:
    """Counts are rounded down, but a table may want to compact only what is replaced as a whole."""
    me = world.server("me", 3)
    config = msgspec.structs.replace(
        me.table.record.config.upsert or UpsertConfig(comparison_columns=("ts",)), compaction=CompactionConfig()
    )
    record = msgspec.structs.replace(
        me.table.record, config=msgspec.structs.replace(me.table.record.config, upsert=config)
    )
    me.table.update(record)
    me.read(7)
    hosted = me.install()
    hosted.versions = Versions.superseded(Locations(151), 7)
    assert _superseded(me.table) == {world.metadata.name: 151}
    hosted.versions.valid_until[-1] = UNSET
    hosted.superseded = (-1, 0, 0.0)
    assert _superseded(me.table) == {world.metadata.name: 150}
