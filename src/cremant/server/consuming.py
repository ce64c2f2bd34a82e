# SPDX-License-Identifier: Apache-2.0
"""The two threads behind all tails of a server: one consumes in turns, one merges and spills.

Rules: partitions take turns of bounded size, so one that catches up does not starve the others; when none has anything
to read, the thread sleeps in `Log.wait` and wakes within milliseconds of an append. Partitions come and go at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from cremant.log.api import Log
from cremant.model.errors import CremantError
from cremant.server.partition import Partition
from cremant.shell.logs import log_failure

_log = logging.getLogger(__name__)

#: How long new partitions, quota and retries may wait for attention when the log is silent.
IDLE_WAIT_S = 0.2
#: Small blocks are merged at this pace; an idle tail costs nothing but the look.
MAINTENANCE_PAUSE_S = 0.1


class Consumer:
    """Runs the turns of whatever `partitions()` returns."""

    def __init__(self, log: Log, partitions: Callable[[], Iterable[Partition]]) -> None:
        self._log = log
        self._partitions = partitions
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._consume, name="consume", daemon=True),
            threading.Thread(target=self._maintain, name="maintain", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2)

    def _consume(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._round():
                    self._sleep()
            except CremantError as error:
                log_failure(_log, "waiting for the log failed", error)
                self._stopping.wait(IDLE_WAIT_S)
            except Exception:
                # A bug in one turn must not end consumption of every partition.
                _log.exception("a turn of consumption failed")
                self._stopping.wait(IDLE_WAIT_S)

    def _round(self) -> bool:
        busy = False
        for partition in self._partitions():
            busy |= partition.turn(self._log, int(time.time() * 1000))
        return busy

    def _sleep(self) -> None:
        positions = {(p.id.topic, p.id.partition): p.log_offset for p in self._partitions() if p.waits_for_log}
        if positions:
            self._log.wait(positions, IDLE_WAIT_S)
        else:
            self._stopping.wait(IDLE_WAIT_S / 4)

    def _maintain(self) -> None:
        while not self._stopping.wait(MAINTENANCE_PAUSE_S):
            for partition in self._partitions():
                try:
                    while partition.tail.maintain() and not self._stopping.is_set():
                        pass
                except Exception:
                    _log.exception("maintenance of a tail failed", extra={"fields": {"partition": str(partition.id)}})
