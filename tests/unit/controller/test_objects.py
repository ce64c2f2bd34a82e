# SPDX-License-Identifier: Apache-2.0
"""The deep store's objects as the controller sees to them: claimed once, looked at, deleted and swept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control import Cluster, StillClock, schema, table
from sealed import S1, S2, holding, seal

from cremant.model.cluster import segment_key
from cremant.model.errors import Unavailable
from cremant.model.limits import STORE_LOOK_EVERY_MS, STORE_LOOK_FIRST_MS
from cremant.model.offsets import Position
from cremant.model.segments import SegmentMetadata, StoredVersions, StoreState
from cremant.shell.deepstore import GuardedStore
from cremant.store.deepstore import MARKER, DeepStore, DirectoryStore


class Shared(Cluster):
    """Its store is a directory that was chosen; what was used before is known by URL."""

    def start(self) -> None:
        if not isinstance(self.deep_store, GuardedStore):
            self.share = self.directory / "share"
            self.deep_store = self._open()
        super().start()

    def _open(self) -> Any:
        def former(url: str) -> DeepStore:
            return DirectoryStore(url.removeprefix("file://").rsplit("/", 3)[0])

        return GuardedStore(DirectoryStore(self.share, marked=True), str(self.share), former=former)

    def restart(self) -> None:
        self.deep_store = self._open()
        super().restart()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path, clock=StillClock())
    for thread in made.controller._housekeeping:
        thread.stop()
    yield made
    made.close()


def created(cluster: Cluster, replication: int = 1) -> Any:
    """What the creation of a table answers."""
    for server in (S1, S2)[:replication]:
        cluster.beat(server)
    cluster.post("/topics", {"name": "events", "partitions": 1})
    cluster.post("/schemas", schema("gold"))
    return cluster.post("/tables", table("gold", replication=replication))


def stored(cluster: Cluster, store: Any = None, file: str = "one.parquet") -> SegmentMetadata:
    """A sealed segment with its object."""
    source = cluster.directory / "object"
    source.write_bytes(b"their rows")
    incarnation = cluster.controller.catalog.tables["gold"].incarnation
    url = (store or cluster.deep_store).put(f"gold/{incarnation}/{file}", source)
    return seal(cluster, store_state=StoreState.STORED, store_url=url)


def now(cluster: Cluster, segment: SegmentMetadata) -> SegmentMetadata:
    return cluster.controller.catalog.segments["gold"][segment.name]


def advance(cluster: Cluster, ms: int) -> None:
    assert isinstance(cluster.clock, StillClock)
    cluster.clock.advance(ms)


# --- claiming -----------------------------------------------------------------------------------------------------


def test_a_chosen_directory_is_claimed_by_the_controller_and_known_after_a_restart(shared: Shared) -> None:
    assert not shared.share.exists(), "a start asks it nothing"
    shared.controller.objects.keep_claimed()
    marker = (shared.share / MARKER).read_text().strip()
    (record,) = shared.controller.catalog.stores.values()
    assert (record.uri, record.id) == (f"file://{shared.share}", marker)
    shared.restart()
    assert shared.controller.catalog.stores.popitem()[1] == record
    shared.controller.objects.claim()
    assert (shared.share / MARKER).read_text().strip() == marker


def test_a_restart_while_the_share_is_not_mounted_makes_no_second_store(shared: Shared) -> None:
    shared.controller.objects.claim()
    shared.share.rename(shared.directory / "unmounted")
    shared.share.mkdir()  # the mount point
    shared.restart()
    with pytest.raises(Unavailable, match="is the share mounted"):
        shared.controller.objects.claim()
    shared.controller.objects.keep_claimed()
    assert "is the share mounted" in created(shared)["warnings"][0]
    assert list(shared.share.iterdir()) == []
    shared.share.rmdir()
    (shared.directory / "unmounted").rename(shared.share)
    shared.controller.objects.claim()


def test_a_table_can_use_a_new_store_at_once(shared: Shared) -> None:
    """Its creation claims the store if no round has yet."""
    assert "warnings" not in created(shared)
    assert (shared.share / MARKER).exists()


# --- looking ------------------------------------------------------------------------------------------------------


def test_an_object_that_somebody_deleted_is_noticed_and_uploaded_again(shared: Shared) -> None:
    created(shared, replication=2)
    kept, gone = stored(shared), stored(shared, file="two.parquet")
    shared.deep_store.delete(shared.deep_store.name_of(gone.store_url or ""))
    objects = shared.controller.objects
    assert objects.look() == 0, "not due yet"
    advance(shared, STORE_LOOK_FIRST_MS)
    assert objects.look() == 1
    assert (now(shared, gone).store_state, now(shared, gone).store_url) == (StoreState.FAILED, None)
    assert "its object is gone: deep store has no object gold/" in (now(shared, gone).store_error or "")
    assert now(shared, kept).store_state is StoreState.STORED
    assert shared.controller.repair._copies.missing() >= {("gold", gone.name)}, "repair sees to it"
    assert (objects.looked.objects, objects.looked.gone) == (2, 1)
    shared.deep_store.delete(shared.deep_store.name_of(kept.store_url or ""))
    advance(shared, STORE_LOOK_EVERY_MS - 1)
    assert objects.look() == 0
    advance(shared, 1)
    assert objects.look() == 1
    metrics = shared.request("GET", "/metrics").text
    assert "cremant_store_objects_looked_at_total 3.0" in metrics
    assert "cremant_store_objects_gone_total 2.0" in metrics


def test_a_share_that_is_not_mounted_loses_no_object(shared: Shared) -> None:
    created(shared)
    kept = stored(shared)
    shared.share.rename(shared.directory / "unmounted")
    shared.share.mkdir()
    advance(shared, STORE_LOOK_FIRST_MS)
    assert shared.controller.objects.look() == 0
    shared.share.rmdir()
    assert shared.controller.objects.look() == 0
    assert now(shared, kept).store_state is StoreState.STORED
    (shared.directory / "unmounted").rename(shared.share)
    shared.deep_store.delete(shared.deep_store.name_of(kept.store_url or ""))
    assert shared.controller.objects.look() == 1, "it is still due"


def test_an_object_that_was_cut_short_counts_as_gone(shared: Shared) -> None:
    created(shared)
    cut = stored(shared)
    Path((cut.store_url or "").removeprefix("file://")).write_bytes(b"the")
    advance(shared, STORE_LOOK_FIRST_MS)
    assert shared.controller.objects.look() == 1
    assert now(shared, cut).store_error == "its object is damaged: expected 10 bytes, found 3"


class Elsewhere(DirectoryStore):
    """As a service of buckets: what is not there is said to be missing, whatever else is in its place."""

    def _check_marker(self) -> None:
        pass


def test_objects_missing_from_another_store_in_the_place_of_ours_are_not_taken_for_gone(shared: Shared) -> None:
    """It may be the only copy, and what no record names is swept when the right store is back."""
    created(shared)
    kept = stored(shared)
    shared.share.rename(shared.directory / "right")
    shared.share.mkdir()
    shared.controller.objects._deep_store = GuardedStore(Elsewhere(shared.share, marked=True), "there")
    advance(shared, STORE_LOOK_FIRST_MS)
    assert shared.controller.objects.look() == 0
    assert now(shared, kept).store_state is StoreState.STORED
    shared.share.rmdir()
    (shared.directory / "right").rename(shared.share)
    shared.deep_store.delete(shared.deep_store.name_of(kept.store_url or ""))
    assert shared.controller.objects.look() == 1


def test_a_record_that_cannot_be_written_forgets_no_object(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    created(shared)
    both = [stored(shared), stored(shared, file="two.parquet")]
    for segment in both:
        shared.deep_store.delete(shared.deep_store.name_of(segment.store_url or ""))
    advance(shared, STORE_LOOK_FIRST_MS)
    with monkeypatch.context() as patched:
        patched.setattr(shared.controller.catalog, "commit", _disk_full)
        with pytest.raises(OSError, match="no space"):
            shared.controller.objects.look()
    assert shared.controller.objects.look() == 2


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError("no space")


def test_an_operator_who_doubts_an_object_waits_for_no_day(shared: Shared) -> None:
    created(shared)
    gone = stored(shared)
    shared.beat(S1, report=holding(gone))
    shared.deep_store.delete(shared.deep_store.name_of(gone.store_url or ""))
    shared.post("/segments/gold/uploadFromServerToDeepstore")
    assert shared.controller.objects.look() == 1
    assert shared.post("/segments/gold/uploadFromServerToDeepstore")["segments"] == [gone.name]


# --- another store than before ------------------------------------------------------------------------------------


def test_objects_of_the_store_that_was_used_before_go_with_their_segments_and_tables(shared: Shared) -> None:
    created(shared)
    before = DirectoryStore(shared.directory / "before")
    first, second = stored(shared, before), stored(shared, before, "two.parquet")
    third = stored(shared, None, "three.parquet")
    advance(shared, STORE_LOOK_FIRST_MS)
    assert shared.controller.objects.look() == 0, "what is in another store is not looked after"
    assert shared.controller.janitor.delete_segments("gold", [first]) == 1
    assert [found.name for found in before.list("")] == [before.name_of(second.store_url or "")]
    assert shared.deep_store.list("")[0].name == shared.deep_store.name_of(third.store_url or "")
    shared.request("DELETE", "/tables/gold")
    advance(shared, 60_000)
    assert shared.controller.tables.finish_drops() == 1
    assert before.list("") == shared.deep_store.list("") == []


def test_a_former_store_that_is_not_mounted_is_waited_for(shared: Shared) -> None:
    """What is missing there is not taken for deleted."""
    created(shared)
    shared.controller.objects.claim()
    kept = stored(shared)
    before = shared.share
    shared.share = shared.directory / "new"
    shared.restart()
    for thread in shared.controller._housekeeping:
        thread.stop()
    shared.controller.objects.claim()
    before.rename(shared.directory / "unmounted")
    before.mkdir()
    shared.request("DELETE", "/tables/gold")
    advance(shared, 60_000)
    assert shared.controller.tables.finish_drops() == 0, "an empty place is no empty store"
    before.rmdir()
    (shared.directory / "unmounted").rename(before)
    assert shared.controller.tables.finish_drops() == 1
    assert not Path((kept.store_url or "").removeprefix("file://")).exists()


def test_a_url_that_is_not_the_tables_deletes_nothing(shared: Shared) -> None:
    created(shared)
    precious = shared.directory / "a" / "b" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"x")
    segment = seal(shared, store_state=StoreState.STORED, store_url=f"file://{precious}")
    assert shared.controller.janitor.delete_segments("gold", [segment]) == 1
    assert precious.exists()


# --- sweeping -----------------------------------------------------------------------------------------------------


def test_what_probes_and_dead_writers_left_is_swept(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    created(shared)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_SEEN_MS", 0)
    source = shared.directory / "object"
    source.write_bytes(b"x")
    theirs = "probe/0123456789abcdef/segment.1.parquet"  # of a table of that name, of another cluster
    for name in ("probe/00112233445566ff", theirs):
        shared.deep_store.put(name, source)
    (shared.share / "probe" / ".tmp-00112233445566ff").write_bytes(b"half")
    assert shared.controller.objects.sweep() == 1
    assert shared.controller.objects.sweep_unfinished() == 1
    assert [found.name for found in shared.deep_store.list("")] == [theirs]
    assert not list(shared.share.rglob(".tmp-*"))


def test_versions_that_a_record_names_stay_and_go_with_their_segment(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(shared)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_SEEN_MS", 0)
    controller = shared.controller
    incarnation = controller.catalog.tables["gold"].incarnation
    (shared.directory / "object").write_bytes(b"versions")
    named, unnamed = f"gold/{incarnation}/one.7.versions", f"gold/{incarnation}/one.5.versions"
    url, _ = (shared.deep_store.put(name, shared.directory / "object") for name in (named, unnamed))
    segment = stored(shared)
    at = Position(log_offset=7, epoch=7, generation=1, next_offset=7)
    versions = StoredVersions(url=url, position=at, size_bytes=8, file_checksum="sha256:00")
    with controller.catalog.lock:
        recorded = msgspec.structs.replace(now(shared, segment), versions=versions)
        controller.catalog.commit({segment_key("gold", segment.name): recorded})
    controller.objects.sweep()
    left = [found.name for found in shared.deep_store.list("gold/")]
    assert named in left
    assert unnamed not in left
    assert controller.janitor.delete_segments("gold", [recorded]) == 1
    assert shared.deep_store.list("gold/") == []


def test_an_object_that_is_recorded_in_the_moment_it_is_swept_is_uploaded_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(shared)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_SEEN_MS", 0)
    incarnation = shared.controller.catalog.tables["gold"].incarnation
    (shared.directory / "object").write_bytes(b"their rows")
    url = shared.deep_store.put(f"gold/{incarnation}/one.parquet", shared.directory / "object")
    delete, recorded = shared.deep_store.delete, list[SegmentMetadata]()

    def recorded_meanwhile(name: str) -> None:
        recorded.append(stored(shared))  # the same object is uploaded again: it is there already
        delete(name)

    monkeypatch.setattr(shared.deep_store, "delete", recorded_meanwhile)
    assert shared.controller.objects.sweep() == 1
    assert now(shared, recorded[0]).store_url == url
    advance(shared, STORE_LOOK_FIRST_MS)
    assert shared.controller.objects.look() == 1
    assert now(shared, recorded[0]).store_state is StoreState.FAILED


def test_what_is_deleted_while_the_store_is_away_goes_when_it_is_back(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(shared)
    deleted, kept = stored(shared), stored(shared, file="two.parquet")
    shared.share.rename(shared.directory / "unmounted")
    assert shared.controller.janitor.delete_segments("gold", [deleted]) == 1
    (shared.directory / "unmounted").rename(shared.share)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_OBJECT_AGE_MS", -1)
    monkeypatch.setattr("cremant.controller.objects.ORPHAN_SEEN_MS", 0)
    assert shared.controller.objects.sweep() == 1
    assert [found.name for found in shared.deep_store.list("")] == [shared.deep_store.name_of(kept.store_url or "")]
    shared.share.rename(shared.directory / "unmounted")
    shared.request("DELETE", "/tables/gold")
    advance(shared, 60_000)
    assert shared.controller.tables.finish_drops() == 0, "an empty place is no empty store"
    (shared.directory / "unmounted").rename(shared.share)
    assert shared.controller.tables.finish_drops() == 1
    assert [path.name for path in shared.share.iterdir()] == [MARKER]


def test_what_lands_late_of_a_dropped_table_goes_too(shared: Shared) -> None:
    """Its server was killed before it could tell: nobody knows the object."""
    created(shared)
    incarnation = shared.controller.catalog.tables["gold"].incarnation
    shared.request("DELETE", "/tables/gold")
    advance(shared, 60_000)
    assert shared.controller.tables.finish_drops() == 1
    assert "cremant_tables_being_removed 0.0" in shared.request("GET", "/metrics").text
    (shared.directory / "object").write_bytes(b"x")
    shared.deep_store.put(f"gold/{incarnation}/late.1.parquet", shared.directory / "object")
    assert shared.controller.tables.finish_drops() == 0
    shared.restart()
    advance(shared, 3 * 3_600_000)
    assert shared.controller.tables.finish_drops() == 1
    assert shared.deep_store.list("") == []
    assert shared.controller.catalog.drops == {}
