# SPDX-License-Identifier: Apache-2.0
"""A table's lease while this process holds it: renewed by a thread of its own, whatever the table's thread waits for.

A lease only decides who tries; fences of the log decide who counts. So a controller that does not answer changes
nothing for a query that runs: nobody else can get the lease from it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from cremant.cluster.leases import holder_name
from cremant.model.errors import CremantError, Fenced, PeerError
from cremant.model.limits import PIPELINE_LEASE_MS, PIPELINE_RENEW_MS
from cremant.pipeline.starter import Controller
from cremant.shell.logs import log_failure
from cremant.wire.messages import LeaseReply, LeaseRequest

_log = logging.getLogger(__name__)

LEASE_PATH = "/internal/v1/pipeline/lease"


class Lease:
    """`take`, then `check` now and then, then `release` or `drop`; may be taken again. `standby`: leaves a table that
    no pipeline has ever had to those that are not on standby, for a while."""

    def __init__(self, controller: Controller, table: str, incarnation: str, *, standby: bool = False) -> None:
        self._controller = controller
        self._table = table
        self._incarnation = incarnation
        self._standby = standby
        self._renewing: threading.Thread | None = None
        self._end = threading.Event()
        self._lost: Fenced | None = None

    def take(self) -> LeaseReply:
        """Raises PeerError, Fenced (the table is gone, or a newer process runs under this id)."""
        reply = self._ask(release=False)
        if reply.held and self._renewing is None:
            self._end, self._lost = threading.Event(), None
            self._renewing = threading.Thread(
                target=self._renew_forever, args=(self._end,), name=f"lease-{self._table}", daemon=True
            )
            self._renewing.start()
        return reply

    def check(self) -> None:
        """Raises Fenced once somebody else has it."""
        if self._lost is not None:
            raise self._lost

    def drop(self) -> None:
        """Renews it no longer: another one has it."""
        self._end.set()
        if self._renewing is not None:
            self._renewing.join(PIPELINE_RENEW_MS / 1000)
            self._renewing = None

    def release(self) -> None:
        """Gives it up, if it was held; others need not wait for its end."""
        self.drop()
        with contextlib.suppress(CremantError):
            self._ask(release=True)

    def _renew_forever(self, end: threading.Event) -> None:
        while not end.wait(PIPELINE_RENEW_MS / 1000):
            try:
                reply = self._ask(release=False)
            except PeerError as error:
                log_failure(_log, "lease not renewed, the query goes on", error, table=self._table)
                continue
            except CremantError as error:
                return self._lose(error if isinstance(error, Fenced) else Fenced(str(error)), end)
            if not reply.held:
                return self._lose(Fenced(f"table {self._table}: the lease was taken over by {reply.holder}"), end)

    def _lose(self, why: Fenced, end: threading.Event) -> None:
        if not end.is_set():
            self._lost = why

    def _ask(self, *, release: bool) -> LeaseReply:
        holder = holder_name(self._controller.id, self._controller.nonce)
        request = LeaseRequest(
            holder=holder, table=self._table, incarnation=self._incarnation, release=release, standby=self._standby
        )
        return self._controller.call(LEASE_PATH, request, LeaseReply, PIPELINE_LEASE_MS // 2)
