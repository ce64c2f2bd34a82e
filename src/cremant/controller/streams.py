# SPDX-License-Identifier: Apache-2.0
"""What the controller asks of logs: streams of tables, and its own epoch logs and dead letters.

Rules
- Every call is bounded in time (STREAM_CALL_MS) and runs outside of the catalog's lock: a broker that is slow or gone
  costs who asked for it a clear error, and nobody else anything.
- Within one round over many tables, a stream that did not answer is not asked again (`Round`).
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from cremant.log.api import Log, TopicInfo
from cremant.model.errors import CremantError, InvalidConfig, NotFound, PeerError
from cremant.model.limits import STREAM_CALL_MS, STREAM_CALLS_MAX
from cremant.model.table import StreamConfig
from cremant.shell.bounded import BoundedCalls
from cremant.shell.logs import log_failure

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LogSource(Protocol):
    """The logs of a process (log/open.py)."""

    @property
    def epoch(self) -> Log: ...

    @property
    def embedded(self) -> Log: ...

    def stream(self, stream: StreamConfig) -> contextlib.AbstractContextManager[Log]: ...


class Streams:
    """Thread-safe."""

    def __init__(self, logs: LogSource, *, timeout_ms: int = STREAM_CALL_MS) -> None:
        self.logs = logs
        self._timeout_ms = timeout_ms
        self._calls = BoundedCalls(STREAM_CALLS_MAX, "stream-call")

    def of(self, stream: StreamConfig, call: Callable[[Log], T], *, timeout_ms: int | None = None) -> T:
        """`call` on the log that holds a table's stream."""

        def ask() -> T:
            with self.logs.stream(stream) as log:
                return call(log)

        what = f"{stream.stream_type} stream {stream.topic}"
        return self._calls.call(what, ask, timeout_ms or self._timeout_ms)

    def of_epochs(self, call: Callable[[Log], T], *, timeout_ms: int | None = None) -> T:
        """`call` on the log of epoch logs and dead letters."""
        return self._calls.call("epoch log", lambda: call(self.logs.epoch), timeout_ms or self._timeout_ms)

    def topic(self, stream: StreamConfig) -> TopicInfo:
        """Raises NotFound, Unavailable and what else the log says."""
        return self.of(stream, lambda log: log.topic(stream.topic))

    def wanted_topic(self, table: str, stream: StreamConfig) -> TopicInfo:
        """For a table that is being created: a topic that does not exist is the user's error, named with those that
        are called nearly so."""
        try:
            return self.topic(stream)
        except NotFound:
            near = difflib.get_close_matches(stream.topic, self._names(stream), n=3, cutoff=0.6)
            hint = f"create it first: {_how_to_create(stream)}"
            if near:
                hint = f"did you mean {' or '.join(map(repr, near))}? Otherwise {hint}"
            raise InvalidConfig(f"table {table}: stream topic {stream.topic!r} does not exist", hint=hint) from None

    def _names(self, stream: StreamConfig) -> list[str]:
        try:
            return [info.name for info in self.of(stream, lambda log: log.topics())]
        except CremantError:
            return []  # only a hint would be the poorer

    def ends(self, stream: StreamConfig, partitions: Iterable[int], *, timeout_ms: int) -> dict[int, int]:
        """End offset of each partition."""

        def latest(log: Log) -> dict[int, int]:
            return {partition: log.latest(stream.topic, partition) for partition in partitions}

        return self.of(stream, latest, timeout_ms=timeout_ms)


@contextlib.contextmanager
def naming(table: str) -> Iterator[None]:
    """What goes wrong with logs inside names the table that it is asked for."""
    try:
        yield
    except PeerError as error:
        raise type(error)(f"table {table}: {error.message}", hint=error.hint) from error


class Round:
    """One look at many tables: remembers which streams did not answer, and does not ask them again."""

    def __init__(self) -> None:
        self._silent: set[str] = set()

    def ask(self, stream: StreamConfig, call: Callable[[], T], *, quiet: bool = False) -> T | None:
        """None when the stream did not answer, now or before in this round. NotFound and user errors are raised."""
        cluster = cluster_of(stream)
        if cluster in self._silent:
            return None
        try:
            return call()
        except PeerError as error:
            self._silent.add(cluster)
            if not quiet:
                log_failure(_log, "a stream did not answer", error, cluster=cluster)
            return None


def cluster_of(stream: StreamConfig) -> str:
    """Streams of one cluster answer or fail together."""
    return f"{stream.stream_type} {stream.brokers}"


def _how_to_create(stream: StreamConfig) -> str:
    if stream.stream_type == "kafka":
        return f"kafka-topics.sh --create --topic {stream.topic} --partitions 2 --bootstrap-server …"
    return f"cremant topic create {stream.topic} --partitions 2"
