# SPDX-License-Identifier: Apache-2.0
"""The broker process: follows the cluster view and answers SQL until told to stop. On disk it keeps only its id."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry

from cremant.broker.metrics import BrokerMetrics, NetworkMetrics
from cremant.broker.query import QueryService
from cremant.broker.rest import routes
from cremant.exec.engine import Engine
from cremant.model.cluster import Role
from cremant.model.names import instance_id
from cremant.model.settings import Settings
from cremant.shell.app import listen, make_app, serve
from cremant.shell.logs import log_event, setup_logging
from cremant.shell.member import Member

_log = logging.getLogger(__name__)


def run_broker(settings: Settings, *, port: int, insecure: bool) -> None:
    """Returns when stopped by a signal. Raises NoResource (port in use), InvalidConfig, Corrupt before it serves."""
    bound = listen(settings.host, port, insecure=insecure)
    own_port = bound.getsockname()[1]
    setup_logging("broker", instance_id("broker", settings.host, own_port))
    engine = Engine(threads=settings.query_threads, memory_bytes=settings.query_memory_bytes)
    member = Member(Role.BROKER, settings.data_dir, settings.host, own_port, settings.controller_url)
    queries = QueryService(lambda: member.view, engine, member.id, settings.controller_url)
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry)
    registry.register(NetworkMetrics(queries))
    queries.on_response = metrics.query_answered
    member.on_view(lambda view: metrics.view_version.set(view.version))

    def ready() -> tuple[bool, str]:
        return member.view is not None, f"waiting for the first view from the controller at {settings.controller_url}"

    app = make_app("broker", routes(queries), ready=ready, registry=registry)
    try:
        serve(
            app, settings.host, port, insecure=insecure, data_dir=settings.data_dir, bound=bound,
            on_started=lambda url: member.start(),
        )  # fmt: skip
    finally:
        member.stop()
        queries.close()
        engine.close()
    log_event(_log, "broker ended")
