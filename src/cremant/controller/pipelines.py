# SPDX-License-Identifier: Apache-2.0
"""Pipeline leases, generations and bases: carries out `cluster.leases`.

Rule: only what fences is durable (who holds, which generation, which base); until when is kept in memory, and after a
restart of the controller the known holder gets one full lease before anyone else may have it, whatever the wall clock
of the earlier run was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cremant.cluster import leases
from cremant.cluster.states import external_view
from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.controller.instances import Instances
from cremant.model.cluster import PipelineRecord, TableRecord, pipeline_key
from cremant.model.errors import Fenced, UserError
from cremant.model.limits import (
    PIPELINE_LEASE_MS,
    STANDBY_PATIENCE_MS,
    UPSERT_TTL_EVERY_MIN_MS,
    UPSERT_TTL_EVERY_MS,
)
from cremant.model.segments import ReplicaState, SegmentStatus
from cremant.model.table import TableConfig
from cremant.shell.logs import log_event
from cremant.wire.messages import (
    BaseRequest,
    GenerationReply,
    GenerationRequest,
    LeaseReply,
    LeaseRequest,
)

_log = logging.getLogger(__name__)


class Pipelines:
    def __init__(
        self, catalog: Catalog, instances: Instances, clock: Clock, retention_now_ms: Callable[[], int | None]
    ) -> None:
        """`retention_now_ms`: what retention goes by; None = the clock is in doubt, nothing expires."""
        self._retention_now_ms = retention_now_ms
        self._catalog = catalog
        self._instances = instances
        self._clock = clock
        until_ms = clock.now_ms() + PIPELINE_LEASE_MS
        self._renewed_until_ms = {name: until_ms for name, record in catalog.pipelines.items() if record.holder}

    def _record(self, table: str, incarnation: str) -> PipelineRecord:
        """With the lease as renewed. Raises Fenced when the table is gone or another one."""
        table_record = self._catalog.tables.get(table)
        if table_record is None or table_record.incarnation != incarnation:
            raise Fenced(f"table {table} has no incarnation {incarnation}", hint="it was dropped: let it go")
        record = self._catalog.pipelines[table]
        until_ms = self._renewed_until_ms.get(table, 0) if record.holder else 0
        return msgspec.structs.replace(record, lease_until_ms=until_ms)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        with self._catalog.lock:
            record = self._record(request.table, request.incarnation)
            now_ms = self._clock.now_ms()
            if self._is_replaced(request.holder):
                raise Fenced(f"{request.holder}: a newer process runs under this id", hint="stop this one")
            if request.release:
                released = leases.release(record, request.holder)
                if released != record:
                    self._write(request.table, released)
                return LeaseReply(held=False, holder=released.holder, lease_until_ms=released.lease_until_ms)
            replaced = record.holder is not None and self._is_replaced(record.holder)
            created_ms = self._catalog.tables[request.table].created_ms
            if request.standby and leases.is_new(record) and now_ms - created_ms < STANDBY_PATIENCE_MS:
                return LeaseReply(held=False, holder=None, lease_until_ms=0)
            taken = leases.take(record, request.holder, now_ms, PIPELINE_LEASE_MS, replaced=replaced)
            if taken is None:
                return LeaseReply(held=False, holder=record.holder, lease_until_ms=record.lease_until_ms)
            if record.holder == request.holder:
                self._renewed_until_ms[request.table] = taken.lease_until_ms
            else:
                self._write(request.table, taken)
                log_event(_log, "pipeline lease taken", table=request.table, holder=request.holder, was=record.holder)
            return LeaseReply(held=True, holder=request.holder, lease_until_ms=taken.lease_until_ms)

    def generation(self, request: GenerationRequest) -> GenerationReply:
        with self._catalog.lock:
            record = self._record(request.table, request.incarnation)
            if self._is_replaced(request.holder):
                raise Fenced(f"{request.holder}: a newer process runs under this id", hint="stop this one")
            granted = leases.next_generation(record, request.holder, self._clock.now_ms())
            self._write(request.table, granted)
            log_event(_log, "generation granted", table=request.table, generation=granted.generation)
            return GenerationReply(
                generation=granted.generation, base=granted.base, checkpoint=granted.checkpoint, rewind=granted.rewind,
                rebuild=granted.rebuilds_asked if granted.rebuilds_asked > granted.rebuilds_begun else 0,
                keyed_from=granted.keyed_from,
                expire_before_ms=self._expire_before_ms(self._catalog.tables[request.table].config),
            )  # fmt: skip

    def _expire_before_ms(self, config: TableConfig) -> int | None:
        """Where the retention of keys begins, for those that live as long as the table's rows."""
        retained_ms = config.upsert.retained_ms if config.upsert is not None else None
        now_ms = self._retention_now_ms()
        return None if retained_ms is None or now_ms is None else now_ms - retained_ms

    def base(self, request: BaseRequest) -> GenerationReply:
        with self._catalog.lock:
            record = self._record(request.table, request.incarnation)
            changed = leases.set_base(
                record, request.generation, request.base, request.checkpoint, first_epoch=request.first_epoch,
                previous=request.previous, rewound=request.rewound, rebuild=request.rebuild, keyed=request.keyed,
                expire_before_ms=request.expire_before_ms,
            )  # fmt: skip
            seeds = leases.begins_with_seed(request.base, request.first_epoch, request.previous)
            if request.rebuild or (request.keyed and seeds):
                changed = msgspec.structs.replace(changed, rebuilt_ms=self._clock.now_ms())
            if changed != record:
                self._write(request.table, changed)
            return GenerationReply(generation=changed.generation, base=changed.base, checkpoint=changed.checkpoint)

    def ask_rebuild(self, table: str) -> int:
        """The next start of an upsert table's query, which happens now, makes the key coordinator's state anew; its
        number. Raises NotFound, UserError."""
        with self._catalog.lock:
            if self._catalog.table(table).config.upsert is None:
                raise UserError(f"table {table} is an append table: it has no keys")
            record = self._catalog.pipelines[table]
            if record.rebuilds_asked == record.rebuilds_begun:
                record = msgspec.structs.replace(record, rebuilds_asked=record.rebuilds_asked + 1)
                self._catalog.commit({pipeline_key(table): record})
                log_event(_log, "rebuild of keys asked for", table=table, number=record.rebuilds_asked)
            return record.rebuilds_asked

    def expire_keys(self) -> None:
        """Keys past their TTL, and those whose rows went with their segments, go with a rebuild, once a day."""
        for name, record in sorted(self._catalog.tables.items()):
            pipeline, every_ms = self._catalog.pipelines.get(name), _expires_every_ms(record.config)
            if pipeline is None or every_ms is None or record.paused or not record.enabled:
                continue
            if self._clock.now_ms() - max(pipeline.rebuilt_ms, record.created_ms) < every_ms:
                continue
            if not self._may_have_expired(record):
                continue
            if self._is_served_whole(record):
                self.ask_rebuild(name)
            else:
                log_event(_log, "keys are not looked through now: not all of the table is served", table=name)

    def _may_have_expired(self, record: TableRecord) -> bool:
        """No rows are taken during a rebuild, so there is none while all rows are younger than the table's retention,
        as far as that is the TTL. (Of an open segment counts when it was opened: what came late waits until it is
        sealed.)"""
        upsert = record.config.upsert
        if upsert is None or upsert.retained_ms is None or upsert.deleted_ttl is not None:
            return True
        before_ms = self._expire_before_ms(record.config)
        with self._catalog.lock:
            oldest = [
                one.min_time_ms if one.min_time_ms is not None else one.created_ms
                for one in self._catalog.segments.get(record.config.name, {}).values()
            ]
        return before_ms is not None and any(oldest_ms <= before_ms for oldest_ms in oldest)

    def _is_served_whole(self, record: TableRecord) -> bool:
        """A rebuild reads all of the table, and no row is taken until it has: one that nobody has asked for waits."""
        name = record.config.name
        with self._catalog.lock:
            segments, partitions = self._catalog.segments.get(name, {}), self._catalog.partitions.get(name, {}).values()
            states = external_view(name, record.incarnation, partitions, segments, self._instances.reports())
        wanted = dict.fromkeys((one.consuming for one in partitions), ReplicaState.CONSUMING)
        wanted |= {one.name: ReplicaState.ONLINE for one in segments.values() if one.status is SegmentStatus.DONE}
        return all(state in states.get(segment, {}).values() for segment, state in wanted.items())

    def _is_replaced(self, holder: str) -> bool:
        nonce = leases.nonce_of(holder)
        return bool(nonce) and self._instances.is_replaced(leases.instance_of(holder), nonce)

    def _write(self, table: str, record: PipelineRecord) -> None:
        self._catalog.commit({pipeline_key(table): record})
        self._renewed_until_ms[table] = record.lease_until_ms


def _expires_every_ms(config: TableConfig) -> int | None:
    """How often a table's keys are looked through for those that are to go; None: never. Rows that are past their time
    stay for as long as that besides."""
    upsert, retention_ms = config.upsert, config.retention_ms
    if upsert is None or (upsert.ttl is None and upsert.deleted_ttl is None and retention_ms is None):
        return None
    return min(UPSERT_TTL_EVERY_MS, max(UPSERT_TTL_EVERY_MIN_MS, retention_ms or UPSERT_TTL_EVERY_MS))
