# SPDX-License-Identifier: Apache-2.0
"""The quickstart's feed: a process that appends the shop's events to a topic of the embedded log as they happen."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Any

from cremant.cli.child import die_with_parent
from cremant.cli.shop import Event, Shop
from cremant.log.api import Log, Message
from cremant.log.open import open_logs
from cremant.log.partitioner import partition_of
from cremant.model.errors import NoResource
from cremant.model.settings import Settings
from cremant.shell.logs import log_event, setup_logging

_log = logging.getLogger(__name__)

#: How far behind the feed may fall (a stopped laptop) before it skips what nobody waits for.
_CATCH_UP_MS_MAX = 60_000
_REPORT_EVERY_MS = 30_000
_APPENDS_FAILED_MAX = 20


def run_generator(
    settings: Settings, topic: str, *, rate_per_s: float, seed: int, history_ms: int, malformed: bool
) -> None:
    """Until SIGTERM. `history_ms`: how much of the past is produced at once at the start."""
    die_with_parent()
    setup_logging("generator", "generator")
    stop = threading.Event()

    def on_signal(_number: int, _frame: Any) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    logs = open_logs(settings)
    try:
        log = logs.embedded
        Feed(log, topic, rate_per_s=rate_per_s, seed=seed, history_ms=history_ms, malformed=malformed).run(stop)
    finally:
        logs.close()


class Feed:
    """Appends what the shop says has arrived, a few times a second."""

    def __init__(self, log: Log, topic: str, *, rate_per_s: float, seed: int, history_ms: int, malformed: bool) -> None:
        self._log = log
        self._topic = topic
        self._partitions = log.topic(topic).partitions
        self._arguments: dict[str, Any] = {"seed": seed, "rate_per_s": rate_per_s, "malformed": malformed}
        self._shop = Shop(start_ms=_wall_ms() - history_ms, **self._arguments)
        self._reached_ms = _wall_ms()
        self.appended = 0

    def run(self, stop: threading.Event) -> None:
        reported_ms = 0
        failed = 0
        while not stop.is_set():
            now_ms = _wall_ms()
            if now_ms - self._reached_ms > _CATCH_UP_MS_MAX:
                log_event(_log, "clock jumped, going on from now", skipped_ms=now_ms - self._reached_ms)
                self._shop = Shop(start_ms=now_ms, **self._arguments)
            try:
                self.append(self._shop.events(now_ms))
                failed = 0
            except NoResource as error:
                failed += 1
                log_event(_log, "append failed", level=logging.WARNING, error=str(error), attempt=failed)
                if failed > _APPENDS_FAILED_MAX:
                    raise
            self._reached_ms = now_ms
            if now_ms - reported_ms >= _REPORT_EVERY_MS:
                log_event(_log, "feeding", topic=self._topic, appended=self.appended)
                reported_ms = now_ms
            stop.wait(0.1 + 0.9 * (failed > 0))

    def append(self, events: list[Event]) -> None:
        messages: list[list[Message]] = [[] for _ in range(self._partitions)]
        for event in events:
            messages[partition_of(event.key, self._partitions)].append(Message(event.value, event.key))
        for partition, share in enumerate(messages):
            if share:
                self._log.append(self._topic, partition, share)
                self.appended += len(share)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
