# SPDX-License-Identifier: Apache-2.0
"""Reading what one has just written: a token of writes for `SET readYourWrites = '<token>'`.

    from cremant.read_your_writes import Writes

    writes = Writes()
    producer.produce("events", value, on_delivery=writes.delivered)   # confluent-kafka
    producer.flush()
    writes.add(requests.post(f"{controller}/topics/clicks", data=lines).json()["token"])   # HTTP produce
    cursor.execute(f"SET readYourWrites = '{writes.token}'; SELECT count(*) FROM events")

The answer contains those rows, or says that it does not. Keep one `Writes` per topic.
"""

from __future__ import annotations

import threading
from typing import Protocol

from cremant.model.written import parse_write_token, write_token


class Delivered(Protocol):
    """As much of a confluent-kafka message as is needed."""

    def partition(self) -> int | None: ...

    def offset(self) -> int | None: ...


class Writes:
    """What was written to one topic so far. Thread-safe: producers report from threads of their own."""

    def __init__(self, *tokens: str) -> None:
        """`tokens`: of earlier writes to the topic. Raises UserError for what is no token."""
        self._last: dict[int, int] = {}
        self._guard = threading.Lock()
        for token in tokens:
            self.add(token)

    def delivered(self, error: object | None, message: Delivered) -> None:
        """A delivery report, to be given to produce() as `on_delivery`. What failed was not written and is left out."""
        partition, offset = message.partition(), message.offset()
        if error is None and partition is not None and offset is not None and offset >= 0:
            self.wrote(partition, offset)

    def wrote(self, partition: int, offset: int) -> None:
        """A row was written at `offset`."""
        with self._guard:
            self._last[partition] = max(offset, self._last.get(partition, offset))

    def add(self, token: str) -> None:
        """What a token says was written: an answer of HTTP produce has one. Raises UserError for what is none."""
        for partition, offset in parse_write_token(token).items():
            self.wrote(partition, offset)

    @property
    def token(self) -> str:
        """For `SET readYourWrites`; JSON, which needs no escaping within single quotes."""
        with self._guard:
            return write_token(self._last)
