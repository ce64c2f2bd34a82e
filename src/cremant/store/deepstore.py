# SPDX-License-Identifier: Apache-2.0
"""The deep store: sealed segments, written once, read back whole and verified.

Rules: an object appears whole or not at all; its name is never written twice with other bytes; every read is checked
against the checksum the caller expects. Checksums here are over the object's bytes, spelled `sha256:<hex>`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from cremant.model.errors import AlreadyExists, Corrupt, InvalidConfig, NoResource, NotFound, Unavailable
from cremant.store.files import CHUNK_BYTES, copy_synced, discard, place, sync, writing

_PART = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")
_TEMPORARY = ".tmp-"
#: Ours alone: the directory may have files of others.
_UNFINISHED = re.compile(r"^\.tmp-[0-9a-f]{16}$")
#: In the root of a directory or below the prefix of a bucket that was chosen: its id.
MARKER = ".cremant-store"


class StoredObject(NamedTuple):
    """`age_ms` by the store's clock: what nobody names and is old enough is swept."""

    name: str
    size_bytes: int
    age_ms: int


class DeepStore(Protocol):
    """Names are relative paths of letters, digits, `_`, `-`, `.`; parts separated by `/`. Thread-safe."""

    @property
    def uri(self) -> str:
        """Which store this is; the URLs of its objects begin with it."""

    def put(self, name: str, source: Path) -> str:
        """Uploads a file; returns its URL. The same bytes again are no error; other bytes under a name that is taken
        raise AlreadyExists. Raises NotFound (of the file), NoResource, Unavailable."""

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        """Downloads into `target` (replaced only by verified bytes). Raises NotFound, Corrupt, Unavailable."""

    def size(self, name: str) -> int:
        """Bytes of an object. Raises NotFound, Unavailable."""

    def delete(self, name: str) -> None:
        """No error if it is not there."""

    def list(self, prefix: str) -> list[StoredObject]:
        """Objects whose name begins with `prefix`, by name."""

    def name_of(self, url: str) -> str:
        """The name in a URL that `put` returned. Raises InvalidConfig for a URL of another store."""

    def by_url(self, url: str) -> tuple[DeepStore, str]:
        """The store and the name in it that a URL means: this store, or one that was in use before it, as far as it
        can be reached. Raises InvalidConfig."""

    def claim(self, known: str) -> str:
        """Makes the place ready the first time; for whoever keeps `known`, the id that it had then ("" = none yet).
        Returns its id, "" of a store that needs none. Raises Unavailable when this is not the place it was."""

    def sweep(self, older_than_ms: int) -> int:
        """Removes what writers that died have left unfinished. Returns how many."""


def segment_object(table: str, incarnation: str, segment: str, token: int, file_checksum: str) -> str:
    """Name of a segment's object, by attempt and content: neither the late upload of a stale committer nor a repair by
    another replica can be mistaken for it or be in its way. `file_checksum` is spelled `sha256:<hex>`."""
    return f"{table}/{incarnation}/{segment}.{token}.{file_checksum.rpartition(':')[2][:12]}.parquet"


def versions_object(table: str, incarnation: str, segment: str, log_offset: int, file_checksum: str) -> str:
    """Name of the versions of a segment of an upsert table as of a position of the epoch log, by their content."""
    return f"{table}/{incarnation}/{segment}.{log_offset}.{file_checksum.rpartition(':')[2][:12]}.versions"


def another_name(name: str) -> str:
    """For the same bytes, when the name that `segment_object` gave is taken by damaged ones."""
    return f"{name.removesuffix('.parquet')}-{secrets.token_hex(4)}.parquet"


def table_prefix(table: str, incarnation: str) -> str:
    return f"{table}/{incarnation}/"


def is_in(store: DeepStore, url: str) -> bool:
    """Not in one that was in use before."""
    try:
        store.name_of(url)
    except InvalidConfig:
        return False
    return True


def delete_by_url(store: DeepStore, url: str, prefix: str, known_id: Callable[[str], str]) -> None:
    """In whichever store it is; `known_id`: URI of a store -> what it must be, "" = it was never claimed. Raises
    InvalidConfig for what is no object below `prefix`, Unavailable."""
    where, name = store.by_url(url)
    if not name.startswith(prefix):
        raise InvalidConfig(f"{url!r} is no object of {prefix}")
    if known := known_id(where.uri):
        where.claim(known)
    where.delete(name)


def check_readable(source: Path) -> None:
    """Raises NotFound: what is wrong with our own file says nothing of the store."""
    try:
        source.open("rb").close()
    except OSError as error:
        raise NotFound(f"{source} cannot be uploaded: {error.strerror}") from error


def checksum_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def check_object_name(name: str) -> str:
    """Raises InvalidConfig for anything that could leave the store's directory."""
    if len(name) > 1024 or not all(_PART.match(part) for part in name.split("/")):
        raise InvalidConfig(f"deep store name {name!r} is not allowed")
    return name


class DirectoryStore:
    """Objects as files below one directory, which may be a mounted share.

    Written as a temporary in the same directory, synced, renamed with the directory synced: kill -9 leaves at most a
    temporary, which `sweep` removes.

    `marked`: the directory must have a marker file, which `claim` makes once. Without it nothing is written, and
    nothing is believed to be missing: a share that is not mounted leaves an empty directory, or none, in its place.
    """

    def __init__(self, root: str | Path, *, marked: bool = False) -> None:
        self.root = Path(root).absolute()
        self._marked = marked
        #: What the marker must say, if this process has claimed it. Others take any: who claims knows which is right.
        self._id = ""

    @property
    def uri(self) -> str:
        return f"file://{self.root}"

    def _path(self, name: str) -> Path:
        return self.root / check_object_name(name)

    def claim(self, known: str) -> str:
        if not (self._marked or known):
            return ""
        try:
            found = self._marker()
            if not found and not known:
                found = self._mark()
        except OSError as error:
            raise _store_error(self.root, error) from error
        if known and found != known:
            raise Unavailable(
                f"deep store {self.root} is not the one that it was: expected id {known} in its file {MARKER}, found "
                f"{found or 'none'}",
                hint=f"is the share mounted? if it moved there for good, write {known} into {self.root / MARKER}",
            )
        self._id, self._marked = found, True
        return found

    def _mark(self) -> str:
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(f"{secrets.token_hex(16)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another was faster
                place(temporary, self.root / MARKER)
        finally:
            discard(temporary)
        return self._marker()

    def _marker(self) -> str:
        """Its id; "" = there is no marker."""
        try:
            return (self.root / MARKER).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _check_marker(self) -> None:
        """Raises Unavailable when this is not the directory that was claimed."""
        if not self._marked:
            return
        try:
            found = self._marker()
        except OSError as error:
            raise _store_error(self.root, error) from error
        if not found:
            raise Unavailable(
                f"deep store {self.root} has no file {MARKER}, nothing is written to it",
                hint="is the share mounted? the controller makes that file when it uses a directory the first time",
            )
        if self._id and found != self._id:
            raise Unavailable(
                f"deep store {self.root} is another one: expected id {self._id} in its file {MARKER}, found {found}",
                hint="is the right share mounted?",
            )

    def put(self, name: str, source: Path) -> str:
        target = self._path(name)
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        self._check_marker()
        check_readable(source)
        try:
            # A root that went since is not made again: that would be a directory of this machine.
            self._make_directories(target.parent)
            copy_synced(source, temporary)
            try:
                place(temporary, target)
                sync(target.parent)
            except FileExistsError:
                if checksum_of(target) != checksum_of(temporary):
                    raise AlreadyExists(f"deep store object {name} exists with other bytes") from None
        except OSError as error:
            raise _store_error(self.root, error) from error
        finally:
            discard(temporary)
        return f"file://{target}"

    def _make_directories(self, directory: Path) -> None:
        if not self._marked:
            self.root.mkdir(parents=True, exist_ok=True)
        below = directory.relative_to(self.root).parts
        for depth in range(len(below)):
            self.root.joinpath(*below[: depth + 1]).mkdir(exist_ok=True)

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        path = self._path(name)
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as reader, writing(temporary) as write:
                while chunk := reader.read(CHUNK_BYTES):
                    write(chunk)
            if checksum is not None and (found := checksum_of(temporary)) != checksum:
                raise Corrupt(f"deep store object {name}: expected {checksum}, found {found}")
            temporary.replace(target)
        except FileNotFoundError:
            self._check_marker()
            raise NotFound(f"deep store has no object {name}") from None
        except OSError as error:
            raise _store_error(self.root, error) from error
        finally:
            discard(temporary)

    def size(self, name: str) -> int:
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            self._check_marker()
            raise NotFound(f"deep store has no object {name}") from None
        except OSError as error:
            raise _store_error(self.root, error) from error

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._check_marker()
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _store_error(self.root, error) from error
        self._remove_empty(path.parent)

    def list(self, prefix: str) -> list[StoredObject]:
        try:
            found = sorted(one for one in self._walk(prefix) if not _is_unfinished(one) and one.name != MARKER)
        except OSError as error:
            raise _store_error(self.root, error) from error
        self._check_marker()
        return found

    def sweep(self, older_than_ms: int) -> int:
        try:
            dead = [found for found in self._walk() if _is_unfinished(found) and found.age_ms > older_than_ms]
        except OSError as error:
            raise _store_error(self.root, error) from error
        for found in dead:
            path = self.root / found.name
            discard(path)
            self._remove_empty(path.parent)
        return len(dead)

    def _remove_empty(self, directory: Path) -> None:
        """It and those above it, as far as they are empty, below the root."""
        while directory != self.root:
            try:
                directory.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                    return
                raise _store_error(self.root, error) from error
            directory = directory.parent

    def _walk(self, prefix: str = "") -> Iterator[StoredObject]:
        now_s = time.time()
        for directory, _, files in os.walk(self.root / prefix.rpartition("/")[0], onerror=_unless_gone):
            for file in files:
                path = Path(directory) / file
                try:
                    status = path.stat()
                except FileNotFoundError:  # deleted meanwhile
                    continue
                name = path.relative_to(self.root).as_posix()
                if name.startswith(prefix):
                    yield StoredObject(name, status.st_size, max(0, int((now_s - status.st_mtime) * 1000)))

    def name_of(self, url: str) -> str:
        prefix = f"{self.uri}/"
        if not url.startswith(prefix):
            raise InvalidConfig(f"{url!r} is not in the deep store {self.root}")
        return check_object_name(url.removeprefix(prefix))

    def by_url(self, url: str) -> tuple[DeepStore, str]:
        return self, self.name_of(url)


def _is_unfinished(found: StoredObject) -> bool:
    return _UNFINISHED.match(found.name.rpartition("/")[2]) is not None


def _unless_gone(error: OSError) -> None:
    """What a walk could not list is not to be taken for empty."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _store_error(root: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoResource(f"deep store {root} is full: {error}")
    return Unavailable(f"deep store {root} failed: {error}")
