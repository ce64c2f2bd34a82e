# SPDX-License-Identifier: Apache-2.0
"""The controller process: opens stores and log, serves until told to stop."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from starlette.applications import Starlette

from cremant.controller.core import Controller
from cremant.controller.metrics import metrics_registry
from cremant.controller.rest import routes
from cremant.log.open import open_logs
from cremant.model.cluster import Role
from cremant.model.names import instance_id
from cremant.model.settings import Settings
from cremant.shell.app import RunningServer, listen, make_app, serve
from cremant.shell.deepstore import open_store
from cremant.shell.directory import hold_directory
from cremant.shell.journal import keep_journal
from cremant.shell.logs import log_event, setup_logging
from cremant.shell.tls import client_context
from cremant.store.open import has_store
from cremant.store.sqlite import SqliteMetadataStore

_log = logging.getLogger(__name__)


def make_controller_app(controller: Controller, authorities: ssl.SSLContext | None = None) -> Starlette:
    """The app around a started controller; also what tests drive in memory."""
    return make_app(
        "controller", routes(controller, authorities), ready=controller.ready, registry=metrics_registry(controller)
    )


def run_controller(settings: Settings, *, port: int, insecure: bool) -> None:
    """Returns when stopped by a signal, or when another controller took over. Raises NoResource, InvalidConfig,
    Corrupt before it serves."""
    data_dir, authorities = Path(settings.data_dir), client_context(settings)
    bound = listen(settings.host, port, insecure=insecure)
    name = instance_id("controller", settings.host, bound.getsockname()[1])
    setup_logging("controller", name)
    with hold_directory(data_dir, Role.CONTROLLER):
        logs = open_logs(settings)
        _ = logs.epoch  # settings that cannot be are told now, not to the first who creates a table
        store = SqliteMetadataStore(data_dir / "metadata.db")
        controller = Controller(
            store, logs, open_store(settings), name=name, has_store=has_store(settings),
            expire_streams=logs.expire,
        )  # fmt: skip
        controller.journal = keep_journal(data_dir, "controller", name)
        log_event(
            _log, "controller leads", term=controller.catalog.leadership.term, tables=len(controller.catalog.tables)
        )

        def on_handle(server: RunningServer) -> None:
            controller.on_deposed = server.stop

        controller.start()
        try:
            serve(
                make_controller_app(controller, authorities), settings.host, port, insecure=insecure, data_dir=data_dir,
                bound=bound, on_handle=on_handle,
            )  # fmt: skip
        finally:
            controller.stop()
            store.close()
            logs.close()
