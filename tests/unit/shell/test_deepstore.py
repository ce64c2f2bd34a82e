# SPDX-License-Identifier: Apache-2.0
"""The guarded deep store: what hangs costs its deadline, what hangs for good nothing; and which store is meant."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from cremant.model.errors import DeadlineExceeded, InvalidConfig, NotFound, Unavailable
from cremant.model.settings import Settings
from cremant.shell.deepstore import GuardedStore, open_store, probe
from cremant.store.deepstore import MARKER, DirectoryStore, StoredObject, checksum_of
from cremant.store.open import has_store, store_directory, store_properties, store_uri


class Hanging(DirectoryStore):
    """A directory whose calls wait for a gate, as those of a share do whose server is gone."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.sizes_hang = True

    def put(self, name: str, source: Path) -> str:
        self.gate.wait(60)
        return super().put(name, source)

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        self.gate.wait(60)
        super().get(name, target, checksum=checksum)

    def size(self, name: str) -> int:
        if self.sizes_hang:
            self.gate.wait(60)
        return super().size(name)

    def delete(self, name: str) -> None:
        self.gate.wait(60)
        super().delete(name)

    def list(self, prefix: str) -> list[StoredObject]:
        self.gate.wait(60)
        return super().list(prefix)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(100_000))
    return path


def test_a_store_that_hangs_blocks_no_start(tmp_path: Path) -> None:
    """Opening asks nothing: neither the directory nor its marker are looked at."""
    share = tmp_path / "share"
    share.mkdir()
    os.mkfifo(share / MARKER)  # who reads it waits for ever, as on a share whose server is gone
    store = GuardedStore(DirectoryStore(share, marked=True), "there", call_ms=100)
    with pytest.raises(DeadlineExceeded, match="claim it: no answer within 100 ms"):
        store.claim("")
    began_s = time.monotonic()
    open_store(Settings(("test", {"store_uri": str(share)})))
    assert time.monotonic() - began_s < 5
    (share / MARKER).write_text("f" * 32)  # lets the reader go


def test_calls_go_through_and_say_what_the_store_says(tmp_path: Path, source: Path) -> None:
    store = GuardedStore(DirectoryStore(tmp_path / "store"), "file:///there")
    url = store.put("t/a", source)
    assert store.name_of(url) == "t/a"
    assert store.size("t/a") == 100_000
    store.get("t/a", tmp_path / "back", checksum=checksum_of(source))
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert [found.name for found in store.list("t/")] == ["t/a"]
    store.delete("t/a")
    with pytest.raises(NotFound):
        store.get("t/a", tmp_path / "back", checksum=None)
    assert probe(store, tmp_path) is None


def test_a_store_that_hangs_costs_its_deadline_then_nothing_and_is_used_again_when_it_is_back(
    tmp_path: Path, source: Path
) -> None:
    inner = Hanging(tmp_path / "store")
    store = GuardedStore(inner, "file:///there", call_ms=200, calls_max=3)
    store.put("t/a", source)
    inner.gate.clear()
    for call, words in (
        (lambda: store.put("t/b", source), "file:///there: put t/b: no answer within 225 ms"),
        (lambda: store.get("t/a", tmp_path / "back", checksum=None), "size t/a: no answer within 200 ms"),
        (lambda: store.delete("t/a"), "delete t/a: no answer within 200 ms"),
    ):
        with pytest.raises(DeadlineExceeded, match=words):
            call()
    before = threading.active_count()
    began_s = time.monotonic()
    for _ in range(100):  # all three threads hang: no fourth is given to it, nobody waits
        with pytest.raises(Unavailable, match="3 calls are waiting"):
            store.size("t/a")
    assert threading.active_count() == before
    assert time.monotonic() - began_s < 100 * 0.2
    assert "3 calls are waiting" in (probe(store, tmp_path) or "")
    inner.gate.set()
    until_s = time.monotonic() + 30
    while probe(store, tmp_path) is not None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_what_an_abandoned_download_brings_late_is_thrown_away(tmp_path: Path, source: Path) -> None:
    inner = Hanging(tmp_path / "store")
    inner.sizes_hang = False
    store = GuardedStore(inner, "file:///there", call_ms=100)
    store.put("t/a", source)
    inner.gate.clear()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "rows").write_bytes(b"from a peer")
    with pytest.raises(DeadlineExceeded, match="get t/a"):
        store.get("t/a", scratch / "rows", checksum=None)
    sealed = scratch.rename(tmp_path / "sealed")
    inner.gate.set()
    until_s = time.monotonic() + 30
    while any(thread.name == "deep-store" for thread in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert [path.name for path in sealed.iterdir()] == ["rows"]
    assert (sealed / "rows").read_bytes() == b"from a peer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sealed", "source", "store"]


def test_what_is_in_the_store_that_was_used_before_is_still_read(tmp_path: Path, source: Path) -> None:
    before = open_store(settings(tmp_path))
    url = before.put("gold/1f/one.parquet", source)
    now = open_store(settings(tmp_path, store_uri=str(tmp_path / "share")))
    now.claim("")
    with pytest.raises(InvalidConfig):
        now.name_of(url)
    store, name = now.by_url(url)
    store.get(name, tmp_path / "back", checksum=checksum_of(source))
    assert now.by_url(url)[0] is store
    own = now.put("gold/1f/two.parquet", source)
    assert now.by_url(own) == (now, "gold/1f/two.parquet")
    for wrong in ("file://elsewhere/a/b/c", "ftp://a/b/c/d", "", "peer:///one", "s3:///a/b/c", f"{url}/../x"):
        with pytest.raises(InvalidConfig):
            now.by_url(wrong)


def settings(tmp_path: Path, **values: object) -> Settings:
    return Settings(("test", {"data_dir": str(tmp_path / "data"), **values}))


def test_which_store_the_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = settings(tmp_path)
    assert store_uri(embedded) == f"embedded:{tmp_path}/data/store"
    assert not has_store(embedded)
    assert not has_store(settings(tmp_path, store_uri=store_uri(embedded)))  # as `up` hands it to the roles
    assert store_directory(settings(tmp_path, store_uri=store_uri(embedded))) == tmp_path / "data" / "store"
    for text in (f"{tmp_path}/a b", f"file://{tmp_path}/a b"):
        chosen = settings(tmp_path, store_uri=text)
        assert store_directory(chosen) == tmp_path / "a b"
        assert has_store(chosen)
        assert store_uri(chosen) == f"file://{tmp_path}/a b"
    monkeypatch.setenv("KEY", "hush")
    (tmp_path / "s3.properties").write_text("region=eu-west-1\nsecret_access_key=${env:KEY}\naccess_key_id=me\n")
    s3 = settings(tmp_path, store_uri="s3://bucket/prefix/", store_properties=str(tmp_path / "s3.properties"))
    assert (store_uri(s3), store_directory(s3), has_store(s3)) == ("s3://bucket/prefix", None, True)
    assert store_properties(s3)["secret_access_key"] == "hush"
    assert open_store(s3).name_of("s3://bucket/prefix/t/a") == "t/a"  # opening asks the service nothing
    for wrong in ("hdfs://somewhere/x", "s3://", "http://host/x"):
        with pytest.raises(InvalidConfig, match="store_uri"):
            open_store(settings(tmp_path, store_uri=wrong))
    with pytest.raises(InvalidConfig, match=r"store_properties: .*nothing.* cannot be read"):
        open_store(settings(tmp_path, store_uri="s3://b", store_properties=str(tmp_path / "nothing")))
    monkeypatch.delenv("KEY")
    with pytest.raises(InvalidConfig, match=r"secret_access_key: .*KEY"):
        open_store(s3)
