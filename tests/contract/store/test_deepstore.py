# SPDX-License-Identifier: Apache-2.0
"""The contract of deep stores, for every implementation: a directory, and S3 (a server in a process of its own)."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from bench.s3 import LOGIN, S3Server

from cremant.model.errors import AlreadyExists, Corrupt, InvalidConfig, NoResource, NotFound, Unavailable
from cremant.store import s3
from cremant.store.deepstore import DeepStore, DirectoryStore, checksum_of, segment_object
from cremant.store.s3 import S3Store


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def s3_store(server: S3Server, prefix: str = "segments/of") -> S3Store:
    """In a bucket of its own."""
    bucket = f"bucket-{secrets.token_hex(6)}"
    server.make_bucket(bucket)
    return S3Store(f"s3://{bucket}/{prefix}", {"endpoint": server.endpoint, **LOGIN})


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DeepStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    return s3_store(request.getfixturevalue("s3_server"))


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def overwrite(store: DeepStore, name: str, content: bytes) -> None:
    """What only a fault or a foreign hand does."""
    if isinstance(store, DirectoryStore):
        (store.root / name).write_bytes(content)
    else:
        assert isinstance(store, S3Store)
        obstore.put(store._client, name, content)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "segment.parquet"
    path.write_bytes(os.urandom(3_000_000))
    return path


def test_what_was_put_comes_back_verified(store: DeepStore, source: Path, tmp_path: Path) -> None:
    name = segment_object("gold", "a" * 16, "gold__0__0__20260101T0000Z", 1, "sha256:" + "0f" * 32)
    url = store.put(name, source)
    assert store.name_of(url) == name
    assert store.size(name) == source.stat().st_size
    store.get(name, tmp_path / "back", checksum=checksum_of(source))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_the_same_bytes_again_are_no_error_but_other_bytes_are(store: DeepStore, source: Path) -> None:
    store.put("t/a", source)
    store.put("t/a", source)
    before = source.read_bytes()
    source.write_bytes(b"other")
    with pytest.raises(AlreadyExists, match="t/a"):
        store.put("t/a", source)
    overwrite(store, "t/b", b"other")  # by a writer that said nothing of its checksum
    store.put("t/b", source)
    source.write_bytes(before)
    with pytest.raises(AlreadyExists, match="t/b"):
        store.put("t/b", source)


def test_an_object_too_large_for_one_request_comes_in_parts(
    s3_server: S3Server, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "STORE_PUT_ONCE_BYTES_MAX", 1_000)
    store = s3_store(s3_server)
    with source.open("ab") as file:
        file.write(os.urandom(20_000_000))
    store.put("t/a", source)
    store.put("t/a", source)
    store.get("t/a", tmp_path / "back", checksum=checksum_of(source))
    source.write_bytes(b"x" * 2_000)
    with pytest.raises(AlreadyExists, match="t/a"):
        store.put("t/a", source)


def test_damaged_bytes_are_refused_and_replace_nothing(store: DeepStore, source: Path, tmp_path: Path) -> None:
    checksum = checksum_of(source)
    store.put("t/a", source)
    damaged = bytearray(source.read_bytes())
    damaged[1_000_000] ^= 1
    overwrite(store, "t/a", bytes(damaged))
    target = tmp_path / "target"
    target.write_bytes(b"good")
    with pytest.raises(Corrupt, match="t/a"):
        store.get("t/a", target, checksum=checksum)
    assert target.read_bytes() == b"good"
    assert [path.name for path in tmp_path.glob(".tmp*")] == []


def test_a_missing_object_is_not_found(store: DeepStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        store.get("t/nothing", tmp_path / "x", checksum=None)
    with pytest.raises(NotFound):
        store.size("t/nothing")
    store.delete("t/nothing")


def test_a_file_that_is_gone_is_not_the_stores_fault(store: DeepStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing cannot be uploaded"):
        store.put("t/a", tmp_path / "nothing")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "a/.hidden", "a\x00b", "a/"])
def test_names_cannot_leave_the_store(store: DeepStore, source: Path, name: str) -> None:
    for call in (lambda: store.put(name, source), lambda: store.size(name), lambda: store.delete(name)):
        with pytest.raises(InvalidConfig):
            call()


def test_urls_of_other_places_are_refused(store: DeepStore, source: Path) -> None:
    inside = store.put("t/a", source)
    for url in ("file:///etc/passwd", "s3://bucket/x", inside.replace("t/a", "../x"), "", "t/a"):
        with pytest.raises(InvalidConfig):
            store.name_of(url)


def test_delete_removes_the_object_and_empty_directories_only(store: DeepStore, source: Path) -> None:
    store.put("t/one/a", source)
    store.put("t/two/b", source)
    store.delete("t/one/a")
    store.delete("t/one/a")
    assert [found.name for found in store.list("")] == ["t/two/b"]
    assert not isinstance(store, DirectoryStore) or not (store.root / "t" / "one").exists()


def test_list_shows_name_size_and_age(store: DeepStore, source: Path) -> None:
    store.put("t/a", source)
    (found,) = store.list("t/")
    assert (found.name, found.size_bytes) == ("t/a", 3_000_000)
    assert 0 <= found.age_ms < 600_000
    assert store.list("u/") == []
    source.write_bytes(b"x")
    for name in ("t/inner/b", "t/ab", "ta"):
        store.put(name, source)
    assert [found.name for found in store.list("")] == ["t/a", "t/ab", "t/inner/b", "ta"]
    assert [found.name for found in store.list("t/a")] == ["t/a", "t/ab"]
    assert [found.name for found in store.list("t/inner/")] == ["t/inner/b"]
    if isinstance(store, DirectoryStore):
        os.utime(store.root / "t" / "a", (time.time() - 100, time.time() - 100))
        assert 99_000 < store.list("t/a")[0].age_ms < 600_000


def test_a_store_that_cannot_be_written_is_unavailable(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable):
        DirectoryStore(tmp_path / "file").put("t/a", source)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    nobody = S3Store("s3://bucket/x", {"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"})
    for call in (
        lambda: nobody.put("t/a", source), lambda: nobody.get("t/a", tmp_path / "x", checksum=None),
        lambda: nobody.size("t/a"), lambda: nobody.delete("t/a"), lambda: nobody.list(""),
    ):  # fmt: skip
        with pytest.raises(Unavailable, match="s3://bucket/x"):
            call()
    assert not (tmp_path / "x").exists()


def test_what_the_client_of_s3_cannot_be_told_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="unknown colour"):
        S3Store("s3://bucket", {"colour": "red"})


def test_a_chosen_directory_is_claimed_once_and_nothing_else_makes_it(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "share" / "store"
    server, controller = DirectoryStore(root, marked=True), DirectoryStore(root, marked=True)
    with pytest.raises(Unavailable, match=f"{root} has no file .cremant-store.*is the share mounted"):
        server.put("t/a", source)
    assert not root.exists()
    known = controller.claim("")
    assert len(known) == 32
    assert [controller.claim(""), controller.claim(known), DirectoryStore(root, marked=True).claim("")] == [known] * 3
    server.put("t/a", source)
    assert [found.name for found in server.list("")] == ["t/a"]
    assert sorted(path.name for path in root.iterdir()) == [".cremant-store", "t"]
    (root / ".cremant-store").write_text("f" * 32)  # what a server saw first was not the right share
    server.put("t/b", source)
    with pytest.raises(Unavailable, match=f"expected id {known}.*found ffff"):
        controller.put("t/c", source)


def test_a_bucket_made_anew_is_not_the_one_that_was_claimed(s3_server: S3Server, source: Path) -> None:
    store = s3_store(s3_server)
    known = store.claim("")
    assert len(known) == 32
    assert [store.claim(""), store.claim(known)] == [known] * 2
    store.put("t/a", source)
    assert [found.name for found in store.list("")] == ["t/a"]
    with pytest.raises(Unavailable, match=f"expected id {known} in its object .cremant-store, found none"):
        s3_store(s3_server).claim(known)
    nowhere = S3Store("s3://no-such-bucket/segments", {"endpoint": s3_server.endpoint, **LOGIN})
    with pytest.raises(Unavailable, match="is not the one that it was"):
        nowhere.claim(known)
    with pytest.raises((Unavailable, NotFound)):
        nowhere.claim("")


@pytest.mark.parametrize("left", ["an empty mount point", "nothing", "another store"])
def test_a_share_that_is_not_mounted_takes_nothing_and_loses_nothing(left: str, tmp_path: Path, source: Path) -> None:
    root = tmp_path / "store"
    store, restarted = DirectoryStore(root, marked=True), DirectoryStore(root, marked=True)
    known = store.claim("")
    store.put("t/a", source)
    root.rename(tmp_path / "away")
    if left != "nothing":
        root.mkdir()
    if left == "another store":
        (root / ".cremant-store").write_text("f" * 32)
    for call in (
        lambda: store.put("t/b", source), lambda: store.get("t/a", tmp_path / "x", checksum=None),
        lambda: store.size("t/a"), lambda: store.delete("t/a"), lambda: store.list("t/"),
    ):  # fmt: skip
        with pytest.raises(Unavailable, match="share mounted"):
            call()
    with pytest.raises(Unavailable, match=f"expected id {known}.*is the share mounted"):
        restarted.claim(known)
    assert not root.exists() or {path.name for path in root.iterdir()} <= {".cremant-store"}
    shutil.rmtree(root, ignore_errors=True)
    (tmp_path / "away").rename(root)
    assert restarted.claim(known) == known
    store.put("t/b", source)
    assert [found.name for found in store.list("")] == ["t/a", "t/b"]


def test_a_full_disk_of_ours_is_not_the_stores_fault(
    directory: DirectoryStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.put("t/a", source)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoResource, match=f"cannot write {tmp_path / 'back'}/"):
        directory.get("t/a", tmp_path / "back" / "a", checksum=None)
    with pytest.raises(NoResource, match=r"deep store .* is full"):
        directory.put("t/b", source)


def test_unfinished_files_of_others_stay(directory: DirectoryStore, source: Path) -> None:
    """The directory may be used for other things, too."""
    directory.put("t/a", source)
    theirs = [directory.root / name for name in ("their.tmp-old/file", "t/.tmp-theirs", "t/x.tmp-0123456789abcdef")]
    for path in (*theirs, directory.root / "t/.tmp-0123456789abcdef"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert directory.sweep(-1) == 1
    assert all(path.exists() for path in theirs)


def test_what_cannot_be_listed_is_not_taken_for_empty(directory: DirectoryStore, source: Path) -> None:
    assert directory.list("t/") == [], "nobody has written yet"
    directory.root.write_bytes(b"a file in its place")
    for call in (lambda: directory.list(""), lambda: directory.size("t/a"), lambda: directory.delete("t/a")):
        with pytest.raises(Unavailable):
            call()


def test_file_systems_without_hard_links_hold_objects_too(
    directory: DirectoryStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    directory.put("t/a", source)
    directory.put("t/a", source)
    assert checksum_of(directory.root / "t" / "a") == checksum_of(source)
    source.write_bytes(b"other")
    with pytest.raises(AlreadyExists, match="t/a"):
        directory.put("t/a", source)
    assert not list(directory.root.rglob(".tmp-*"))


_UPLOADER = """
import sys
from pathlib import Path
from cremant.store.deepstore import DirectoryStore
store = DirectoryStore(sys.argv[1])
number = int(sys.argv[3])
print("go", flush=True)
while True:
    number += 1
    store.put(f"t/{number}", Path(sys.argv[2]))
"""


def test_kill_9_while_uploading_leaves_whole_objects_and_sweepable_temporaries(
    directory: DirectoryStore, source: Path
) -> None:
    store = directory
    checksum = checksum_of(source)
    for attempt in range(5):
        arguments = [sys.executable, "-c", _UPLOADER, str(store.root), str(source), str(attempt * 10_000)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.01 + 0.007 * attempt)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for found in store.list("t/"):
        assert checksum_of(store.root / found.name) == checksum
    store.sweep(older_than_ms=-1)
    assert not list(store.root.rglob(".tmp-*"))
    (store.root / "u" / "inner").mkdir(parents=True)
    (store.root / "u" / "inner" / ".tmp-0123456789abcdef").write_bytes(b"half")
    assert store.sweep(older_than_ms=-1) == 1
    assert not (store.root / "u").exists(), "nor the directories that it was alone in"
