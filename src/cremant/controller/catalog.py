# SPDX-License-Identifier: Apache-2.0
"""The catalog: all durable records, typed and in memory, written through to the metadata store.

Rules: the store is the truth and the catalog its copy, loaded at start; every change is one compare-and-set that
requires the version of each record it was decided from *and* the leader's term, so a deposed controller changes
nothing; the copy changes only after the store said yes. Thread-safe: callers that decide and then commit hold `lock`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from cremant.cluster.membership import Membership
from cremant.cluster.states import States, ideal_state
from cremant.model.cluster import PartitionRecord, PipelineRecord, TableRecord
from cremant.model.errors import Corrupt, NotFound
from cremant.model.jobs import ForceCommitJob, Job, RebalanceJob
from cremant.model.schema import Schema
from cremant.model.segments import SegmentMetadata
from cremant.store.lease import Leadership
from cremant.store.metadata import Delete, Entry, Expect, MetadataStore, Put, StoreConflict, Update

#: Version of the records' encoding, kept under its own key; another one is refused at start.
RECORD_FORMAT = 1
FORMAT_KEY = "/format"


class DropRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is left of a dropped table, or of one whose creation did not finish, until its bytes are gone: its topics
    and stored segments. `urls`: objects in a store that was configured before. `gone_ms`: when everything was removed,
    except what a server uploads late."""

    table: str
    incarnation: str
    dropped_ms: int
    not_before_ms: int = 0
    urls: tuple[str, ...] = ()
    gone_ms: int = 0


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A deep store that this cluster has claimed: what its marker must say."""

    uri: str
    id: str
    claimed_ms: int


def store_key(uri: str) -> str:
    """By a digest: a URI has slashes."""
    return f"/stores/{hashlib.sha256(uri.encode()).hexdigest()[:16]}"


def drop_key(table: str, incarnation: str) -> str:
    return f"/drops/{table}/{incarnation}"


Record = (
    Schema
    | TableRecord
    | PartitionRecord
    | SegmentMetadata
    | PipelineRecord
    | Membership
    | DropRecord
    | StoreRecord
    | RebalanceJob
    | ForceCommitJob
)

_KINDS: dict[str, Any] = {
    "schemas": Schema,
    "tables": TableRecord,
    "partitions": PartitionRecord,
    "segments": SegmentMetadata,
    "pipelines": PipelineRecord,
    "instances": Membership,
    "drops": DropRecord,
    "stores": StoreRecord,
    "jobs": Job,
}


class Catalog:
    """`lock` guards everything; readers that need one consistent picture hold it, too."""

    def __init__(self, store: MetadataStore, leadership: Leadership) -> None:
        self.lock = threading.RLock()
        self.schemas: dict[str, Schema] = {}
        self.tables: dict[str, TableRecord] = {}
        self.partitions: dict[str, dict[int, PartitionRecord]] = {}
        self.segments: dict[str, dict[str, SegmentMetadata]] = {}
        self.pipelines: dict[str, PipelineRecord] = {}
        self.members: dict[str, Membership] = {}
        self.drops: dict[str, DropRecord] = {}
        self.stores: dict[str, StoreRecord] = {}
        self.jobs: dict[str, dict[str, Job]] = {}
        self._versions: dict[str, int] = {}
        self._store = store
        self._leadership = leadership
        self._listeners: list[Callable[[], None]] = []
        self._record_listeners: list[Callable[[str, Record | None], None]] = []
        self._load()

    @property
    def store(self) -> MetadataStore:
        return self._store

    def store_id(self, uri: str) -> str:
        """What the marker of this deep store must say; "" = it was never claimed, or needs none."""
        known = self.stores.get(store_key(uri))
        return known.id if known is not None else ""

    def being_removed(self) -> list[DropRecord]:
        """Dropped tables whose bytes are not gone yet."""
        with self.lock:
            return [record for record in self.drops.values() if not record.gone_ms]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Called after each commit, under the lock; must not block."""
        self._listeners.append(listener)

    def on_record(self, listener: Callable[[str, Record | None], None]) -> None:
        """Called with the key of each record that a commit wrote, and the record (None = deleted), under the lock; must
        not block."""
        self._record_listeners.append(listener)

    def _load(self) -> None:
        found = self._store.get(FORMAT_KEY)
        if found is None:
            self._store.commit(
                [Expect(FORMAT_KEY, None), self._leadership.fence], [Put(FORMAT_KEY, str(RECORD_FORMAT).encode())]
            )
        elif int(found.value) != RECORD_FORMAT:
            raise Corrupt(f"metadata has record format {found.value.decode()}, this version reads {RECORD_FORMAT}")
        for kind, struct in _KINDS.items():
            for entry in self._store.list(f"/{kind}/"):
                self._put(entry.key, _decode(entry, struct), entry.version)

    def commit(self, changes: Mapping[str, Record | None], *, unchanged: Iterable[str] = ()) -> None:
        """Writes records (None = delete), if they and the keys of `unchanged` still are as this catalog knows them.
        Raises StoreConflict when another controller took over, NoResource when the disk is full."""
        with self.lock:
            keys = dict.fromkeys((*changes, *unchanged))
            requirements = [Expect(key, self._versions.get(key)) for key in keys]
            updates: list[Update] = [
                Delete(key) if record is None else Put(key, msgspec.json.encode(record))
                for key, record in changes.items()
            ]
            revision = self._store.commit([*requirements, self._leadership.fence], updates)
            for key, record in changes.items():
                if record is None:
                    self._delete(key)
                else:
                    self._put(key, record, revision)
            for on_record in self._record_listeners:
                for key, record in changes.items():
                    on_record(key, record)
            for listener in self._listeners:
                listener()

    def table(self, name: str, message: str = "Table {0}_REALTIME not found") -> TableRecord:
        """The record of a table. Raises NotFound with `message`, which may name the table."""
        record = self.tables.get(name)
        if record is None:
            raise NotFound(message.format(name))
        return record

    def ideal_state(self, table: str) -> States:
        """What every replica of the table's segments should be."""
        with self.lock:
            return ideal_state(self.partitions.get(table, {}).values(), self.segments.get(table, {}).values())

    def renew(self, leadership: Leadership | None) -> None:
        """After the lease was renewed. Raises StoreConflict if it was lost (None, or another term): every later commit
        would fail, so the controller must know."""
        if leadership is None or leadership.fence != self._leadership.fence:
            raise StoreConflict(self._leadership.fence.key, self._leadership.fence.version, None)
        self._leadership = leadership

    @property
    def leadership(self) -> Leadership:
        return self._leadership

    def _put(self, key: str, record: Any, version: int) -> None:
        self._versions[key] = version
        kind, name, rest = _parts(key)
        match kind:
            case "schemas":
                self.schemas[name] = record
            case "tables":
                self.tables[name] = record
            case "partitions":
                self.partitions.setdefault(name, {})[record.partition] = record
            case "segments":
                self.segments.setdefault(name, {})[rest] = record
            case "pipelines":
                self.pipelines[name] = record
            case "instances":
                self.members[name] = record
            case "jobs":
                self.jobs.setdefault(name, {})[rest] = record
            case "stores":
                self.stores[key] = record
            case _:
                self.drops[key] = record

    def _delete(self, key: str) -> None:
        if self._versions.pop(key, None) is None:
            return
        kind, name, rest = _parts(key)
        match kind:
            case "schemas":
                del self.schemas[name]
            case "tables":
                del self.tables[name]
            case "partitions":
                del self.partitions[name][int(rest)]
            case "segments":
                del self.segments[name][rest]
            case "pipelines":
                del self.pipelines[name]
            case "instances":
                del self.members[name]
            case "jobs":
                del self.jobs[name][rest]
            case "stores":
                del self.stores[key]
            case _:
                del self.drops[key]


def _parts(key: str) -> tuple[str, str, str]:
    """`/kind/name/rest`; names never contain a slash."""
    _, kind, name, *rest = key.split("/")
    return kind, name, rest[0] if rest else ""


def _decode(entry: Entry, struct: Any) -> Any:
    try:
        return msgspec.json.decode(entry.value, type=struct)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"metadata record {entry.key} cannot be read: {error}") from error
