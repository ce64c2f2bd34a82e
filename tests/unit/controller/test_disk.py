# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, directories that are not ours, files that are damaged: said clearly, and survived."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control import Cluster, StillClock, schema, table

from cremant.controller.main import run_controller
from cremant.model.cluster import InstanceReport, Role, SegmentReport
from cremant.model.errors import Corrupt, CremantError, NoResource
from cremant.model.segments import ReplicaState
from cremant.model.settings import Settings
from cremant.store.sqlite import SqliteMetadataStore


class SqliteCluster(Cluster):
    """On a metadata store on disk."""

    def start(self) -> None:
        self.store = SqliteMetadataStore(self.directory / "metadata.db")  # type: ignore[assignment]
        super().start()

    def fill_disk(self) -> None:
        """No page more than there are."""
        database = self.store._db  # type: ignore[attr-defined]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count={pages}")

    def free_disk(self) -> None:
        self.store._db.execute("PRAGMA max_page_count=1000000")  # type: ignore[attr-defined]


def _wide(name: str) -> dict[str, Any]:
    """A schema that needs some pages."""
    return {**schema(name), "tags": ["x" * 1000] * 100}


def test_a_full_disk_refuses_changes_clearly_and_they_work_when_there_is_room_again(tmp_path: Path) -> None:
    cluster = SqliteCluster(tmp_path, clock=StillClock())
    try:
        made = cluster.create(replication=1)
        before = cluster.get("/schemas"), cluster.get("/tables"), cluster.get("/tables/gold")
        cluster.fill_disk()
        error = cluster.post("/schemas", _wide("silver"), status=500)["error"]
        assert "metadata.db cannot be written: database or disk is full; nothing was changed (free some space" in error
        assert (cluster.get("/schemas"), cluster.get("/tables"), cluster.get("/tables/gold")) == before
        for _ in range(40):  # whatever a heartbeat wants written may wait
            sealed = SegmentReport(table="gold", segment="nothing", state=ReplicaState.ONLINE)
            answer = cluster.beat("Server_127.0.0.1_8098", report=InstanceReport(segments=(sealed,)))
            assert answer.status_code == 200
        assert cluster.view().tables["gold"].record == made.record
        cluster.free_disk()
        cluster.post("/schemas", _wide("silver"))
        cluster.post("/tables", table("silver"))
        cluster.restart()
        assert cluster.get("/tables") == {"tables": ["gold", "silver"]}
    finally:
        cluster.close()


def _run(directory: Path) -> None:
    run_controller(Settings(("test", {"data_dir": str(directory)})), port=0, insecure=False)


def _is_file(directory: Path) -> None:
    directory.write_text("not a directory")


def _not_a_database(directory: Path) -> None:
    directory.mkdir()
    (directory / "metadata.db").write_bytes(b"this is not a database" * 1000)


def _of_another_program(directory: Path) -> None:
    directory.mkdir()
    database = sqlite3.connect(directory / "metadata.db")
    database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.commit()
    database.close()


def _of_a_newer_version(directory: Path) -> None:
    directory.mkdir()
    database = sqlite3.connect(directory / "metadata.db")
    database.execute("PRAGMA user_version=99")
    database.close()


def _is_directory(directory: Path) -> None:
    (directory / "metadata.db").mkdir(parents=True)


def _bad_record(directory: Path) -> None:
    store = SqliteMetadataStore(directory / "metadata.db")
    store._db.execute("INSERT INTO entries VALUES ('/tables/gold', x'7b7d', 1)")
    store.close()


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (_is_file, NoResource, "cannot be used: .*must be a directory that this user may write"),
        (_not_a_database, Corrupt, "metadata.db is not a metadata store, or a damaged one: file is not a database"),
        (_of_another_program, Corrupt, "is a database of another program"),
        (_of_a_newer_version, Corrupt, "has format 99, this version reads 1 .use a newer Cremant"),
        (_is_directory, NoResource, "metadata.db cannot be written: unable to open database file"),
        (_bad_record, Corrupt, "metadata record /tables/gold cannot be read: Object missing required field"),
    ],
)
def test_a_directory_that_cannot_be_led_is_refused_before_anything_is_served(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[CremantError], words: str
) -> None:
    directory = tmp_path / "data"
    spoil(directory)
    with pytest.raises(error, match=words):
        _run(directory)


def test_a_directory_of_another_program_is_left_as_it_was(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    _of_another_program(directory)
    before = (directory / "metadata.db").read_bytes()
    with pytest.raises(Corrupt):
        _run(directory)
    database = sqlite3.connect(directory / "metadata.db")
    assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    database.close()
    assert len(before) == (directory / "metadata.db").stat().st_size


def test_damage_found_while_reading_is_named(tmp_path: Path) -> None:
    store = SqliteMetadataStore(tmp_path / "metadata.db")
    store._db.execute("DROP TABLE entries")
    with pytest.raises(Corrupt, match="a damaged one: no such table"):
        store.list("/tables/")
    store.close()


def test_members_of_every_role_are_heard_while_the_disk_is_full(tmp_path: Path) -> None:
    cluster = SqliteCluster(tmp_path, clock=StillClock())
    try:
        cluster.beat("Server_a_1")
        cluster.fill_disk()
        for _ in range(3):
            assert cluster.beat("Server_a_1", Role.SERVER).status_code == 200
    finally:
        cluster.close()
