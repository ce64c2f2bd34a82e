# SPDX-License-Identifier: Apache-2.0
"""The view board: builds the cluster view when something material changed, and wakes the long polls.

Rules: a burst of changes becomes one version (PUBLISH_PAUSE_S); who knows a recent version gets only what changed
since, everyone else the whole view, encoded once per version and only if somebody asks; nothing is published before the
instances are settled after a restart. Volatile numbers ride along as of the build; who wants them fresh asks without
`since` and gets the same version with the numbers of now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from cremant.cluster.states import external_view
from cremant.cluster.view_delta import diff, is_empty
from cremant.controller.catalog import Catalog
from cremant.controller.instances import Instances
from cremant.model.cluster import ClusterView, InstanceReport, PartitionView, PipelineRecord, TableView
from cremant.model.limits import MIB
from cremant.model.segments import SegmentStatus
from cremant.wire.codec import encode

_log = logging.getLogger(__name__)

PUBLISH_PAUSE_S = 0.02
_SETTLE_POLL_S = 0.05
#: Changes that are remembered: a member that polls misses a few at most.
DELTAS_KEPT_MAX = 256
DELTAS_BYTES_MAX = 8 * MIB

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Newer(NamedTuple):
    """What a poll is answered: the whole view, or an array of what changed since the version asked for."""

    body: bytes
    deltas: bool = False


class _Delta(NamedTuple):
    since: int
    encoded: bytes


class ViewBoard:
    """One publishing thread; `wait_newer` is called from event loops, everything else from any thread."""

    def __init__(self, catalog: Catalog, instances: Instances) -> None:
        self.nonce = secrets.token_hex(8)
        self._catalog = catalog
        self._instances = instances
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._published: ClusterView | None = None
        self._encoded: tuple[int, bytes] | None = None
        self._deltas: deque[_Delta] = deque()
        self._deltas_bytes = 0
        self._waiters: list[Waiter] = []
        self._guard = threading.Lock()
        self._encoding = threading.Lock()
        self._thread = threading.Thread(target=self._publish_forever, name="view", daemon=True)
        catalog.on_change(self.mark_dirty)

    @property
    def version(self) -> int:
        return self._published.version if self._published else 0

    def start(self) -> None:
        self._dirty.set()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._dirty.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)
        self._wake()

    def mark_dirty(self) -> None:
        self._dirty.set()

    def build(self, version: int) -> ClusterView:
        with self._catalog.lock:
            reports = self._instances.reports_by_table()
            return ClusterView(
                version=version,
                controller_nonce=self.nonce,
                instances=self._instances.described(),
                tables={name: self._table(name, reports.get(name, {})) for name in sorted(self._catalog.tables)},
            )

    def table(self, name: str) -> TableView | None:
        """One table as it is now."""
        with self._catalog.lock:
            if name not in self._catalog.tables:
                return None
            return self._table(name, self._instances.reports_by_table().get(name, {}))

    def _table(self, name: str, reports: Mapping[str, InstanceReport]) -> TableView:
        catalog = self._catalog
        record = catalog.tables[name]
        partitions = catalog.partitions.get(name, {})
        segments = catalog.segments.get(name, {})
        pipeline = catalog.pipelines.get(name, PipelineRecord())
        return TableView(
            record=record,
            partitions=tuple(
                PartitionView(record=partitions[p], consuming=segments[partitions[p].consuming])
                for p in sorted(partitions)
            ),
            segments=tuple(segments[s] for s in sorted(segments) if segments[s].status is SegmentStatus.DONE),
            external=external_view(name, record.incarnation, partitions.values(), segments, reports),
            tails=self._instances.tails(name, record.incarnation, reports),
            pipeline=self._instances.pipeline(name, record.incarnation, pipeline.holder, reports),
            pipeline_record=pipeline,
        )

    def fresh(self) -> bytes | None:
        """The present version with the numbers of now; None before the first version."""
        return encode(self.build(self.version)) if self._published else None

    async def wait_newer(self, since: int, nonce: str, timeout_s: float, *, deltas: bool = False) -> Newer | None:
        """The view once it differs from (nonce, since); None at the timeout or at the stop."""
        if await self._wait(since, nonce, timeout_s) is None:
            return None
        found = self._since(since) if deltas and nonce == self.nonce else None
        return found or Newer(await run_in_threadpool(self._whole))

    async def _wait(self, since: int, nonce: str, timeout_s: float) -> ClusterView | None:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not self._stopping.is_set():
            waiter: Waiter = (asyncio.get_running_loop(), asyncio.get_running_loop().create_future())
            with self._guard:
                published = self._published
                if published is not None and (published.version != since or nonce != self.nonce):
                    return published
                self._waiters.append(waiter)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter[1]
            except TimeoutError:
                return None
            finally:
                with self._guard, contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        return None

    def _since(self, since: int) -> Newer | None:
        """Changes from exactly that version on, if they are still known."""
        with self._guard:
            wanted = [delta.encoded for delta in self._deltas if delta.since >= since]
            if not wanted or self._deltas[-len(wanted)].since != since:
                return None
        return Newer(b"[" + b",".join(wanted) + b"]", deltas=True)

    def _whole(self) -> bytes:
        with self._encoding:
            published = self._published
            assert published is not None
            if self._encoded is None or self._encoded[0] != published.version:
                self._encoded = (published.version, encode(published))
            return self._encoded[1]

    def _publish_forever(self) -> None:
        while not self._stopping.is_set():
            self._dirty.wait()
            if not self._instances.is_settled():
                self._stopping.wait(_SETTLE_POLL_S)
                continue
            self._dirty.clear()
            if self._stopping.is_set():
                return
            try:
                self._publish(self.build(self.version + 1))
            except Exception:
                _log.exception("the view could not be built")
            self._stopping.wait(PUBLISH_PAUSE_S)

    def _publish(self, view: ClusterView) -> None:
        """Makes this the present version, unless nothing differs from it."""
        before, delta = self._published, None
        if before is not None:
            changes = diff(before, view)
            if is_empty(changes):
                return
            delta = _Delta(before.version, encode(changes))
        with self._guard:  # both at once: who got the change must not be told that an older view is newer
            self._published = view
            if delta is not None:
                self._remember(delta)
        self._wake()

    def _remember(self, delta: _Delta) -> None:
        self._deltas.append(delta)
        self._deltas_bytes += len(delta.encoded)
        while len(self._deltas) > DELTAS_KEPT_MAX or self._deltas_bytes > DELTAS_BYTES_MAX:
            self._deltas_bytes -= len(self._deltas.popleft().encoded)

    def _wake(self) -> None:
        with self._guard:
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
