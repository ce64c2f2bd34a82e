# SPDX-License-Identifier: Apache-2.0
"""Tables: create, change, pause, drop.

Rules
- Creating makes the topics first (their names carry the fresh incarnation), then all records in one compare-and-set.
  Before that it leaves a DropRecord, which the last step takes back: what a controller that dies in between leaves
  behind is removed as of a dropped table.
- Dropping removes all records in one compare-and-set and leaves a DropRecord; the name is free at once, everyone lets
  go when the view no longer has that incarnation, and then the bytes go (`finish_drops`). Where a log or store cannot
  be reached, the record stays and the next round tries again. Then it stays for what a server uploads late that dies
  before it can tell.
- A change of config or schema raises the config version.
- Logs are asked outside of the catalog's lock, with a deadline (`controller/streams.py`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from cremant.cluster.leases import with_keys
from cremant.cluster.partitions import missing_partitions, open_partition
from cremant.cluster.placement import check_servers, load_of, place
from cremant.controller.catalog import Catalog, DropRecord, Record, drop_key
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.controller.jobs import dropped_jobs
from cremant.controller.streams import Streams, naming
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
from cremant.model.errors import AlreadyExists, Conflict, CremantError, InvalidConfig, NotFound, PeerError
from cremant.model.limits import INSTANCE_DEAD_AFTER_MS, PARTITIONS_MAX, STREAM_CHANGE_MS, TABLES_MAX
from cremant.model.names import dead_letter_topic, epoch_topic, raw_table_name
from cremant.model.schema import Schema
from cremant.model.schema_json import check_compatible
from cremant.model.secrets import restore
from cremant.model.table import StartFrom, TableConfig
from cremant.model.table_json import check_update, parse_table, validate_table
from cremant.model.upsert_json import check_upsert_change, completed_by
from cremant.shell.logs import log_event, log_failure
from cremant.store.deepstore import DeepStore, delete_by_url, is_in, table_prefix

_log = logging.getLogger(__name__)

#: A dropped table's bytes go once no live instance reports it, or at the latest after this.
DROP_GRACE_MS = 30_000
#: Its objects are looked for once more after so long: an upload takes less.
DROP_AGAIN_MS = 2 * 3_600_000
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
        streams: Streams,
        deep_store: DeepStore,
        clock: Clock,
        *,
        servers_grace_ms: int = SERVERS_GRACE_MS,
    ) -> None:
        self._catalog = catalog
        self._instances = instances
        self._streams = streams
        self._deep_store = deep_store
        self._clock = clock
        self._servers_grace_ms = servers_grace_ms
        #: Incarnations whose topics exist or may, but whose records do not yet.
        self._being_created: set[str] = set()
        #: Dropped incarnation -> how often its bytes could not be removed.
        self._drop_failures: dict[str, int] = {}

    def find(self, name: str) -> TableRecord:
        return self._catalog.table(name, "Table {0}_REALTIME not found!")

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self, document: Any, schema: Schema | None = None) -> tuple[TableConfig, Schema]:
        """Config and schema of a table that could be created. Values that were hidden from the author are those of the
        present table of that name. Raises InvalidConfig."""
        config = parse_table(self._restored(document))
        found = schema or self._catalog.schemas.get(config.name)
        if found is None:
            raise InvalidConfig(
                f"Failed to find schema for table: {config.name_with_type}",
                hint=f"POST /schemas named {config.name} first",
            )
        config = completed_by(found, config)
        validate_table(config, found)
        compile_ingest(found, config)
        return config, found

    def _restored(self, document: Any) -> Any:
        name = document.get("tableName") if isinstance(document, dict) else None
        record = self._catalog.tables.get(raw_table_name(name)) if isinstance(name, str) else None
        return restore(document, record.config.raw_json if record is not None else None)

    def _stream(self, config: TableConfig) -> TopicInfo:
        topic = config.stream.topic
        if is_internal_topic(topic):
            raise InvalidConfig(f"topic {topic} is internal and cannot be a table's stream")
        info = self._streams.wanted_topic(config.name, config.stream)
        if info.partitions > PARTITIONS_MAX:
            raise InvalidConfig(f"topic {topic} has {info.partitions} partitions, at most {PARTITIONS_MAX} are allowed")
        return info

    # --- create ---------------------------------------------------------------------------------------------------

    def create(self, document: Any) -> TableConfig:
        """Raises InvalidConfig, AlreadyExists, NotEnoughServers."""
        config, schema = self.check(document)
        self.refuse_existing(config)
        with naming(config.name):
            stream = self._stream(config)
            self._await_servers(config.replication)
            self._refuse_unheard_tls(config)
            starts = self._start_offsets(config, range(stream.partitions))
        incarnation = secrets.token_hex(8)
        intent = self._begin_creation(config.name, incarnation)
        try:
            with naming(config.name):
                self._create_topics(config.name, incarnation, stream.partitions)
            self._write_new(config, schema, incarnation, stream, starts)
        except PeerError:
            # A call that was given up may still be carried out: what it makes is removed a while later.
            self._catalog.commit({drop_key(config.name, incarnation): _later(intent)})
            raise
        except BaseException:
            self._finish_drop(intent, created_in_vain=True)
            raise
        finally:
            self._being_created.discard(incarnation)
        log_event(_log, "table created", table=config.name, incarnation=incarnation, partitions=stream.partitions)
        return config

    def _begin_creation(self, name: str, incarnation: str) -> DropRecord:
        intent = DropRecord(table=name, incarnation=incarnation, dropped_ms=self._clock.now_ms())
        with self._catalog.lock:
            self._being_created.add(incarnation)
            self._catalog.commit({drop_key(name, incarnation): intent})
        return intent

    def _create_topics(self, name: str, incarnation: str, partitions: int) -> None:
        def create(log: Log) -> None:
            for topic in _own_topics(name, incarnation):
                log.create_topic(topic, partitions)

        self._streams.of_epochs(create, timeout_ms=STREAM_CHANGE_MS)

    def refuse_existing(self, config: TableConfig) -> None:
        """Raises AlreadyExists, InvalidConfig (too many tables)."""
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
        check_servers(replication, self._instances.usable())

    def _refuse_unheard_tls(self, config: TableConfig) -> None:
        """Raises InvalidConfig where a server could not give segments by the scheme that the table asks for."""
        if config.completion.peer_scheme == "https" and (without := self._instances.without_tls()):
            raise InvalidConfig(
                f"/segmentsConfig/peerSegmentDownloadScheme: https, but {', '.join(without)} offer no HTTPS",
                hint="start every server with the settings tls_cert and tls_key, or write http",
            )

    def _start_offsets(self, config: TableConfig, partitions: Iterable[int]) -> dict[int, int]:
        topic, earliest = config.stream.topic, config.stream.start_from is StartFrom.EARLIEST

        def offsets(log: Log) -> dict[int, int]:
            return {p: log.earliest(topic, p) if earliest else log.latest(topic, p) for p in partitions}

        return self._streams.of(config.stream, offsets)

    def _write_new(
        self, config: TableConfig, schema: Schema, incarnation: str, stream: TopicInfo, starts: dict[int, int]
    ) -> None:
        name, now_ms = config.name, self._clock.now_ms()
        with self._catalog.lock:
            self.refuse_existing(config)
            if self._catalog.schemas.get(name) != schema:
                raise Conflict(f"schema {name} was changed while table {name} was being created", hint="try again")
            record = TableRecord(
                config=config, table_schema=schema, incarnation=incarnation, topic_incarnation=stream.incarnation,
                created_ms=now_ms,
            )  # fmt: skip
            changes: dict[str, Record | None] = {table_key(name): record, pipeline_key(name): PipelineRecord()}
            changes.update(self._new_partitions(record, starts, now_ms))
            changes[drop_key(name, incarnation)] = None
            self._catalog.commit(changes, unchanged=[schema_key(name)])

    def _new_partitions(self, record: TableRecord, starts: dict[int, int], now_ms: int) -> dict[str, Record | None]:
        everyone = [p for partitions in self._catalog.partitions.values() for p in partitions.values()]
        own = self._catalog.partitions.get(record.config.name, {}).values()
        servers = self._instances.usable()
        placed = place(sorted(starts), record.config.replication, servers, load_of(everyone), load_of(own))
        changes: dict[str, Record | None] = {}
        for partition, replicas in placed.items():
            opened, segment = open_partition(record.config.name, partition, starts[partition], replicas, now_ms)
            changes[partition_key(record.config.name, partition)] = opened
            changes[segment_key(record.config.name, segment.name)] = segment
        return changes

    # --- change ---------------------------------------------------------------------------------------------------

    def change(self, name: str, document: Any, schema: Schema | None = None) -> TableConfig:
        """Config and, if given, schema, both or none. Raises InvalidConfig, Conflict (what cannot change on a live
        table), NotFound."""
        with self._catalog.lock:
            config, found = self.check(document, schema)
            if config.name != name:
                raise InvalidConfig(
                    f"Request table {name} does not match table name in the body {config.name_with_type}"
                )
            record = self._catalog.tables.get(name)
            if record is None:
                raise NotFound(f"Table {config.name_with_type} does not exist")
            check_update(record.config, config)
            check_upsert_change(record.config, record.table_schema, config, found)
            if config.completion.peer_scheme != record.config.completion.peer_scheme:
                self._refuse_unheard_tls(config)
            check_compatible(record.table_schema, found)
            if config.replication > record.config.replication:
                check_servers(config.replication, self._instances.usable())
            changed = msgspec.structs.replace(
                record, config=config, table_schema=found, config_version=record.config_version + 1
            )
            pipeline = with_keys(self._catalog.pipelines[name], record.config, config)
            self._catalog.commit({table_key(name): changed, schema_key(name): found, pipeline_key(name): pipeline})
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
        """Takes in partitions that the stream has gained, up to PARTITIONS_MAX. Returns how many. The epoch log grows
        first: a partition in the records always has its epoch log. Raises InvalidConfig once there is nothing left to
        take in but partitions beyond the limit."""
        record = self._catalog.tables.get(name)
        if record is None:
            return 0
        stream = self._streams.topic(record.config.stream)
        if stream.incarnation != record.topic_incarnation:  # E-8: another topic of that name; the pipeline says so
            return 0
        wanted = min(stream.partitions, PARTITIONS_MAX)
        new = missing_partitions(self._catalog.partitions.get(name, {}), wanted)
        if not new:
            if stream.partitions > wanted:
                raise InvalidConfig(
                    f"table {name}: topic {record.config.stream.topic} has {stream.partitions} partitions, at most "
                    f"{PARTITIONS_MAX} are read: rows of partition {PARTITIONS_MAX} and above are not in the table",
                    hint="move the producers to a topic of fewer partitions and create a table for it",
                )
            return 0
        self._grow_topics(name, record.incarnation, wanted)
        topic = record.config.stream.topic
        starts = self._streams.of(record.config.stream, lambda log: {p: log.earliest(topic, p) for p in new})
        with self._catalog.lock:
            if self._catalog.tables.get(name) != record:
                return 0  # changed meanwhile: the next round sees it
            changes = self._new_partitions(record, starts, self._clock.now_ms())
            self._catalog.commit(changes, unchanged=[table_key(name)])
        log_event(_log, "table has grown", table=name, partitions=new)
        return len(new)

    def _grow_topics(self, name: str, incarnation: str, partitions: int) -> None:
        def grow(log: Log) -> None:
            for topic in _own_topics(name, incarnation):
                if log.topic(topic).partitions < partitions:
                    log.grow_topic(topic, partitions)

        self._streams.of_epochs(grow, timeout_ms=STREAM_CHANGE_MS)

    # --- drop -----------------------------------------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """The name is free when this returns; bytes go later. Raises NotFound."""
        with self._catalog.lock:
            record = self.find(name)
            changes: dict[str, Record | None] = {table_key(name): None, pipeline_key(name): None}
            changes.update({partition_key(name, p): None for p in self._catalog.partitions.get(name, {})})
            changes.update({segment_key(name, s): None for s in self._catalog.segments.get(name, {})})
            changes.update(dropped_jobs(self._catalog, name))
            changes[drop_key(name, record.incarnation)] = DropRecord(
                table=name, incarnation=record.incarnation, dropped_ms=self._clock.now_ms(), urls=self._former(name)
            )
            self._catalog.commit(changes)
        log_event(_log, "table dropped", table=name, incarnation=record.incarnation)

    def _former(self, name: str) -> tuple[str, ...]:
        """URLs of the table's objects that are not in the store in use."""
        urls = (url for segment in self._catalog.segments.get(name, {}).values() for url in segment.objects)
        return tuple(url for url in urls if not is_in(self._deep_store, url))

    def finish_drops(self) -> int:
        """Removes the bytes of dropped tables that everyone let go of. Returns how many are finished. A round ends at
        the first that cannot be removed now: logs that do not answer cost one waiting time. It has its next turn after
        those that failed less often, so it holds up nobody."""
        with self._catalog.lock:
            waiting = sorted(
                self._catalog.drops.values(), key=lambda record: self._drop_failures.get(record.incarnation, 0)
            )
        finished = 0
        for record in waiting:
            waited_ms = self._clock.now_ms() - record.dropped_ms
            # Times further away than any we give were written by another clock.
            too_early = 0 < record.not_before_ms - self._clock.now_ms() <= DROP_GRACE_MS
            if too_early or record.incarnation in self._being_created:
                continue
            if record.gone_ms and 0 <= self._clock.now_ms() - record.gone_ms < DROP_AGAIN_MS:
                continue
            if self._instances.names_incarnation(record.incarnation) and waited_ms < DROP_GRACE_MS:
                continue
            if not self._finish_drop(record):
                break
            finished += 1
        return finished

    def _finish_drop(self, record: DropRecord, *, created_in_vain: bool = False) -> bool:
        """False when something could not be removed now."""

        def delete(log: Log) -> None:
            for topic in _own_topics(record.table, record.incarnation):
                with contextlib.suppress(NotFound):
                    log.delete_topic(topic)

        try:
            for stored in self._deep_store.list(table_prefix(record.table, record.incarnation)):
                self._deep_store.delete(stored.name)
            self._delete_former(record)
            self._streams.of_epochs(delete, timeout_ms=STREAM_CHANGE_MS)
        except CremantError as error:
            log_failure(_log, "bytes of a dropped table stay for now", error, table=record.table)
            self._drop_failures[record.incarnation] = self._drop_failures.get(record.incarnation, 0) + 1
            return False
        again = not (record.gone_ms or created_in_vain)
        kept = msgspec.structs.replace(record, gone_ms=self._clock.now_ms(), urls=()) if again else None
        self._catalog.commit({drop_key(record.table, record.incarnation): kept})
        self._drop_failures.pop(record.incarnation, None)
        log_event(_log, "dropped table's bytes removed", table=record.table, incarnation=record.incarnation)
        return True

    def _delete_former(self, record: DropRecord) -> None:
        for url in record.urls:
            try:
                prefix = table_prefix(record.table, record.incarnation)
                delete_by_url(self._deep_store, url, prefix, self._catalog.store_id)
            except InvalidConfig as error:  # there is no way to it any more
                log_failure(_log, "an object of a former store stays", error, url=url)


def _later(record: DropRecord) -> DropRecord:
    return msgspec.structs.replace(record, not_before_ms=record.dropped_ms + DROP_GRACE_MS)


def _own_topics(table: str, incarnation: str) -> tuple[str, str]:
    return epoch_topic(table, incarnation), dead_letter_topic(table, incarnation)
