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
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from cremant.model.errors import AlreadyExists, Corrupt, InvalidConfig, NoResource, NotFound, Unavailable

_CHUNK = 1024 * 1024
_PART = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")
_TEMPORARY = ".tmp-"


class StoredObject(NamedTuple):
    """`age_ms` by the store's clock: what nobody names and is old enough is swept."""

    name: str
    size_bytes: int
    age_ms: int


class DeepStore(Protocol):
    """Names are relative paths of letters, digits, `_`, `-`, `.`; parts separated by `/`. Thread-safe."""

    def put(self, name: str, source: Path) -> str:
        """Uploads a file; returns its URL. The same bytes again are no error; other bytes under a name that is taken
        raise AlreadyExists. Raises NoResource, Unavailable."""

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        """Downloads into `target` (replaced only by verified bytes). Raises NotFound, Corrupt, Unavailable."""

    def exists(self, name: str) -> bool: ...

    def delete(self, name: str) -> None:
        """No error if it is not there."""

    def list(self, prefix: str) -> list[StoredObject]:
        """Objects whose name begins with `prefix`, by name."""

    def name_of(self, url: str) -> str:
        """The name in a URL that `put` returned. Raises InvalidConfig for a URL of another store."""


def segment_object(table: str, incarnation: str, segment: str, token: int) -> str:
    """Name of a segment's object: the commit token keeps a stale committer's late upload from being mistaken."""
    return f"{table}/{incarnation}/{segment}.{token}.parquet"


def table_prefix(table: str, incarnation: str) -> str:
    return f"{table}/{incarnation}/"


def checksum_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
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
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    def _path(self, name: str) -> Path:
        return self.root / check_object_name(name)

    def put(self, name: str, source: Path) -> str:
        target = self._path(name)
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_synced(source, temporary)
            try:
                os.link(temporary, target)  # fails when the name is taken: put-if-absent, atomically
                _sync_directory(target.parent)
            except FileExistsError:
                if checksum_of(target) != checksum_of(temporary):
                    raise AlreadyExists(f"deep store object {name} exists with other bytes") from None
        except OSError as error:
            raise _store_error(self.root, error) from error
        finally:
            _discard(temporary)
        return f"file://{target}"

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_synced(self._path(name), temporary)
            if checksum is not None and (found := checksum_of(temporary)) != checksum:
                raise Corrupt(f"deep store object {name}: expected {checksum}, found {found}")
            temporary.replace(target)
        except FileNotFoundError:
            raise NotFound(f"deep store has no object {name}") from None
        except OSError as error:
            raise _store_error(self.root, error) from error
        finally:
            _discard(temporary)

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self.root:
                    break
                parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                raise _store_error(self.root, error) from error

    def list(self, prefix: str) -> list[StoredObject]:
        return sorted(found for found in self._walk() if found.name.startswith(prefix) and _TEMPORARY not in found.name)

    def sweep(self, older_than_ms: int) -> int:
        """Removes temporaries of writers that died. Returns how many."""
        dead = [found for found in self._walk() if _TEMPORARY in found.name and found.age_ms > older_than_ms]
        for found in dead:
            (self.root / found.name).unlink(missing_ok=True)
        return len(dead)

    def _walk(self) -> Iterator[StoredObject]:
        now_s = time.time()
        for directory, _, files in os.walk(self.root):
            for file in files:
                path = Path(directory) / file
                try:
                    status = path.stat()
                except FileNotFoundError:  # deleted meanwhile
                    continue
                name = path.relative_to(self.root).as_posix()
                yield StoredObject(name, status.st_size, max(0, int((now_s - status.st_mtime) * 1000)))

    def name_of(self, url: str) -> str:
        prefix = f"file://{self.root}/"
        if not url.startswith(prefix):
            raise InvalidConfig(f"{url!r} is not in the deep store {self.root}")
        return check_object_name(url.removeprefix(prefix))


def _copy_synced(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, _CHUNK)
        writer.flush()
        os.fsync(writer.fileno())


def _discard(temporary: Path) -> None:
    """What cannot be removed now, `sweep` removes later; the error that led here matters more."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _store_error(root: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoResource(f"deep store {root} is full: {error}")
    return Unavailable(f"deep store {root} failed: {error}")
