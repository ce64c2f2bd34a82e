# SPDX-License-Identifier: Apache-2.0
"""Saves versions of sealed segments to disk, in the background (upsert tables).

Rules:

- A snapshot is as of a closed epoch: it is taken while no updates are applied, and written afterwards.
- A segment that was just sealed, taken back, or whose versions just came, is saved at once; one that changed, after a
  while, one at a time, resting as long as that took; of one that did not, only how far that holds is written.
- What the log has to keep follows from the oldest of them, so each segment's must advance, also those nobody updates.
"""

from __future__ import annotations

import logging
import threading
import time

from cremant.model.errors import CremantError
from cremant.model.offsets import Position
from cremant.segment import snapshot
from cremant.segment.reader import SealedSegment
from cremant.segment.versions import Versions
from cremant.server.partition import PartitionState
from cremant.server.table import HostedSegment, HostedTable
from cremant.shell.logs import cause, log_failure

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
#: What a restart reads again is at most so old, and what the disk takes: eight bytes per row each time.
SAVE_EVERY_S = 60.0
RETRY_EVERY_S = 10.0


class Snapshots:
    """`tables` is shared with the host; ends with `stopping`."""

    def __init__(self, tables: dict[str, HostedTable], stopping: threading.Event, *, fsync: bool) -> None:
        self._tables = tables
        self._stopping = stopping
        self._fsync = fsync

    def thread(self) -> threading.Thread:
        return threading.Thread(target=self._save_forever, name="snapshots", daemon=True)

    def _save_forever(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            for table in list(self._tables.values()):
                if table.record.config.upsert is None:
                    continue
                with table.lock:
                    segments = list(table.segments.values())
                for hosted in segments:
                    if self._stopping.is_set():
                        return
                    began_s = time.monotonic()
                    if (began_s >= hosted.save_at_s or _was_rewound(hosted)) and self.save(table, hosted):
                        self._stopping.wait(time.monotonic() - began_s)

    @cause()
    def save(self, table: HostedTable, hosted: HostedSegment) -> bool:
        """Saves a segment's versions as they are now; True if there was something to write."""
        with hosted.disk:
            return self._save(table, hosted)

    def _save(self, table: HostedTable, hosted: HostedSegment) -> bool:
        taken = _take(table, hosted)
        if taken is None:
            return False
        sealed, versions, changes, position = taken
        try:
            if hosted.saved is not None and hosted.saved[1] == changes:
                snapshot.unchanged(sealed.directory, hosted.saved[0], position, fsync=self._fsync)
            else:
                whole = snapshot.Snapshot(versions, position)
                snapshot.write(
                    sealed.directory, whole, segment=sealed.name, checksum=sealed.marker.checksum, fsync=self._fsync
                )
                hosted.saved = (position, changes)
        except CremantError as error:
            hosted.save_at_s = time.monotonic() + RETRY_EVERY_S
            if table.segments.get(sealed.name) is hosted:  # else it was deleted meanwhile
                log_failure(_log, "versions of a segment could not be saved", error, segment=sealed.name)
            return True
        hosted.snapshot, hosted.rewinds_saved = position, versions.rewinds
        hosted.save_at_s = time.monotonic() + SAVE_EVERY_S
        return True


def _was_rewound(hosted: HostedSegment) -> bool:
    """What is on disk is of epochs that are void."""
    return hosted.versions is not None and hosted.versions.rewinds != hosted.rewinds_saved


def _take(table: HostedTable, hosted: HostedSegment) -> tuple[SealedSegment, Versions, int, Position] | None:
    """Versions that nobody else writes to (unless they are those on disk), how often they had changed, and as of when;
    None if there is nothing new."""
    reader = table.updater(hosted.metadata.partition)
    if reader is None or reader.versions is None or hosted.sealed is None or reader.state is PartitionState.STOPPED:
        return None
    with reader.lock:
        sealed, versions, position = hosted.sealed, hosted.versions, reader.position
        if sealed is None or versions is None or reader.versions.attached().get(sealed.name) is not versions:
            return None
        # Ahead of the reader: its snapshot is better than what could be written now.
        if not reader.versions.is_current(sealed.name) or hosted.snapshot == position:
            return None
        if hosted.saved is not None and hosted.saved[1] == versions.changes:
            return sealed, versions, versions.changes, position
        return sealed, versions.copied(), versions.changes, position
