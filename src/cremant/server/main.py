# SPDX-License-Identifier: Apache-2.0
"""The server process: joins the cluster, consumes and serves its part of the tables until told to stop."""

from __future__ import annotations

import logging
import threading

from prometheus_client import CollectorRegistry

from cremant.completion.fetch import fetch_order
from cremant.exec.engine import Engine
from cremant.log.open import open_logs
from cremant.model.cluster import Role
from cremant.model.names import instance_id
from cremant.model.settings import Settings
from cremant.server.compacting import Compactor
from cremant.server.epochs import EpochBoard
from cremant.server.fetching import SegmentFetcher
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.metrics import ServerMetrics
from cremant.server.metrics_of_versions import VersionsMetrics
from cremant.server.peers import PeerService
from cremant.server.query import QueryService
from cremant.server.reconsume import Reconsumer
from cremant.server.rest import routes
from cremant.server.rest_epochs import epoch_routes
from cremant.server.rest_repair import repair_routes, story_routes
from cremant.server.rest_versions import VersionsService
from cremant.server.rest_watermarks import watermark_routes
from cremant.server.sealing import Sealer
from cremant.server.uploads import Uploads
from cremant.server.validity import VersionsKeeper
from cremant.server.versions_fetch import VersionsClient
from cremant.server.versions_upload import VersionsUploads
from cremant.shell.app import RunningServer, TlsListener, listen, make_app, serve
from cremant.shell.deepstore import open_store
from cremant.shell.journal import keep_journal
from cremant.shell.logs import log_event, setup_logging
from cremant.shell.member import Member
from cremant.shell.tls import client_context, listener_context
from cremant.store.open import has_store

_log = logging.getLogger(__name__)

FENCE_LOOK_S = 0.5


def run_server(settings: Settings, *, port: int, name: str | None = None, insecure: bool) -> None:
    """Returns when stopped by a signal, or when another process took over this server's id. Raises NoResource (port or
    data directory in use), InvalidConfig, Corrupt before it serves. `name` is for logs only."""
    order = fetch_order(settings.fetch_order.split(","))
    tls, authorities = _tls(settings, insecure=insecure), client_context(settings)
    bound = listen(settings.host, port, insecure=insecure)
    own_port = bound.getsockname()[1]
    setup_logging("server", name or instance_id("server", settings.host, own_port))
    files = ServerFiles(settings.data_dir)
    journal = keep_journal(settings.data_dir, "server", name or instance_id("server", settings.host, own_port))
    logs = open_logs(settings)
    engine = Engine(threads=settings.query_threads, memory_bytes=settings.query_memory_bytes)
    board = EpochBoard()
    fsync = settings.log_fsync == "always"
    hosting = Hosting(files, logs.epoch, board=board, fsync=fsync, catch_up_max_ms=settings.catch_up_max_ms)
    member = Member(
        Role.SERVER, settings.data_dir, settings.host, own_port, settings.controller_url, hosting.report,
        tls_port=tls.bound.getsockname()[1] if tls is not None else 0,
    )  # fmt: skip
    store = open_store(settings)
    reconsumer = Reconsumer(logs.epoch, fsync=fsync)
    fetcher = SegmentFetcher(
        member.id, store, lambda: member.view, fsync=fsync, order=order, reconsumer=reconsumer, authorities=authorities
    )  # fmt: skip
    uploads = Uploads(hosting.tables, files, store, member, has_store=has_store(settings))
    sealer = Sealer(hosting.tables, files, member, fetcher, uploads, fsync=fsync)
    peers = PeerService(hosting, bytes_per_s=settings.peer_bytes_per_s)
    known = VersionsService(hosting)
    versions = VersionsClient(member.id, store, authorities=authorities)
    keeper = VersionsKeeper(hosting.tables, files, logs.epoch, versions, member.id, lambda: member.view)
    versions_uploads = VersionsUploads(hosting.tables, files, store, member, uploads, lambda: member.view)
    compactor = Compactor(hosting.tables, files, store, member, fetcher, lambda: member.view, fsync=fsync)
    queries = QueryService(hosting.tables, engine, board)
    queries.instance = member.id
    registry = CollectorRegistry()
    queries.on_answer = ServerMetrics(registry, hosting, sealer, fetcher, peers, uploads).query_answered
    VersionsMetrics(registry, keeper, versions_uploads, known, compactor)
    all_routes = [
        *routes(hosting, queries, member),
        *epoch_routes(board, member),
        *watermark_routes(hosting.tables, member),
        *peers.routes(),
        *known.routes(),
        *repair_routes(hosting, uploads),
        *story_routes(journal),
    ]
    app = make_app("server", all_routes, ready=hosting.ready, registry=registry)

    hosting.start(member.id)
    member.on_view(hosting.on_view)
    sealer.start()
    uploads.start()
    keeper.start()
    versions_uploads.start()
    compactor.start()
    stopped = threading.Event()

    def on_handle(server: RunningServer) -> None:
        threading.Thread(target=_stop_when_fenced, args=(member, server, stopped), daemon=True).start()

    try:
        serve(
            app, settings.host, port, insecure=insecure, data_dir=settings.data_dir, bound=bound, tls=tls,
            on_handle=on_handle, on_started=lambda url: member.start(),
        )  # fmt: skip
    finally:
        stopped.set()
        member.stop()
        sealer.stop()
        uploads.stop()
        keeper.stop()
        versions_uploads.stop()
        compactor.stop()
        peers.close()
        known.close()
        hosting.stop()
        queries.close()
        engine.close()
        logs.close()
        files.close()
    log_event(_log, "server ended", fenced=member.fenced)


def _tls(settings: Settings, *, insecure: bool) -> TlsListener | None:
    context = listener_context(settings)
    if context is None:
        return None
    return TlsListener(listen(settings.host, settings.tls_port, insecure=insecure), context)


def _stop_when_fenced(member: Member, server: RunningServer, stopped: threading.Event) -> None:
    """Another process runs under this id: this one must not answer queries any more."""
    while not stopped.wait(FENCE_LOOK_S):
        if member.fenced:
            server.stop()
            return
