# SPDX-License-Identifier: Apache-2.0
"""What a Python worker process keeps between tasks: the open log, compiled ingest plans, one reader per partition.

Workers survive batches, but a partition has no home among them: a reader is moved to the wanted offset, which costs
next to nothing when it is there already. Everything is keyed by what makes it valid, so tables can share a worker.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from cremant.ingest.plan import IngestPlan, compile_ingest
from cremant.log.api import Log, LogReader
from cremant.log.open import open_log
from cremant.model.cluster import TableRecord
from cremant.pipeline.spec import RunSpec, read_config

#: Open readers of one worker: four tables of 16 partitions each.
READERS_MAX = 64
#: Compiled plans: a worker serves a few tables, each with the version in force and the one before.
PLANS_MAX = 32


class Table:
    """A table at one config version."""

    def __init__(self, record: TableRecord) -> None:
        self.record = record
        self.ingest: IngestPlan = compile_ingest(record.table_schema, record.config)


_logs: dict[tuple[tuple[str, Any], ...], Log] = {}
_tables: OrderedDict[tuple[str, str, int], Table] = OrderedDict()
_readers: OrderedDict[tuple[str, str, str, int], LogReader] = OrderedDict()


def log_of(spec: RunSpec) -> Log:
    key = tuple(sorted(spec.log_settings.items()))
    if key not in _logs:
        _logs[key] = open_log(spec.settings())
    return _logs[key]


def table_at(spec: RunSpec, config_version: int) -> Table:
    key = (spec.run_dir, spec.incarnation, config_version)
    table = _tables.get(key)
    if table is None:
        table = _tables[key] = Table(read_config(spec.run_dir, config_version))
        while len(_tables) > PLANS_MAX:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return table


def reader_at(spec: RunSpec, partition: int, offset: int) -> LogReader:
    """A reader of the stream partition that stands at `offset`."""
    key = (str(spec.log_settings["log_dir"]), spec.topic, spec.topic_incarnation, partition)
    reader = _readers.pop(key, None)
    if reader is None:
        reader = log_of(spec).reader(spec.topic, partition, offset)
    elif reader.position != offset:
        reader.seek(offset)
    _readers[key] = reader
    while len(_readers) > READERS_MAX:
        _, oldest = _readers.popitem(last=False)
        oldest.close()
    return reader


def drop_reader(spec: RunSpec, partition: int) -> None:
    """Forgets a reader that failed."""
    key = (str(spec.log_settings["log_dir"]), spec.topic, spec.topic_incarnation, partition)
    reader = _readers.pop(key, None)
    if reader is not None:
        reader.close()
