# SPDX-License-Identifier: Apache-2.0
"""Driver of one fetch: carries out what `completion/fetch.py` decides, and believes nothing that it did not verify.

From the store comes the Parquet file, from a peer (or another URL) the archive around it; each must have its length,
and the rows in it the content checksum of the segment's metadata. A transfer that breaks is continued where it stopped,
also by another peer that has the same file. When nobody has the segment, it is made again from the epoch log.
"""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never
from urllib.parse import quote, urlsplit

from cremant.completion.fetch import (
    Begin,
    Cause,
    Event,
    Failed,
    Fetch,
    FromPeer,
    FromStore,
    GiveUp,
    Holder,
    Look,
    Looked,
    Source,
    Wait,
    Waited,
)
from cremant.model.cluster import ClusterView, Role, TableRecord
from cremant.model.errors import (
    Corrupt,
    DeadlineExceeded,
    InvalidConfig,
    InvariantViolation,
    NotFound,
    PeerError,
    Unavailable,
)
from cremant.model.limits import FETCH_DEADLINE_MS, FETCH_EXTRA_BYTES_MAX
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.segment.archive import unpack
from cremant.segment.build import PARQUET_FILE
from cremant.segment.reader import SealedSegment, derive
from cremant.server.download import Downloader, Partial, SourceFailed
from cremant.server.reconsume import Reconsumer
from cremant.shell.logs import log_event
from cremant.store.deepstore import DeepStore

_log = logging.getLogger(__name__)

_ARCHIVE_FILE = "archive.tar.gz"
#: Reads the view of this moment; None before the first.
LookView = Callable[[], ClusterView | None]


@dataclass(slots=True)
class Fetched:
    """Totals for metrics, by source."""

    segments: Counter[Source] = field(default_factory=Counter)
    bytes: Counter[Source] = field(default_factory=Counter)
    failures: Counter[tuple[Source, Cause]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Task:
    record: TableRecord
    metadata: SegmentMetadata
    checksum: str
    scratch: Path
    partial: Partial
    ends_s: float


class SegmentFetcher:
    """Thread-safe. `order`: which kind of source comes first. `reconsumer`: what is asked when no source gave it.
    `authorities`: who vouches for peers that are asked by HTTPS."""

    def __init__(
        self, instance: str, store: DeepStore, look: LookView, *, fsync: bool,
        order: tuple[Source, ...] = (Source.STORE, Source.PEER), reconsumer: Reconsumer | None = None,
        authorities: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._instance = instance
        self._store = store
        self._look = look
        self._fsync = fsync
        self._order = order
        self._reconsumer = reconsumer
        self._downloads = Downloader(instance, authorities=authorities)
        self._stopping = threading.Event()
        self._dice = random.Random()
        #: URL scheme -> how a segment comes from there. `peer` names no place: any holder will do.
        self._fetchers: dict[str, Callable[[_Task, str], None]] = {
            "file": self._from_store, "s3": self._from_store, "http": self._from_url, "https": self._from_url,
        }  # fmt: skip
        self.totals = Fetched()

    def stop(self) -> None:
        self._stopping.set()
        self._downloads.close()
        if self._reconsumer is not None:
            self._reconsumer.stop()

    def fetch(self, record: TableRecord, metadata: SegmentMetadata, scratch: Path) -> SealedSegment:
        """The segment, verified and derived, in `scratch`. Blocks for as long as it takes, within the fetch's deadline.
        Raises Unavailable with the cause of each source, NoResource when our disk is full."""
        assert metadata.checksum is not None
        ends_s = time.monotonic() + FETCH_DEADLINE_MS / 1000
        task = _Task(record, metadata, metadata.checksum, scratch, Partial(scratch / _ARCHIVE_FILE), ends_s)
        try:
            return self._fetch(task)
        finally:
            task.partial.forget()  # begun with one source, and then another one gave the segment

    def _fetch(self, task: _Task) -> SealedSegment:
        machine = Fetch(self._instance, seed=self._dice.getrandbits(63), order=self._order)
        event: Event = Begin()
        while True:
            match effect := machine.step(event, int(time.monotonic() * 1000)):
                case Look():
                    event = self._looked(task)
                case FromStore() | FromPeer():
                    try:
                        return self._take(task, effect)
                    except SourceFailed as failure:
                        event = self._failed(task, effect, failure)
                case Wait():
                    if self._stopping.wait(effect.ms / 1000):
                        raise Unavailable(f"segment {task.metadata.name}: this server is stopping")
                    event = Waited()
                case GiveUp():
                    return self._from_log(task, effect.why)
                case _:
                    assert_never(effect)

    def _from_log(self, task: _Task, why: str) -> SealedSegment:
        """When no source gave the segment: its rows may still be in the epoch log."""
        name = task.metadata.name
        if self._reconsumer is not None:
            try:
                return self._reconsumer.rebuild(task.record, task.metadata, task.scratch)
            except (NotFound, PeerError, Corrupt, InvariantViolation) as error:
                why = f"{why}; {error}"
        raise Unavailable(f"segment {name} cannot be fetched: {why}", hint="it is retried")

    def _looked(self, task: _Task) -> Looked:
        view, name = self._look(), task.metadata.name
        table = view.tables.get(task.record.config.name) if view is not None else None
        if view is None or table is None or table.record.incarnation != task.record.incarnation:
            return Looked(task.metadata.store_url, ())
        newest = next((segment for segment in table.segments if segment.name == name), task.metadata)
        online = {instance for instance, state in table.external.get(name, {}).items() if state is ReplicaState.ONLINE}
        may_have = online.union(newest.copies)
        servers = [live for live in view.instances if live.live and live.role is Role.SERVER and live.id in may_have]
        by_tls = table.record.config.completion.peer_scheme == "https"
        holders = tuple(Holder(server.id, server.tls_url if by_tls else server.url) for server in servers)
        return Looked(newest.store_url, holders)

    def _take(self, task: _Task, source: FromStore | FromPeer) -> SealedSegment:
        metadata = task.metadata
        if isinstance(source, FromStore):
            scheme = urlsplit(source.url).scheme.lower()
            if scheme not in self._fetchers:
                raise SourceFailed(Cause.REFUSED, f"no fetcher for {scheme}: URLs; known: {', '.join(self._fetchers)}")
            self._fetchers[scheme](task, source.url)
        elif not source.holder.url:
            raise SourceFailed(Cause.REFUSED, "offers no HTTPS, which the table demands (settings tls_cert, tls_key)")
        else:
            table, name = quote(f"{task.record.config.name}_REALTIME"), quote(metadata.name)
            self._from_url(task, f"{source.holder.url}/segments/{table}/{name}", Source.PEER)
        try:
            indexes = task.record.config.indexes
            sealed = derive(task.scratch, metadata.name, task.checksum, fsync=self._fsync, indexes=indexes)
            if sealed.rows != metadata.rows:
                raise Corrupt(f"{sealed.rows} rows came, the metadata says {metadata.rows}")
        except Corrupt as error:
            raise SourceFailed(Cause.CHECKSUM, str(error)) from error
        self.totals.segments[_kind(source)] += 1
        log_event(_log, "segment fetched", segment=metadata.name, rows=sealed.rows, source=_label(source))
        return sealed

    def _from_store(self, task: _Task, url: str) -> None:
        target = task.scratch / PARQUET_FILE
        try:
            store, name = self._store.by_url(url)
            store.get(name, target, checksum=task.metadata.file_checksum)
        except NotFound as error:
            raise SourceFailed(Cause.NOT_HELD, str(error)) from error
        except Corrupt as error:
            raise SourceFailed(Cause.CHECKSUM, str(error)) from error
        except DeadlineExceeded as error:
            raise SourceFailed(Cause.TIMEOUT, str(error)) from error
        except PeerError as error:
            raise SourceFailed(Cause.UNREACHABLE, str(error)) from error
        except InvalidConfig as error:
            raise SourceFailed(Cause.REFUSED, str(error)) from error
        self.totals.bytes[Source.STORE] += target.stat().st_size

    def _from_url(self, task: _Task, url: str, kind: Source = Source.STORE) -> None:
        bytes_max = task.metadata.size_bytes + FETCH_EXTRA_BYTES_MAX

        def count(received: int) -> None:
            self.totals.bytes[kind] += received

        self._downloads.archive(
            url, task.partial, expected=task.checksum, bytes_max=bytes_max, ends_s=task.ends_s, on_bytes=count
        )
        try:
            unpack(task.partial.path, task.metadata.name, task.scratch / PARQUET_FILE, bytes_max=bytes_max)
        except Corrupt as error:
            raise SourceFailed(Cause.CHECKSUM, str(error)) from error
        finally:
            task.partial.forget()

    def _failed(self, task: _Task, source: FromStore | FromPeer, failure: SourceFailed) -> Failed:
        (task.scratch / PARQUET_FILE).unlink(missing_ok=True)
        self.totals.failures[_kind(source), failure.cause] += 1
        log_event(
            _log, "a source did not give a segment", level=logging.WARNING, segment=task.metadata.name,
            source=_label(source), cause_of_failure=failure.cause.value, error=failure.detail,
        )  # fmt: skip
        return Failed(failure.cause, failure.detail, failure.retry_after_ms)


def _kind(source: FromStore | FromPeer) -> Source:
    return Source.PEER if isinstance(source, FromPeer) else Source.STORE


def _label(source: FromStore | FromPeer) -> str:
    return source.holder.instance if isinstance(source, FromPeer) else source.url
