# SPDX-License-Identifier: Apache-2.0
"""What a Python worker process keeps between tasks: the open logs, compiled ingest plans, one reader per partition.

Workers survive batches, but a partition has no home among them: a reader is moved to the wanted offset, which costs
next to nothing when it is there already. Everything is keyed by what makes it valid, so tables can share a worker.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cremant.ingest.messages import Schemas
from cremant.ingest.plan import Ingested, IngestPlan, compile_ingest
from cremant.ingest.registry import parse_registry
from cremant.log.api import Log, LogReader, MessageBatch, TopicInfo
from cremant.log.open import Logs, open_logs
from cremant.model.cluster import TableRecord
from cremant.model.errors import InvariantViolation, NotFound
from cremant.model.secrets import resolve_all
from cremant.pipeline.plan import Share
from cremant.pipeline.spec import RunSpec, read_config

if TYPE_CHECKING:
    from cremant.pipeline.registry import RegistryClient

#: Open readers of one worker: four tables of 16 partitions each.
READERS_MAX = 64
#: Compiled plans: a worker serves a few tables, each with the version in force and the one before.
PLANS_MAX = 32


class Table:
    """A table at one config version."""

    def __init__(self, record: TableRecord) -> None:
        self.record = record
        self.ingest: IngestPlan = compile_ingest(record.table_schema, record.config, _read_text)
        self._registry: RegistryClient | None = None

    def run(self, batch: MessageBatch, partition: int) -> Ingested:
        """Raises Unavailable: a schema registry does not answer."""
        ids = self.ingest.schema_ids(batch)
        schemas = self._asked(ids) if ids else {}
        return self.ingest.run(batch, partition=partition, schemas=schemas)

    def _asked(self, ids: set[int]) -> Schemas:
        if self._registry is None:
            # Here, because a client of HTTP would be a third of the start of every worker.
            from cremant.pipeline.registry import RegistryClient

            properties = resolve_all(self.record.config.stream.decoder_properties, os.environ, _read_text)
            self._registry = RegistryClient(parse_registry(properties))
        return self._registry.schemas(ids)

    def close(self) -> None:
        if self._registry is not None:
            self._registry.close()


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


_logs: dict[tuple[tuple[str, Any], ...], Logs] = {}
_streams: OrderedDict[tuple[str, str, int], tuple[Log, ExitStack]] = OrderedDict()
_tables: OrderedDict[tuple[str, str, int], Table] = OrderedDict()
_readers: OrderedDict[tuple[str, str, int, int], LogReader] = OrderedDict()


def logs_of(spec: RunSpec) -> Logs:
    key = tuple(sorted(spec.log_settings.items()))
    if key not in _logs:
        _logs[key] = open_logs(spec.settings())
    return _logs[key]


def epoch_log_of(spec: RunSpec) -> Log:
    """Where row blocks, gaps and dead letters go."""
    return logs_of(spec).epoch


def stream_of(spec: RunSpec) -> Log:
    """Where the table's stream is. Raises InvalidConfig."""
    key = (spec.run_dir, spec.incarnation, spec.stream_version)
    if key not in _streams:
        config = read_config(spec.run_dir, spec.stream_version).config
        use = ExitStack()
        _streams[key] = use.enter_context(logs_of(spec).stream(config.stream)), use
        while len(_streams) > PLANS_MAX:
            _streams.popitem(last=False)[1][1].close()
    _streams.move_to_end(key)
    return _streams[key][0]


def table_at(spec: RunSpec, config_version: int) -> Table:
    key = (spec.run_dir, spec.incarnation, config_version)
    table = _tables.get(key)
    if table is None:
        table = _tables[key] = Table(read_config(spec.run_dir, config_version))
        while len(_tables) > PLANS_MAX:
            _tables.popitem(last=False)[1].close()
    _tables.move_to_end(key)
    return table


def check_topic(log: Log, name: str, incarnation: str, table: str) -> TopicInfo:
    """The stream topic. Raises InvariantViolation (E-8) if it is not the one the table was made for, PeerError if
    that cannot be found out now."""
    try:
        topic = log.topic(name)
    except NotFound as error:
        raise InvariantViolation(
            "E-8", f"topic {name} of table {table} was deleted",
            hint="re-create the table for a new topic; what is sealed stays queryable",
        ) from error  # fmt: skip
    if incarnation and topic.incarnation != incarnation:
        raise InvariantViolation(
            "E-8",
            f"topic {name} was deleted and created again (incarnation {topic.incarnation}, table {table} reads "
            f"{incarnation}); its offsets start anew",
            hint="re-create the table",
        )
    return topic


def position_readers(spec: RunSpec, shares: Iterable[Share]) -> None:
    """All readers of a task turn to their places at once, so that a log that fetches from afar does so for all of them
    while the first is read."""
    for share in shares:
        if share.range.length:
            reader_at(spec, share.partition, share.first)


def reader_at(spec: RunSpec, partition: int, offset: int) -> LogReader:
    """A reader of the stream partition that stands at `offset`."""
    key = _reader_key(spec, partition)
    reader = _readers.pop(key, None)
    if reader is None:
        reader = stream_of(spec).reader(spec.topic, partition, offset)
        # From now on the reader refuses messages of any other topic of that name.
        check_topic(stream_of(spec), spec.topic, spec.topic_incarnation, spec.table)
    else:
        reader.seek(offset)
    _readers[key] = reader
    while len(_readers) > READERS_MAX:
        _, oldest = _readers.popitem(last=False)
        oldest.close()
    return reader


def _reader_key(spec: RunSpec, partition: int) -> tuple[str, str, int, int]:
    return (spec.run_dir, spec.incarnation, spec.stream_version, partition)


def drop_reader(spec: RunSpec, partition: int) -> None:
    """Forgets a reader that failed."""
    reader = _readers.pop(_reader_key(spec, partition), None)
    if reader is not None:
        reader.close()
