# SPDX-License-Identifier: Apache-2.0
"""One partition of the embedded log as one process sees it: its state, appends, retention.

The order of an append, under the lock: cut what a dead writer left behind the end; write the frame; (fsync always:
wait for the disk;) write the state record, which commits; then the index. Killed anywhere before the record, nothing
of the append is visible.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cremant.log import embedded_index as index
from cremant.log.api import Appended, Bounds
from cremant.log.embedded_files import (
    File,
    bases,
    corrupt,
    find_time,
    first_header,
    last_header,
    log_path,
    world_error,
)
from cremant.log.embedded_frame import Payload
from cremant.log.embedded_recovery import recover
from cremant.log.embedded_state import LOCK_TIMEOUT_S, RECORD_BYTES, PartitionState, locked, shared, unpack
from cremant.model.errors import CremantError, Unavailable
from cremant.model.limits import LOG_INDEX_EVERY_BYTES, LOG_RETENTION_CHECK_MS

logger = logging.getLogger(__name__)

#: Listings of the files that retention may make stale before they are used.
_LISTING_TRIES = 10
#: Reads of the state record that may catch a writer in the middle before the lock is taken to look closer.
_STATE_TRIES = 3
_SETTLE_NAP_S = 50e-6


class PartitionGone(Exception):
    """The topic was deleted (and maybe created again) since this handle was opened."""


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """`retention_ms`, `retention_bytes`: 0 = keep. `fsync`: wait for the disk at each append."""

    fsync: bool
    segment_bytes: int
    retention_ms: int
    retention_bytes: int
    clock: Callable[[], int]


def state_path(directory: Path) -> Path:
    return directory / "state"


class EmbeddedPartition:
    """Thread-safe. After a fork the child opens its own lock: an inherited one would not exclude the parent."""

    def __init__(self, directory: Path, name: str, options: PartitionOptions) -> None:
        """`name` is for messages. Raises PartitionGone."""
        self.directory = directory
        self.name = name
        self._options = options
        self._path = state_path(directory)
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._active: tuple[int, File] | None = None
        self._checked_ms = 0
        try:
            self._file = File(self._path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            raise PartitionGone from None
        except OSError as error:
            raise world_error(error, self.name) from error

    def state(self) -> PartitionState:
        """One small read. Raises PartitionGone, Corrupt."""
        for _ in range(_STATE_TRIES):
            state = self._read_state()
            if state is not None:
                if state.deleted:
                    raise PartitionGone
                return state
        with self._locked() as state:
            return state

    def _read_state(self) -> PartitionState | None:
        return unpack(os.pread(self._file.fd, RECORD_BYTES, 0))

    def bounds(self, until_s: float) -> Bounds:
        """An append has its timestamp some time before readers see it; so who asks what there is up to now must not
        ask in the middle of one. Waits for it until `until_s` (monotonic). Raises PartitionGone, Corrupt."""
        nap_s = _SETTLE_NAP_S
        while (state := self._state_between_appends()) is None:
            if time.monotonic() > until_s:
                state = self.state()
                return Bounds(state.earliest, state.next_offset, settled=False)
            time.sleep(nap_s)
            nap_s *= 2
        return Bounds(state.earliest, state.next_offset)

    def _state_between_appends(self) -> PartitionState | None:
        """None while somebody holds the lock. The kernel lets go of it when its holder dies."""
        if self._pid != os.getpid():
            self._open()
        if not self._mutex.acquire(blocking=False):
            return None
        try:
            with shared(self._file.fd) as alone:
                state = self._read_state() if alone else None
        finally:
            self._mutex.release()
        if state is not None and state.deleted:
            raise PartitionGone
        return state

    def append(self, payload: Payload) -> Appended:
        """Raises PartitionGone, NoResource, Unavailable, Corrupt."""
        options = self._options
        with self._locked() as state:
            if state.end and state.end + payload.frame_bytes > options.segment_bytes:
                state = self._roll(state)
            now_ms = options.clock()
            timestamp_ms = max(now_ms, state.last_timestamp_ms)
            offset, at = state.next_offset, state.end
            self._write(state, (payload.header(offset, timestamp_ms), *payload.parts))
            indexing = state.indexed < 0 or at - state.indexed >= LOG_INDEX_EVERY_BYTES
            state = state._replace(
                end=at + payload.frame_bytes,
                next_offset=offset + payload.messages,
                last_timestamp_ms=timestamp_ms,
                indexed=at if indexing else state.indexed,
            )
            self._commit(state)
            if indexing:
                self._index(state.active_base, index.Entry(offset, timestamp_ms, at))
            if abs(now_ms - self._checked_ms) >= LOG_RETENTION_CHECK_MS:
                self._expire_in_passing(state)
            return Appended(offset, timestamp_ms, state.next_offset)

    def offset_at(self, timestamp_ms: int) -> int:
        """First offset not older than `timestamp_ms`. Raises PartitionGone, Corrupt, Unavailable."""
        for _ in range(_LISTING_TRIES):
            try:
                return self._offset_at(self.state(), timestamp_ms)
            except FileNotFoundError:
                if not self.directory.exists():
                    raise PartitionGone from None
        raise Unavailable(f"{self.name}: its files change faster than they can be searched", hint="try again")

    def _offset_at(self, state: PartitionState, timestamp_ms: int) -> int:
        """Finds the file by the first timestamps of the files, then the place by its index."""
        if timestamp_ms > state.last_timestamp_ms:
            return state.next_offset
        last = state.active_base if state.end else state.active_base - 1
        found = [base for base in bases(self.directory) if state.earliest <= base <= last]
        newer = bisect_left(found, timestamp_ms, key=lambda base: first_header(self.directory, base).timestamp_ms)
        for base in found[max(0, newer - 1) :]:
            path = log_path(self.directory, base)
            file = File(path, os.O_RDONLY)
            end = state.end if base == state.active_base else file.size()
            offset = find_time(file, path, base, end, timestamp_ms)
            if offset is not None:
                return offset
        return state.next_offset

    def trim(self, before_offset: int) -> None:
        """Drops files whose messages are all below `before_offset`."""
        with self._locked() as state:
            found = bases(self.directory)
            self._drop(state, found, sum(base <= before_offset for base in found[1:]))

    def expire(self) -> None:
        """Drops what retention by time and size no longer keeps."""
        with self._locked() as state:
            self._expire(state)

    def mark_deleted(self) -> None:
        """From now on every process that has this partition open finds it gone."""
        with self._locked() as state:
            self._commit(state._replace(deleted=True))

    @contextmanager
    def _locked(self) -> Iterator[PartitionState]:
        """The state under the lock, recovered if need be. Raises PartitionGone, Unavailable, Corrupt, NoResource."""
        if self._pid != os.getpid():
            self._open()
        if not self._mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise Unavailable(f"{self.name}: another thread held the lock for {LOCK_TIMEOUT_S:g} s")
        try:
            with locked(self._file.fd, self.name):
                self._check_there()
                state = self._read_state()
                if state is None:
                    state = recover(self.directory)
                    self._commit(state)
                if state.deleted:
                    raise PartitionGone
                yield state
        except FileNotFoundError:
            raise PartitionGone from None
        except OSError as error:
            raise world_error(error, self.name) from error
        finally:
            self._mutex.release()

    def _check_there(self) -> None:
        """A topic that was moved away, or a state file that somebody replaced, must not be written to."""
        there, ours = os.stat(self._path), os.fstat(self._file.fd)
        if (there.st_ino, there.st_dev) != (ours.st_ino, ours.st_dev):
            raise PartitionGone

    def _write(self, state: PartitionState, parts: tuple[Any, ...]) -> None:
        """Writes a frame behind the committed end, or leaves nothing."""
        file = self._active_file(state)
        try:
            _write_all(file.fd, parts, state.end)
            if self._options.fsync:
                os.fdatasync(file.fd)
        except BaseException:
            os.ftruncate(file.fd, state.end)
            raise

    def _roll(self, state: PartitionState) -> PartitionState:
        """The next append goes to a new file; it creates it. The old one ends where it is committed from now on."""
        self._active_file(state)
        state = state._replace(active_base=state.next_offset, end=0, indexed=-1)
        self._commit(state)
        self._checked_ms = 0
        return state

    def _active_file(self, state: PartitionState) -> File:
        """The file written to, without what a dead writer left behind its end."""
        path = log_path(self.directory, state.active_base)
        if self._active is None or self._active[0] != state.active_base:
            self._active = state.active_base, self._open_active(path, state)
            if self._options.fsync and not state.end:
                _sync_directory(self.directory)
        file = self._active[1]
        size = file.size()
        if size < state.end:
            raise corrupt(path, size, f"expected {state.end} bytes, found {size}")
        if size > state.end:
            os.ftruncate(file.fd, state.end)
        return file

    def _open_active(self, path: Path, state: PartitionState) -> File:
        try:
            return File(path, os.O_RDWR | (0 if state.end else os.O_CREAT))
        except FileNotFoundError:
            if self.directory.exists():
                raise corrupt(path, 0, f"expected {state.end} bytes, found no file") from None
            raise

    def _commit(self, state: PartitionState) -> None:
        os.pwrite(self._file.fd, state.pack(), 0)

    def _index(self, base: int, entry: index.Entry) -> None:
        try:
            index.add(log_path(self.directory, base), entry)
        except OSError:
            pass  # the append is committed and the index is advice: a missing entry makes one search longer

    def _expire_in_passing(self, state: PartitionState) -> None:
        """An append that is committed must not fail because an old file cannot be looked at or removed."""
        try:
            self._expire(state)
        except (OSError, CremantError) as error:
            logger.warning("%s: retention failed: %s", self.name, error)

    def _expire(self, state: PartitionState) -> None:
        options = self._options
        now_ms = options.clock()
        self._checked_ms = now_ms
        if not options.retention_ms and not options.retention_bytes:
            return
        found = bases(self.directory)
        count = 0
        if options.retention_ms:
            count = self._older_than(found, now_ms - options.retention_ms)
        if options.retention_bytes:
            sizes = [log_path(self.directory, base).stat().st_size for base in found]
            left = sum(sizes[count:])
            while count < len(found) - 1 and left > options.retention_bytes:
                left -= sizes[count]
                count += 1
        self._drop(state, found, count)

    def _older_than(self, found: list[int], timestamp_ms: int) -> int:
        """How many files, from the oldest on, have only older messages. The active one does not count."""
        count = 0
        for base in found[:-1]:
            path = log_path(self.directory, base)
            file = File(path, os.O_RDONLY)
            last = last_header(file, path, base, file.size())
            if last is not None and last[1].timestamp_ms >= timestamp_ms:
                break
            count += 1
        return count

    def _drop(self, state: PartitionState, found: list[int], count: int) -> None:
        """Removes the `count` oldest files, never the active one. Readers learn it first."""
        drop = [base for base in found[:count] if base < state.active_base]
        if not drop:
            return
        kept = [base for base in found if base not in set(drop)]
        self._commit(state._replace(earliest=kept[0] if kept else state.active_base))
        for base in drop:
            path = log_path(self.directory, base)
            path.unlink(missing_ok=True)
            index.index_path(path).unlink(missing_ok=True)


def _write_all(fd: int, parts: tuple[Any, ...], at: int) -> None:
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        written = os.pwritev(fd, left, at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
