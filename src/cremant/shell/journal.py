# SPDX-License-Identifier: Apache-2.0
"""The journal of a role: what it did to segments, kept on disk so that a segment's story can be told later.

Every log line that names a segment is kept: when, which role and instance, what happened, its fields and cause id.
Rules: one line per event, each with its own checksum, so that a torn or damaged line costs that line only; two files of
bounded size, the older one goes; a line that repeats the segment's last written one is left out; a journal that cannot
be written counts what it dropped and is in nobody's way.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from cremant.model.limits import JOURNAL_BYTES_MAX, STORY_EVENTS_MAX
from cremant.shell.logs import JsonFormatter

#: Segments of which the last line is remembered, to leave repetitions out.
_REMEMBERED = 10_000
#: What differs between repetitions of the same event.
_VOLATILE = ("at", "cause", "elapsed_ms", "retry_ms")


class Journal(logging.Handler):
    """`directory` is its own. Thread-safe."""

    def __init__(self, directory: Path, role: str, instance: str, *, bytes_max: int = JOURNAL_BYTES_MAX) -> None:
        super().__init__()
        directory.mkdir(parents=True, exist_ok=True)
        self._path, self._older = directory / "events.jsonl", directory / "events.1.jsonl"
        self._bytes_max = bytes_max
        self._format = JsonFormatter(role, instance)
        self._last: OrderedDict[str, int] = OrderedDict()
        self._writing = threading.Lock()
        #: Events that could not be written.
        self.dropped = 0
        #: The last write failed: it may have left half a line.
        self._torn = False
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        """What a killed process left half written must not spoil the next line."""
        if self._path.exists():
            with self._path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                if size and file.read(1) != b"\n":
                    file.write(b"\n")

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        if not isinstance(fields, dict) or not (fields.get("segment") or fields.get("segments")):
            return
        try:
            line = self._format.format(record).encode()
            segment, content = _content(line)
            with self._writing:
                if self._last.get(segment) != content:
                    self._append(line)
                    self._remember(segment, content)
        except (OSError, ValueError, TypeError):
            self.dropped += 1

    def _remember(self, segment: str, content: int) -> None:
        self._last[segment] = content
        self._last.move_to_end(segment)
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

    def _append(self, line: bytes) -> None:
        """One write, so that a kill leaves at most one torn line."""
        if self._path.exists() and self._path.stat().st_size > self._bytes_max:
            os.replace(self._path, self._older)
        if self._torn:
            self._end_torn_line()
        self._torn = True
        with self._path.open("ab") as file:
            file.write(b"%08x %s\n" % (zlib.crc32(line), line))
        self._torn = False

    def story(self, segment: str) -> list[dict[str, Any]]:
        """Events that name the segment, oldest first; at most the newest STORY_EVENTS_MAX."""
        wanted, found = segment.encode(), []
        for path in (self._older, self._path):
            try:
                lines = path.read_bytes().split(b"\n")
            except FileNotFoundError:
                continue
            found += [event for line in lines if wanted in line and (event := _decoded(line)) is not None]
        return [event for event in found if _names(event, segment)][-STORY_EVENTS_MAX:]


def _content(line: bytes) -> tuple[str, int]:
    """The segment that an event is of, and what repetitions of it have in common."""
    event = msgspec.json.decode(line, type=dict[str, Any])
    content = hash(repr(sorted((name, value) for name, value in event.items() if name not in _VOLATILE)))
    return str(event.get("segment") or event.get("segments")), content


def _names(event: dict[str, Any], segment: str) -> bool:
    several = event.get("segments")
    return event.get("segment") == segment or (isinstance(several, list) and segment in several)


def _decoded(line: bytes) -> dict[str, Any] | None:
    """None for a line that is damaged or torn."""
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, msgspec.MsgspecError):
        return None


def keep_journal(data_dir: str | Path, role: str, instance: str) -> Journal:
    """Keeps the journal of this process in `<data_dir>/journal` from now on."""
    journal = Journal(Path(data_dir) / "journal", role, instance)
    logging.getLogger().addHandler(journal)
    return journal
