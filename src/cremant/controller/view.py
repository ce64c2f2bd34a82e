# SPDX-License-Identifier: Apache-2.0
"""The view board: builds the cluster view when something material changed, and wakes the long polls.

Rules: a version is encoded once, whoever asks; a burst of changes becomes one version (PUBLISH_PAUSE_S); nothing is
published before the instances are settled after a restart. Volatile numbers ride along as of the build; who wants them
fresh asks without `since` and gets the same version with the numbers of now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading

from cremant.cluster.states import external_view
from cremant.controller.catalog import Catalog
from cremant.controller.instances import Instances
from cremant.model.cluster import ClusterView, PartitionView, PipelineRecord, TableView
from cremant.model.segments import SegmentStatus
from cremant.wire.codec import encode

_log = logging.getLogger(__name__)

PUBLISH_PAUSE_S = 0.02
_SETTLE_POLL_S = 0.05
#: How an encoded view without a number begins: `version` is the first field of ClusterView.
_UNNUMBERED = b'{"version":0,'

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class ViewBoard:
    """One publishing thread; `wait_newer` is called from event loops, everything else from any thread."""

    def __init__(self, catalog: Catalog, instances: Instances) -> None:
        self.nonce = secrets.token_hex(8)
        self._catalog = catalog
        self._instances = instances
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._published: tuple[int, bytes] | None = None
        self._waiters: list[Waiter] = []
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._publish_forever, name="view", daemon=True)
        catalog.on_change(self.mark_dirty)

    @property
    def version(self) -> int:
        return self._published[0] if self._published else 0

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
            return ClusterView(
                version=version,
                controller_nonce=self.nonce,
                instances=self._instances.described(),
                tables={name: self.table(name) for name in sorted(self._catalog.tables)},
            )

    def table(self, name: str) -> TableView:
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
            external=external_view(name, record.incarnation, partitions.values(), segments, self._instances.reports()),
            tails=self._instances.tails(name, record.incarnation),
            pipeline=self._instances.pipeline(name, record.incarnation, pipeline.holder),
            pipeline_record=pipeline,
        )

    def fresh(self) -> bytes | None:
        """The present version with the numbers of now; None before the first version."""
        return encode(self.build(self.version)) if self._published else None

    async def wait_newer(self, since: int, nonce: str, timeout_s: float) -> bytes | None:
        """The encoded view once it differs from (nonce, since); None at the timeout or at the stop."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not self._stopping.is_set():
            waiter: Waiter = (asyncio.get_running_loop(), asyncio.get_running_loop().create_future())
            with self._guard:
                published = self._published
                if published is not None and (published[0] != since or nonce != self.nonce):
                    return published[1]
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
                self._publish(encode(self.build(0)))
            except Exception:
                _log.exception("the view could not be built")
            self._stopping.wait(PUBLISH_PAUSE_S)

    def _publish(self, unnumbered: bytes) -> None:
        """Gives the view the next version, unless nothing differs from the present one."""
        _, _, content = unnumbered.partition(_UNNUMBERED)
        if self._published is not None and self._published[1].endswith(content):
            return
        version = self.version + 1
        with self._guard:
            self._published = (version, b'{"version":%d,' % version + content)
        self._wake()

    def _wake(self) -> None:
        with self._guard:
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed already
                loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
