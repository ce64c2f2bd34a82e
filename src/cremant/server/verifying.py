# SPDX-License-Identifier: Apache-2.0
"""Reads local segments in full once per process, in the background, and has damaged ones fetched again. It also builds
indexes, one at a time: damaged ones, and those of which the table's config wants others now. Meanwhile queries go on
with what there was."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time

from cremant.model.errors import Corrupt
from cremant.segment.reader import SealedSegment, reindexed, verify, verify_index
from cremant.server.files import ServerFiles
from cremant.server.table import HostedSegment, HostedTable
from cremant.shell.logs import cause, log_event, log_failure

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Verifier:
    """`tables` is shared with the host; ends with `stopping`."""

    def __init__(self, tables: dict[str, HostedTable], files: ServerFiles, stopping: threading.Event) -> None:
        self.tables = tables
        self._files = files
        self._stopping = stopping

    def thread(self) -> threading.Thread:
        return threading.Thread(target=self._verify_forever, name="verify", daemon=True)

    def _verify_forever(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            for table in list(self.tables.values()):
                for hosted in list(table.segments.values()):
                    if self._stopping.is_set():
                        return
                    began_s = time.monotonic()
                    try:
                        worked = self._look_after(table, hosted)
                    except Exception:
                        _log.exception(
                            "a look at a segment failed", extra={"fields": {"segment": hosted.metadata.name}}
                        )
                        continue
                    if worked:
                        # Rest as long as it worked: queries need the cores more.
                        self._stopping.wait(time.monotonic() - began_s)

    @cause()
    def _look_after(self, table: HostedTable, hosted: HostedSegment) -> bool:
        """Verifies what was not yet and builds an index that is missing or not what the table wants now. True if there
        was something to do."""
        if hosted.sealed is None:
            return False
        was_verified = hosted.verified
        if not was_verified:
            self._verify(table, hosted)
        sealed, wanted = hosted.sealed, table.record.config.indexes
        if sealed is None or (sealed.index is not None and sealed.index.wanted == wanted):
            return not was_verified
        if time.monotonic() < hosted.index_retry_at_s:
            return not was_verified
        self._reindex(table, hosted, sealed)
        return True

    def _verify(self, table: HostedTable, hosted: HostedSegment) -> None:
        sealed = hosted.sealed
        if sealed is None:
            return
        try:
            verify(sealed)
            hosted.verified = True
        except (Corrupt, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                log_failure(_log, "a local segment cannot be read now", error, segment=hosted.metadata.name)
                return  # that says nothing of the file
            log_failure(_log, "a local segment is damaged, it is fetched again", error, segment=hosted.metadata.name)
            with table.lock:
                if table.exchange(hosted, sealed, None):
                    hosted.error = str(error)
                    self._files.remove(sealed.directory)
            return
        try:
            verify_index(sealed)
        except Corrupt as error:
            log_failure(_log, "an index is damaged, it is built anew", error, segment=hosted.metadata.name)
            table.exchange(hosted, sealed, dataclasses.replace(sealed, index=None))

    def _reindex(self, table: HostedTable, hosted: HostedSegment, sealed: SealedSegment) -> None:
        """Queries go on with the old index, or without, until the new one is there."""
        name, began_s = hosted.metadata.name, time.monotonic()
        try:
            made = reindexed(sealed, table.record.config.indexes)
        except (Corrupt, OSError) as error:
            if hosted.sealed is sealed:  # else it was deleted or replaced meanwhile
                retry_ms = hosted.index_backoff.next_ms()
                hosted.index_retry_at_s = time.monotonic() + retry_ms / 1000
                log_failure(_log, "an index could not be built", error, segment=name, retry_ms=retry_ms)
            return
        hosted.index_backoff.reset()
        if table.exchange(hosted, sealed, made):
            elapsed_ms = round((time.monotonic() - began_s) * 1000)
            log_event(
                _log, "index built", segment=name, bytes=made.index.bytes if made.index else 0, elapsed_ms=elapsed_ms
            )
