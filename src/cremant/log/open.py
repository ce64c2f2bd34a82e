# SPDX-License-Identifier: Apache-2.0
"""Opens the logs that a process's settings and its tables name.

Two things are logs: *streams*, which producers write (named by each table's stream properties), and the *epoch log*,
which the pipeline writes (named by the settings `epoch_log` and `kafka_…`). Either may be embedded or Kafka.

The embedded log and the epoch log stay open once they were asked for. Streams come and go with their tables, and a
Kafka log costs threads and connections: who uses one says for how long (`with logs.stream(…) as log`), logs that are
reached in the same way are one, and of those that nobody uses the last few stay open.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.log.kafka_config import resolved
from cremant.model.errors import InvalidConfig
from cremant.model.limits import KAFKA_UNUSED_LOGS_MAX
from cremant.model.properties import read_properties
from cremant.model.settings import Settings
from cremant.model.stream_json import parse_brokers
from cremant.model.table import StreamConfig


def log_directory(settings: Settings) -> Path:
    return Path(settings.log_dir or Path(settings.data_dir) / "log").absolute()


class _Shared:
    """A Kafka log and how many use it now."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.users = 0


class Logs:
    """The logs of a process, each opened when it is first asked for. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._embedded: EmbeddedLog | None = None
        self._epoch: Log | None = None
        #: By brokers and properties, secrets resolved: a secret that was changed is another way in. The last used last.
        self._kafka: OrderedDict[tuple[str, tuple[tuple[str, str], ...]], _Shared] = OrderedDict()

    @property
    def embedded(self) -> EmbeddedLog:
        """The embedded log in `log_dir`. Raises InvalidConfig, NoResource (not writable), Corrupt (a foreign
        directory)."""
        with self._guard:
            if self._embedded is None:
                self._embedded = EmbeddedLog(
                    log_directory(self._settings),
                    fsync=self._settings.log_fsync,
                    segment_bytes=self._settings.log_segment_bytes,
                    retention_ms=self._settings.log_retention_ms,
                )
            return self._embedded

    def expire(self) -> None:
        """Applies retention by age to the embedded log where there is one; none is made for it."""
        if log_directory(self._settings).exists():
            self.embedded.expire()

    @property
    def epoch(self) -> Log:
        """Where the epoch logs, dead letters and other topics of our own live. Raises InvalidConfig, and what
        `embedded` raises."""
        if self._epoch is None:
            self._epoch = self._open_epoch()
        return self._epoch

    def _open_epoch(self) -> Log:
        settings = self._settings
        if settings.epoch_log == "embedded":
            return self.embedded
        if settings.epoch_log != "kafka":
            raise InvalidConfig(f"setting epoch_log: expected embedded or kafka, found {settings.epoch_log!r}")
        brokers = parse_brokers(str(settings.kafka_brokers), "setting kafka_brokers")
        return self._take(brokers, _properties_of(str(settings.kafka_properties))).log

    @contextmanager
    def stream(self, stream: StreamConfig) -> Iterator[Log]:
        """The log that holds a table's stream, open until the end of the block at least. Raises InvalidConfig for a
        type or property that is not known."""
        if stream.stream_type == "embedded":
            yield self.embedded
            return
        if stream.stream_type != "kafka":
            raise InvalidConfig(f"streamType {stream.stream_type!r} is not supported by this version")
        shared = self._take(stream.brokers, stream.client_properties)
        try:
            yield shared.log
        finally:
            self._give_back(shared)

    def _take(self, brokers: str, properties: Mapping[str, str]) -> _Shared:
        """One user more of the log that is reached so. Raises InvalidConfig."""
        try:
            from cremant.log.kafka import KafkaLog
        except ModuleNotFoundError as error:
            if error.name != "confluent_kafka":
                raise
            raise InvalidConfig(
                f"Kafka at {brokers}: this installation has no client for Kafka", hint="pip install 'cremant[kafka]'"
            ) from None
        key = (brokers, tuple(sorted(resolved(properties).items())))
        with self._guard:
            if key not in self._kafka:
                log = KafkaLog(brokers, properties, replication=int(self._settings.kafka_replication))
                self._kafka[key] = _Shared(log)
            shared = self._kafka[key]
            shared.users += 1
            self._kafka.move_to_end(key)
            return shared

    def _give_back(self, shared: _Shared) -> None:
        with self._guard:
            shared.users -= 1
            unused = [key for key, one in self._kafka.items() if one.users == 0]
            surplus = [self._kafka.pop(key) for key in unused[:-KAFKA_UNUSED_LOGS_MAX]]
        for one in surplus:
            one.log.close()

    def close(self) -> None:
        with self._guard:
            logs: list[Log] = [shared.log for shared in self._kafka.values()]
            if self._embedded is not None:
                logs.append(self._embedded)
            self._kafka.clear()
            self._embedded = self._epoch = None
        for log in logs:
            log.close()


def _properties_of(path: str) -> dict[str, str]:
    if not path:
        return {}
    try:
        return read_properties(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"setting kafka_properties: {path} cannot be read: {error}") from error
    except InvalidConfig as error:
        raise InvalidConfig(f"setting kafka_properties: {path}: {error.message}", hint=error.hint) from None


def open_logs(settings: Settings) -> Logs:
    return Logs(settings)
