# SPDX-License-Identifier: Apache-2.0
"""What this broker knows of closed epochs: one long poll per live server, as long as there are upsert tables; and what
queries of such tables begin with (lowwater.py decides).

Rule: a server is believed until it says something else or is not alive any more. What it closed stays closed; if its
process was replaced, its next word says all anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cremant.broker.options import as_of_epoch, visibility_of
from cremant.broker.peers import Peers
from cremant.broker.tokens import epoch_of
from cremant.cluster.lowwater import LowWater, Marks, is_void
from cremant.cluster.routing import Routes
from cremant.model.cluster import ClusterView, Role, TableView
from cremant.model.errors import CremantError, QueryError
from cremant.model.query_codes import QueryCode
from cremant.shell.backoff import Backoff
from cremant.shell.logs import log_failure
from cremant.wire.codec import decode
from cremant.wire.messages import EpochsReply

_log = logging.getLogger(__name__)

EPOCHS_PATH = "/internal/v1/epochs"
#: A poll without news ends after this time; a server that does not answer it is asked again.
POLL_MS = 10_000
#: So much later it should have.
POLL_GRACE_S = 2.0
#: Between tries to reach a server that the view says is alive.
RETRY_FIRST_MS, RETRY_MAX_MS = 20, 500
#: A broker that has just started hears from its servers within milliseconds, unless they do not answer.
FIRST_WORD_S = 1.0


class Epochs:
    """Used from one event loop; `follow` starts and ends its tasks, which end with the loop at the latest."""

    def __init__(self, peers: Peers) -> None:
        self.low = LowWater()
        self._peers = peers
        self._view: ClusterView | None = None
        self._polls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._news = asyncio.Condition()

    def close(self) -> None:
        for task in self._polls.values():
            task.cancel()
        self._polls.clear()

    def follow(self, view: ClusterView) -> None:
        """Listens to the servers of this view. Costs one comparison while the view is the same."""
        if view is self._view:
            return
        self._view = view
        alive = {table.record.incarnation for table in view.tables.values() if table.record.config.upsert is not None}
        self.low.keep(alive)
        servers = [one for one in view.instances if one.live and one.role is Role.SERVER] if alive else []
        wanted = {(one.id, one.url) for one in servers}
        named = {one.id for one in servers}
        for key in [key for key in self._polls if key not in wanted]:
            self._polls.pop(key).cancel()
            if key[0] not in named:
                self.low.gone(key[0])
        for key in wanted - self._polls.keys():
            self._polls[key] = asyncio.get_running_loop().create_task(self._listen(*key))

    async def _listen(self, server: str, url: str) -> None:
        version, nonce, backoff = 0, "", Backoff(RETRY_FIRST_MS, RETRY_MAX_MS)
        while True:
            path = f"{EPOCHS_PATH}?since={version}&nonce={nonce}&timeoutMs={POLL_MS}"
            try:
                body = await self._peers.get(url, path, timeout_s=POLL_MS / 1000 + POLL_GRACE_S)
                reply = decode(body, EpochsReply)
            except CremantError as error:
                if not backoff.attempts:
                    log_failure(_log, f"server {server} does not say which epochs are closed", error)
                await asyncio.sleep(backoff.next_ms() / 1000)
                continue
            backoff.reset()
            if (reply.version, reply.nonce) != (version, nonce):
                version, nonce = reply.version, reply.nonce
                self.low.told(server, reply)
                async with self._news:
                    self._news.notify_all()

    async def begin(self, routes: Routes, deadline_s: float) -> None:
        """Returns once somebody has said of every partition that a live server consumes what is closed, or nobody did
        for a moment. For what is lost no query waits."""
        self.follow(routes.view)
        incarnation = routes.table.record.incarnation
        alive = {one.id for one in routes.view.instances if one.live}
        records = [part.record for part in routes.table.partitions]
        partitions = [record.partition for record in records if not alive.isdisjoint(record.replicas)]
        give_up_s = min(deadline_s, time.monotonic() + FIRST_WORD_S)
        while not self.low.knows(incarnation, partitions) and (left_s := give_up_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s), self._news:
                    await self._news.wait()
            except TimeoutError:
                return

    def marks(self, table: TableView, options: dict[str, str], least: int = 0) -> Callable[[], Marks]:
        """What a query of an upsert table begins with, whenever it does. `least`: the epoch that its demand for
        freshness comes to. Raises QueryError 700 for an epoch or a token that was taken back, UserError for an epoch
        that is none."""
        incarnation, rewinds = table.record.incarnation, table.pipeline_record.rewinds
        as_of = as_of_epoch(options)
        token = options.get("notbefore")
        not_before = epoch_of(token, table) if token is not None else 0
        void = is_void(as_of, rewinds) if as_of is not None else None
        if void is not None:
            raise QueryError(
                QueryCode.QUERY_VALIDATION,
                f"QueryValidationError: asOfEpoch {as_of} was taken back by a rewind to epoch {void.to_epoch}",
                hint=f"ask for {void.to_epoch}, or for an epoch after the rewind",
            )  # fmt: skip
        if as_of is not None and as_of < not_before:
            raise QueryError(
                QueryCode.QUERY_VALIDATION,
                f"QueryValidationError: asOfEpoch {as_of} is before epoch {not_before}, which notBefore asks for",
                hint="leave one of the two away",
            )
        visibility = visibility_of(options)
        return lambda: self.low.marks(
            incarnation, rewinds, not_before=max(not_before, least), as_of=as_of, visibility=visibility,
            keyed_from=table.pipeline_record.keyed_from or 0,
        )  # fmt: skip
