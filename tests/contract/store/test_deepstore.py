# SPDX-License-Identifier: Apache-2.0
"""The contract of deep stores, for every implementation (so far: a directory)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cremant.model.errors import AlreadyExists, Corrupt, InvalidConfig, NotFound, Unavailable
from cremant.store.deepstore import DirectoryStore, checksum_of, segment_object


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "segment.parquet"
    path.write_bytes(os.urandom(3_000_000))
    return path


def test_what_was_put_comes_back_verified(store: DirectoryStore, source: Path, tmp_path: Path) -> None:
    name = segment_object("gold", "a" * 16, "gold__0__0__20260101T0000Z", 1)
    url = store.put(name, source)
    assert store.name_of(url) == name
    assert store.exists(name)
    store.get(name, tmp_path / "back", checksum=checksum_of(source))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_the_same_bytes_again_are_no_error_but_other_bytes_are(store: DirectoryStore, source: Path) -> None:
    store.put("t/a", source)
    store.put("t/a", source)
    source.write_bytes(b"other")
    with pytest.raises(AlreadyExists, match="t/a"):
        store.put("t/a", source)


def test_damaged_bytes_are_refused_and_replace_nothing(store: DirectoryStore, source: Path, tmp_path: Path) -> None:
    checksum = checksum_of(source)
    store.put("t/a", source)
    damaged = bytearray(source.read_bytes())
    damaged[1_000_000] ^= 1
    (store.root / "t" / "a").write_bytes(damaged)
    target = tmp_path / "target"
    target.write_bytes(b"good")
    with pytest.raises(Corrupt, match="t/a"):
        store.get("t/a", target, checksum=checksum)
    assert target.read_bytes() == b"good"
    assert [path.name for path in tmp_path.glob(".tmp*")] == []


def test_a_missing_object_is_not_found(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        store.get("t/nothing", tmp_path / "x", checksum=None)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "a/.hidden", "a\x00b", "a/"])
def test_names_cannot_leave_the_store(store: DirectoryStore, source: Path, name: str) -> None:
    for call in (lambda: store.put(name, source), lambda: store.exists(name), lambda: store.delete(name)):
        with pytest.raises(InvalidConfig):
            call()


def test_urls_of_other_places_are_refused(store: DirectoryStore) -> None:
    for url in ("file:///etc/passwd", "s3://bucket/x", f"file://{store.root}/../x"):
        with pytest.raises(InvalidConfig):
            store.name_of(url)


def test_delete_removes_the_object_and_empty_directories_only(store: DirectoryStore, source: Path) -> None:
    store.put("t/one/a", source)
    store.put("t/two/b", source)
    store.delete("t/one/a")
    store.delete("t/one/a")
    assert [found.name for found in store.list("")] == ["t/two/b"]
    assert not (store.root / "t" / "one").exists()


def test_list_shows_name_size_and_age(store: DirectoryStore, source: Path) -> None:
    store.put("t/a", source)
    os.utime(store.root / "t" / "a", (time.time() - 100, time.time() - 100))
    (found,) = store.list("t/")
    assert (found.name, found.size_bytes) == ("t/a", 3_000_000)
    assert 99_000 < found.age_ms < 110_000
    assert store.list("u/") == []


def test_a_store_that_cannot_be_written_is_unavailable(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable):
        DirectoryStore(tmp_path / "file").put("t/a", source)


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
    store: DirectoryStore, source: Path
) -> None:
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
