# SPDX-License-Identifier: Apache-2.0
"""Tables: create, change, pause, drop.

Rules
- Creating makes the topics first (their names carry the fresh incarnation), then all records in one compare-and-set.
  A controller that dies in between leaves topics that no record names: `sweep_topics` removes them.
- Dropping removes all records in one compare-and-set and leaves a DropRecord; the name is free at once, everyone lets
  go when the view no longer has that incarnation, and then the bytes go (`finish_drops`).
- A change of config or schema raises the config version.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

import msgspec

from cremant.cluster.partitions import missing_partitions, open_partition
from cremant.cluster.placement import load_of, place
from cremant.controller.catalog import Catalog, DropRecord, Record, drop_key
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.ingest.plan import compile_ingest
from cremant.log.api import Log, TopicInfo
from cremant.model.cluster import (
    PipelineRecord,
    Role,
    TableRecord,
    partition_key,
    pipeline_key,
    schema_key,
    segment_key,
    table_key,
)
from cremant.model.errors import AlreadyExists, Conflict, InvalidConfig, NotFound
from cremant.model.limits import INSTANCE_DEAD_AFTER_MS, PARTITIONS_MAX, TABLES_MAX
from cremant.model.names import dead_letter_topic, epoch_topic
from cremant.model.schema import Schema
from cremant.model.table import StartFrom, TableConfig
from cremant.model.table_json import check_update, parse_table, validate_table
from cremant.shell.logs import log_event, log_failure
from cremant.store.deepstore import DeepStore, table_prefix

_log = logging.getLogger(__name__)

#: A dropped table's bytes go once no live instance reports it, or at the latest after this.
DROP_GRACE_MS = 30_000
#: How long a creation waits for enough live servers: those of a cluster that is just starting.
SERVERS_GRACE_MS = 2 * INSTANCE_DEAD_AFTER_MS
_INTERNAL_TOPIC = re.compile(r"^(?:epochs|dead-letters)\.(?P<table>.+)\.(?P<incarnation>[0-9a-f]{16})$")


def is_internal_topic(topic: str) -> bool:
    return _INTERNAL_TOPIC.match(topic) is not None


class Tables:
    def __init__(
        self,
        catalog: Catalog,
        instances: Instances,
        log: Log,
        deep_store: DeepStore,
        clock: Clock,
        *,
        servers_grace_ms: int = SERVERS_GRACE_MS,
    ) -> None:
        self._catalog = catalog
        self._instances = instances
        self._log = log
        self._deep_store = deep_store
        self._clock = clock
        self._servers_grace_ms = servers_grace_ms
        #: Incarnations whose topics exist or may, but whose records do not yet.
        self._being_created: set[str] = set()

    def find(self, name: str) -> TableRecord:
        record = self._catalog.tables.get(name)
        if record is None:
            raise NotFound(f"Table {name}_REALTIME not found!")
        return record

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, document: Any, schema: Schema | None = None) -> tuple[TableConfig, Schema]:
        """Config and schema of a table that could be created. Raises InvalidConfig."""
        config = parse_table(document)
        found = schema or self._catalog.schemas.get(config.name)
        if found is None:
            raise InvalidConfig(
                f"Failed to find schema for table: {config.name_with_type}",
                hint=f"POST /schemas named {config.name} first",
            )
        validate_table(config, found)
        compile_ingest(found, config)
        return config, found

    def _stream(self, config: TableConfig) -> TopicInfo:
        topic = config.stream.topic
        if is_internal_topic(topic):
            raise InvalidConfig(f"topic {topic} is internal and cannot be a table's stream")
        try:
            info = self._log.topic(topic)
        except NotFound:
            raise InvalidConfig(
                f"table {config.name}: stream topic {topic!r} does not exist",
                hint=f"create it first: cremant topic create {topic} --partitions 2",
            ) from None
        if info.partitions > PARTITIONS_MAX:
            raise InvalidConfig(f"topic {topic} has {info.partitions} partitions, at most {PARTITIONS_MAX} are allowed")
        return info

    # --- create ---------------------------------------------------------------------------------------------------

    def create(self, document: Any) -> TableConfig:
        """Raises InvalidConfig, AlreadyExists, NotEnoughServers."""
        config, schema = self.check(document)
        self._refuse_existing(config)
        stream = self._stream(config)
        self._await_servers(config.replication)
        starts = {p: self._start_offset(config, p) for p in range(stream.partitions)}
        incarnation = secrets.token_hex(8)
        with self._catalog.lock:
            self._being_created.add(incarnation)
        try:
            for topic in (epoch_topic(config.name, incarnation), dead_letter_topic(config.name, incarnation)):
                self._log.create_topic(topic, stream.partitions)
            self._write_new(config, schema, incarnation, stream, starts)
        except BaseException:
            self._delete_topics(config.name, incarnation)
            raise
        finally:
            with self._catalog.lock:
                self._being_created.discard(incarnation)
        log_event(_log, "table created", table=config.name, incarnation=incarnation, partitions=stream.partitions)
        return config

    def _refuse_existing(self, config: TableConfig) -> None:
        if config.name in self._catalog.tables:
            raise AlreadyExists(
                f"Table config for {config.name_with_type} already exists. If this is unexpected, try deleting the "
                "table to remove all metadata associated with it before attempting to recreate."
            )
        if len(self._catalog.tables) >= TABLES_MAX:
            raise InvalidConfig(f"there are {TABLES_MAX} tables already, the most that is allowed")

    def _await_servers(self, replication: int) -> None:
        """Waits for servers of a cluster that is just starting. Raises NotEnoughServers."""
        self._instances.wait_for_live(Role.SERVER, replication, self._servers_grace_ms / 1000)
        place([0], replication, self._instances.live(Role.SERVER), {})

    def _start_offset(self, config: TableConfig, partition: int) -> int:
        topic = config.stream.topic
        if config.stream.start_from is StartFrom.EARLIEST:
            return self._log.earliest(topic, partition)
        return self._log.latest(topic, partition)

    def _write_new(
        self, config: TableConfig, schema: Schema, incarnation: str, stream: TopicInfo, starts: dict[int, int]
    ) -> None:
        name, now_ms = config.name, self._clock.now_ms()
        with self._catalog.lock:
            self._refuse_existing(config)
            if self._catalog.schemas.get(name) != schema:
                raise Conflict(f"schema {name} was changed while table {name} was being created", hint="try again")
            record = TableRecord(
                config=config, table_schema=schema, incarnation=incarnation, topic_incarnation=stream.incarnation,
                created_ms=now_ms,
            )  # fmt: skip
            changes: dict[str, Record | None] = {table_key(name): record, pipeline_key(name): PipelineRecord()}
            changes.update(self._new_partitions(record, starts, now_ms))
            self._catalog.commit(changes, unchanged=[schema_key(name)])

    def _new_partitions(self, record: TableRecord, starts: dict[int, int], now_ms: int) -> dict[str, Record | None]:
        everyone = [p for partitions in self._catalog.partitions.values() for p in partitions.values()]
        servers = self._instances.live(Role.SERVER)
        placed = place(sorted(starts), record.config.replication, servers, load_of(everyone))
        changes: dict[str, Record | None] = {}
        for partition, replicas in placed.items():
            opened, segment = open_partition(
                record.config.name, partition, starts[partition], replicas, now_ms, record.config_version
            )
            changes[partition_key(record.config.name, partition)] = opened
            changes[segment_key(record.config.name, segment.name)] = segment
        return changes

    # --- change ---------------------------------------------------------------------------------------------------

    def change(self, name: str, document: Any) -> TableConfig:
        """Raises InvalidConfig, Conflict (what cannot change on a live table), NotFound."""
        with self._catalog.lock:
            config, schema = self.check(document)
            if config.name != name:
                raise InvalidConfig(
                    f"Request table {name} does not match table name in the body {config.name_with_type}"
                )
            record = self._catalog.tables.get(name)
            if record is None:
                raise NotFound(f"Table {config.name_with_type} does not exist")
            check_update(record.config, config)
            self._replace(record, config=config, table_schema=schema, config_version=record.config_version + 1)
        return config

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        with self._catalog.lock:
            record = self.find(name)
            if record.enabled != enabled:
                self._replace(record, enabled=enabled)

    def set_paused(self, name: str, *, paused: bool, comment: str) -> TableRecord:
        with self._catalog.lock:
            record = self.find(name)
            return self._replace(record, paused=paused, pause_comment=comment, pause_changed_ms=self._clock.now_ms())

    def _replace(self, record: TableRecord, **fields: Any) -> TableRecord:
        changed = msgspec.structs.replace(record, **fields)
        self._catalog.commit({table_key(record.config.name): changed})
        return changed

    def grow(self, name: str) -> int:
        """Takes in partitions that the stream has gained. Returns how many. The epoch log grows first: a partition in
        the records always has its epoch log."""
        record = self._catalog.tables.get(name)
        if record is None:
            return 0
        stream = self._log.topic(record.config.stream.topic)
        if stream.incarnation != record.topic_incarnation:  # E-8: another topic of that name; the pipeline says so
            return 0
        new = missing_partitions(self._catalog.partitions.get(name, {}), min(stream.partitions, PARTITIONS_MAX))
        if not new:
            return 0
        for topic in (epoch_topic(name, record.incarnation), dead_letter_topic(name, record.incarnation)):
            if self._log.topic(topic).partitions < stream.partitions:
                self._log.grow_topic(topic, stream.partitions)
        starts = {p: self._log.earliest(record.config.stream.topic, p) for p in new}
        with self._catalog.lock:
            if self._catalog.tables.get(name) != record:
                return 0  # changed meanwhile: the next round sees it
            changes = self._new_partitions(record, starts, self._clock.now_ms())
            self._catalog.commit(changes, unchanged=[table_key(name)])
        log_event(_log, "table has grown", table=name, partitions=new)
        return len(new)

    # --- drop -----------------------------------------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """The name is free when this returns; bytes go later. Raises NotFound."""
        with self._catalog.lock:
            record = self.find(name)
            changes: dict[str, Record | None] = {table_key(name): None, pipeline_key(name): None}
            changes.update({partition_key(name, p): None for p in self._catalog.partitions.get(name, {})})
            changes.update({segment_key(name, s): None for s in self._catalog.segments.get(name, {})})
            changes[drop_key(name, record.incarnation)] = DropRecord(
                table=name, incarnation=record.incarnation, dropped_ms=self._clock.now_ms()
            )
            self._catalog.commit(changes)
        log_event(_log, "table dropped", table=name, incarnation=record.incarnation)

    def finish_drops(self) -> int:
        """Removes the bytes of dropped tables that everyone let go of. Returns how many are finished."""
        with self._catalog.lock:
            waiting = list(self._catalog.drops.items())
        finished = 0
        for key, record in waiting:
            waited_ms = self._clock.now_ms() - record.dropped_ms
            if self._instances.names_incarnation(record.incarnation) and waited_ms < DROP_GRACE_MS:
                continue
            self._delete_topics(record.table, record.incarnation)
            for stored in self._deep_store.list(table_prefix(record.table, record.incarnation)):
                self._deep_store.delete(stored.name)
            self._catalog.commit({key: None})
            log_event(_log, "dropped table's bytes removed", table=record.table, incarnation=record.incarnation)
            finished += 1
        return finished

    def sweep_topics(self) -> int:
        """Removes topics of tables whose creation did not finish. Returns how many."""
        orphans = []
        for info in self._log.topics():
            found = _INTERNAL_TOPIC.match(info.name)
            if found is None:
                continue
            with self._catalog.lock:
                if not self._is_known(found["table"], found["incarnation"]):
                    orphans.append(info.name)
        for topic in orphans:
            self._delete_topic(topic)
        return len(orphans)

    def _is_known(self, table: str, incarnation: str) -> bool:
        record = self._catalog.tables.get(table)
        return (
            (record is not None and record.incarnation == incarnation)
            or drop_key(table, incarnation) in self._catalog.drops
            or incarnation in self._being_created
        )

    def _delete_topics(self, table: str, incarnation: str) -> None:
        self._delete_topic(epoch_topic(table, incarnation))
        self._delete_topic(dead_letter_topic(table, incarnation))

    def _delete_topic(self, topic: str) -> None:
        try:
            self._log.delete_topic(topic)
        except NotFound:
            pass
        except Exception as error:
            log_failure(_log, "topic could not be deleted, the next sweep tries again", error, topic=topic)
