# SPDX-License-Identifier: Apache-2.0
"""Which processes a cluster of one machine consists of, on which ports, with which arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cremant.cli import preflight
from cremant.cli.find import ClusterFile
from cremant.cli.supervisor import RoleSpec
from cremant.model.errors import InvalidConfig
from cremant.model.settings import SETTINGS, Settings
from cremant.shell.app import check_host
from cremant.store.open import store_uri

SERVERS_MAX = 16
_PIPELINE_RANK, _SERVING_RANK, _CONTROLLER_RANK = 1, 2, 3
#: Feeds that a cluster may run beside its roles stop before everything else.
FEED_RANK = 0


class Ports(NamedTuple):
    """0 = any free port. `server` is that of the first server; the others count down from it, as Pinot's admins do."""

    controller: int = 9000
    broker: int = 8099
    server: int = 8098
    pipeline: int = 8100


class ClusterPlan(NamedTuple):
    roles: list[RoleSpec]
    cluster: ClusterFile


def check_machine() -> None:
    """Raises NoResource with the fix before anything has started."""
    preflight.check_pyspark()
    preflight.check_java()


def plan_cluster(settings: Settings, *, servers: int, ports: Ports, insecure: bool) -> ClusterPlan:
    """Ports are checked and chosen here, once: a restarted role comes back on the port it had."""
    if not 1 <= servers <= SERVERS_MAX:
        raise InvalidConfig(f"--servers {servers}: expected 1 to {SERVERS_MAX}")
    check_host(settings.host, insecure=insecure)
    preflight.check_epoch_log(settings)
    preflight.check_tls(settings, servers)
    data_dir = Path(settings.data_dir).absolute()
    log_dir = Path(settings.log_dir or data_dir / "log").absolute()
    store = store_uri(settings)
    host = settings.host
    chosen = _Chosen(host)
    controller_port = chosen.take(ports.controller, "--controller-port")
    broker_port = chosen.take(ports.broker, "--broker-port")
    pipeline_port = chosen.take(ports.pipeline, "--pipeline-port")
    server_ports = [chosen.take(ports.server - n if ports.server else 0, "--server-port") for n in range(servers)]
    controller_url = f"http://{host}:{controller_port}"

    # Beside the places, every setting that somebody chose goes on to the roles, whatever layer it came from.
    places = {"data_dir", "log_dir", "store_uri", "host", "controller_url"}
    chosen_settings = [
        f"--set={setting.name}={getattr(settings, setting.name)}"
        for setting in SETTINGS
        if setting.name not in places and settings.source(setting.name) != "default"
    ]

    def spec(role: str, name: str, port: int, rank: int) -> RoleSpec:
        arguments = [
            "start", role,
            "--data-dir", str(data_dir / name),
            "--log-dir", str(log_dir),
            "--store-uri", store,
            "--host", host,
            "--port", str(port),
            *chosen_settings,
        ]  # fmt: skip
        if role != "controller":
            arguments += ["--controller", controller_url]
        if insecure:
            arguments.append("--insecure")
        return RoleSpec(name, tuple(arguments), f"http://{host}:{port}", rank)

    roles = [
        spec("pipeline", "pipeline", pipeline_port, _PIPELINE_RANK),
        spec("controller", "controller", controller_port, _CONTROLLER_RANK),
        *(spec("server", f"server-{n}", port, _SERVING_RANK) for n, port in enumerate(server_ports, start=1)),
        spec("broker", "broker", broker_port, _SERVING_RANK),
    ]
    cluster = ClusterFile(
        controller=controller_url,
        broker=f"http://{host}:{broker_port}",
        log_dir=str(log_dir),
        supervisor_pid=os.getpid(),
        kafka=settings.kafka_brokers if settings.epoch_log == "kafka" else "",
        kafka_properties=settings.kafka_properties,
    )
    return ClusterPlan(roles, cluster)


class _Chosen:
    """Ports handed out so far."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._taken: set[int] = set()

    def take(self, wanted: int, option: str) -> int:
        if wanted == 0:
            return preflight.free_port(self._host, self._taken)
        if wanted in self._taken:
            raise InvalidConfig(f"two roles would listen on port {wanted}", hint=f"choose another: {option}")
        preflight.check_port(self._host, wanted, option)
        self._taken.add(wanted)
        return wanted
