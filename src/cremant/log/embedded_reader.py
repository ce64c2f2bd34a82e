# SPDX-License-Identifier: Apache-2.0
"""Reads one partition of the embedded log forward, many frames into one batch of columns.

Never looks past the committed end. What is before it must be right: anything else is Corrupt, naming file and position.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cremant.log import embedded_frame as frames
from cremant.log.api import Headers, MessageBatch, OffsetExpired, RowMetadata, TimestampType
from cremant.log.columns import binary_array
from cremant.log.embedded_files import File, bases, corrupt, find_offset, log_path, world_error
from cremant.log.embedded_partition import EmbeddedPartition, PartitionGone
from cremant.log.embedded_state import PartitionState
from cremant.model.errors import CremantError
from cremant.model.limits import KIB, MIB

#: Bytes read ahead at once; a larger frame is read by itself.
_CHUNK_BYTES = 1 * MIB
#: Upper bound of a batch whatever the caller asks: offsets of its arrays are 32 bits.
_BATCH_BYTES_MAX = 512 * MIB


class _Decoded(NamedTuple):
    """The frame at byte `at` of the file, kept while only a part of it was taken."""

    at: int
    header: frames.FrameHeader
    columns: frames.Columns


class _Gathered:
    """A batch in the making: columns of frames, and runs of single messages collected as plain values."""

    def __init__(self, messages: int, size: int) -> None:
        self.messages_left = messages
        self.bytes_left = size
        self.count = 0
        self.timestamps: list[int] = []
        self.counts: list[int] = []
        self._values: list[pa.BinaryArray] = []
        self._keys: list[pa.BinaryArray] = []
        self._headers: list[Headers] = []
        self._any_headers = False
        self._any_keys = False
        self._singles: list[bytes] = []

    def add_singles(self, singles: frames.Singles) -> None:
        count = len(singles.values)
        self._singles += singles.values
        self.timestamps += singles.timestamps_ms
        self.counts += [1] * count
        self._count(count, sum(map(len, singles.values)))

    def add(self, columns: frames.Columns, start: int, count: int, size: int, timestamp_ms: int) -> None:
        """Messages [start, start + count) of a frame, `size` bytes of them."""
        self._flush()
        self._values.append(columns.values.slice(start, count))
        self._add_keys(columns.keys.slice(start, count) if columns.keys is not None else None, count)
        self._add_headers(columns.headers[start : start + count] if columns.headers is not None else None, count)
        self.timestamps.append(timestamp_ms)
        self.counts.append(count)
        self._count(count, size)

    def _count(self, count: int, size: int) -> None:
        self.count += count
        self.messages_left -= count
        self.bytes_left -= size

    def _flush(self) -> None:
        if self._singles:
            self._values.append(binary_array(self._singles))
            self._add_keys(None, len(self._singles))
            self._add_headers(None, len(self._singles))
            self._singles = []

    def _add_keys(self, keys: pa.BinaryArray | None, count: int) -> None:
        self._any_keys = self._any_keys or keys is not None
        self._keys.append(pa.nulls(count, pa.binary()) if keys is None else keys)

    def _add_headers(self, headers: tuple[Headers, ...] | None, count: int) -> None:
        self._any_headers = self._any_headers or headers is not None
        self._headers.extend(((),) * count if headers is None else headers)

    def batch(self, first_offset: int) -> MessageBatch:
        self._flush()
        next_offset = first_offset + self.count
        return MessageBatch(
            offsets=np.arange(first_offset, next_offset, dtype=np.int64),
            values=self._values[0] if len(self._values) == 1 else pa.concat_arrays(self._values),
            next_offset=next_offset,
            metadata=RowMetadata(
                timestamps_ms=np.repeat(np.asarray(self.timestamps, dtype=np.int64), self.counts),
                timestamp_type=TimestampType.LOG_APPEND,
                keys=_joined_keys(self._keys) if self._any_keys else None,
                headers=tuple(self._headers) if self._any_headers else None,
            ),
        )


def _joined_keys(keys: list[pa.BinaryArray]) -> pa.BinaryArray:
    return keys[0] if len(keys) == 1 else pa.concat_arrays(keys)


class EmbeddedReader:
    """Implements `cremant.log.api.LogReader`. `gone` makes the error for a topic that was deleted."""

    def __init__(
        self, partition: EmbeddedPartition, topic: str, number: int, offset: int, gone: Callable[[], CremantError]
    ) -> None:
        self._partition = partition
        self._topic = topic
        self._number = number
        self._gone = gone
        self._position = offset
        self._answered_s = 0.0
        self._forget()

    def _forget(self) -> None:
        """The place in the files is unknown; the next read looks it up."""
        self._file: File | None = None
        self._path = self._partition.directory
        self._base = 0
        self._at = 0
        self._sealed_end = -1
        self._chunk = b""
        self._chunk_at = 0
        self._decoded: _Decoded | None = None

    @property
    def position(self) -> int:
        return self._position

    @property
    def answered_s(self) -> float:
        return self._answered_s

    def seek(self, offset: int) -> None:
        if offset != self._position:
            self._position = offset
            self._forget()

    def close(self) -> None:
        self._forget()

    def read(self, *, max_messages: int, max_bytes: int) -> MessageBatch | None:
        try:
            asked_s = time.monotonic()
            state = self._partition.state()
            self._answered_s = asked_s
            if self._position < state.earliest:
                raise OffsetExpired(self._topic, self._number, self._position, state.earliest)
            if self._position >= state.next_offset:
                return None
            return self._gather(state, max_messages, max_bytes)
        except PartitionGone:
            raise self._gone() from None
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise world_error(error, self._partition.name) from error

    def _gather(self, state: PartitionState, max_messages: int, max_bytes: int) -> MessageBatch:
        """A batch from the position on. What comes before an error is answered; the next read meets the error."""
        gathered = _Gathered(max(1, max_messages), max(1, min(max_bytes, _BATCH_BYTES_MAX)))
        first = self._position
        try:
            while gathered.messages_left > 0 and gathered.bytes_left > 0 and self._position < state.next_offset:
                if not self._step(state, gathered):
                    break
        except (CremantError, OSError):
            self._forget()
            if gathered.count == 0:
                raise
        return gathered.batch(first)

    def _missing(self) -> CremantError:
        """A file that should be there is not: retention, a deleted topic, or damage."""
        position = self._position
        try:
            state = self._partition.state()
        except PartitionGone:
            return self._gone()
        if not self._partition.directory.exists():
            return self._gone()
        if position < state.earliest:
            return OffsetExpired(self._topic, self._number, position, state.earliest)
        path = log_path(self._partition.directory, position)
        return corrupt(path, 0, "expected a file, found none", hint="the file was removed")

    def _step(self, state: PartitionState, gathered: _Gathered) -> bool:
        """Takes what fits of the frame at the position, or of a run of small ones. False if the batch is full."""
        file = self._located(state)
        end = state.end if self._base == state.active_base else self._end_of_sealed(file)
        if self._at >= end:
            self._next_file(end, state)
            return True
        header = self._header(file, end, gathered.bytes_left)
        if header.messages > 1 or header.flags:
            return self._take(header, gathered)
        if header.value_bytes > gathered.bytes_left and gathered.count:
            return False
        self._take_singles(gathered)
        return True

    def _take_singles(self, gathered: _Gathered) -> None:
        """Takes the frame at the position, which is in the chunk, and what follows it there of the same kind."""
        singles = frames.decode_singles(
            self._chunk,
            self._at - self._chunk_at,
            self._position,
            max_messages=gathered.messages_left,
            max_bytes=gathered.bytes_left,
        )
        gathered.add_singles(singles)
        self._position += len(singles.values)
        self._at = self._chunk_at + singles.at

    def _take(self, header: frames.FrameHeader, gathered: _Gathered) -> bool:
        """Takes what fits of a frame of several messages, keys or headers."""
        columns = self._decode(header)
        start = self._position - header.base_offset
        count = min(header.messages - start, gathered.messages_left)
        ends = frames.data_ends(columns.values)
        if columns.keys is not None:
            ends = ends + frames.data_ends(columns.keys)
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + gathered.bytes_left, side="right")) - start
        count = min(count, max(fitting, 0 if gathered.count else 1))
        if count == 0:
            return False
        gathered.add(columns, start, count, int(ends[start + count - 1]) - before, header.timestamp_ms)
        if start + count == header.messages:
            self._advance(header)
            return True
        self._position += count
        return False

    def _advance(self, header: frames.FrameHeader) -> None:
        self._position = header.next_offset
        self._at += header.frame_bytes
        self._decoded = None

    def _located(self, state: PartitionState) -> File:
        """The open file that has the position, `_at` on its frame."""
        if self._file is None:
            directory, position = self._partition.directory, self._position
            base = max((base for base in bases(directory) if base <= position), default=-1)
            if base < 0:
                raise FileNotFoundError
            file = self._open(base)
            end = state.end if base == state.active_base else self._end_of_sealed(file)
            self._at = find_offset(file, self._path, base, end, position)
            self._file = file
        return self._file

    def _open(self, base: int) -> File:
        self._path = log_path(self._partition.directory, base)
        self._base = base
        return File(self._path, os.O_RDONLY)

    def _end_of_sealed(self, file: File) -> int:
        if self._sealed_end < 0:
            self._sealed_end = file.size()
        return self._sealed_end

    def _next_file(self, end: int, state: PartitionState) -> None:
        if self._at > end or self._base == state.active_base:
            problem = f"expected frames up to offset {state.next_offset}, found the end at offset {self._position}"
            raise corrupt(self._path, end, problem)
        self._forget()
        self._file = self._open(self._position)

    def _header(self, file: File, end: int, wanted: int) -> frames.FrameHeader:
        """The header of the frame at `_at`; its whole frame is in the chunk then, its checksum right."""
        if self._decoded is not None and self._decoded.at == self._at:
            return self._decoded.header
        at = self._at - self._chunk_at
        header = frames.parse_header(self._chunk, at)
        if isinstance(header, str) or at + header.frame_bytes > len(self._chunk):
            self._load(file, min(wanted + 4 * KIB, _CHUNK_BYTES, end - self._at))
            header, at = frames.parse_header(self._chunk, 0), 0
            if not isinstance(header, str) and header.frame_bytes > len(self._chunk):
                self._load(file, min(header.frame_bytes, end - self._at))
        problem = header if isinstance(header, str) else frames.check_crc(header, self._chunk, at)
        if problem is not None or isinstance(header, str):
            raise corrupt(self._path, self._at, str(problem))
        if not header.base_offset <= self._position < header.next_offset:
            found = f"{header.base_offset} to {header.next_offset - 1}"
            raise corrupt(self._path, self._at, f"expected offset {self._position}, found {found}")
        return header

    def _load(self, file: File, size: int) -> None:
        self._chunk = os.pread(file.fd, size, self._at)
        self._chunk_at = self._at

    def _decode(self, header: frames.FrameHeader) -> frames.Columns:
        if self._decoded is None or self._decoded.at != self._at:
            columns = frames.decode(header, self._chunk, self._at - self._chunk_at)
            self._decoded = _Decoded(self._at, header, columns)
        return self._decoded.columns
