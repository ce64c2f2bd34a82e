# SPDX-License-Identifier: Apache-2.0
"""The server process: joins the cluster, consumes and serves its part of the tables until told to stop."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from cremant.exec.engine import Engine
from cremant.log.open import open_log
from cremant.model.cluster import Role
from cremant.model.names import instance_id
from cremant.model.settings import Settings
from cremant.server.files import ServerFiles
from cremant.server.hosting import Hosting
from cremant.server.metrics import ServerMetrics
from cremant.server.query import QueryService
from cremant.server.rest import routes
from cremant.server.sealing import Sealer
from cremant.shell.app import RunningServer, listen, make_app, serve
from cremant.shell.logs import log_event, setup_logging
from cremant.shell.member import Member
from cremant.store.deepstore import DirectoryStore

_log = logging.getLogger(__name__)

FENCE_LOOK_S = 0.5


def store_directory(settings: Settings) -> Path:
    return Path(settings.store_dir or Path(settings.data_dir) / "store").absolute()


def run_server(settings: Settings, *, port: int, name: str | None = None, insecure: bool) -> None:
    """Returns when stopped by a signal, or when another process took over this server's id. Raises NoResource (port or
    data directory in use), InvalidConfig, Corrupt before it serves. `name` is for logs only."""
    bound = listen(settings.host, port, insecure=insecure)
    own_port = bound.getsockname()[1]
    setup_logging("server", name or instance_id("server", settings.host, own_port))
    files = ServerFiles(settings.data_dir)
    log = open_log(settings)
    engine = Engine(threads=settings.query_threads, memory_bytes=settings.query_memory_bytes)
    hosting = Hosting(files, log)
    member = Member(
        Role.SERVER, settings.data_dir, settings.host, own_port, settings.controller_url, hosting.report
    )  # fmt: skip
    store = DirectoryStore(store_directory(settings))
    sealer = Sealer(hosting.tables, files, store, member, fsync=settings.log_fsync == "always")
    queries = QueryService(hosting.tables, engine)
    queries.instance = member.id
    registry = CollectorRegistry()
    queries.on_answer = ServerMetrics(registry, hosting, sealer).query_answered
    app = make_app("server", routes(hosting, queries, member), ready=hosting.ready, registry=registry)

    hosting.start(member.id)
    member.on_view(hosting.on_view)
    sealer.start()
    stopped = threading.Event()

    def on_handle(server: RunningServer) -> None:
        threading.Thread(target=_stop_when_fenced, args=(member, server, stopped), daemon=True).start()

    try:
        serve(
            app, settings.host, port, insecure=insecure, data_dir=settings.data_dir, bound=bound, on_handle=on_handle,
            on_started=lambda url: member.start(),
        )  # fmt: skip
    finally:
        stopped.set()
        member.stop()
        sealer.stop()
        hosting.stop()
        queries.close()
        engine.close()
        log.close()
        files.close()
    log_event(_log, "server ended", fenced=member.fenced)


def _stop_when_fenced(member: Member, server: RunningServer, stopped: threading.Event) -> None:
    """Another process runs under this id: this one must not answer queries any more."""
    while not stopped.wait(FENCE_LOOK_S):
        if member.fenced:
            server.stop()
            return
