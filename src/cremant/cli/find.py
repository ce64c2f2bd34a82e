# SPDX-License-Identifier: Apache-2.0
"""How a command finds its cluster: --controller, else CREMANT_CONTROLLER, else `<data-dir>/cluster.json` as `up` and
`quickstart` write it, else http://127.0.0.1:9000."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cremant.model.errors import Corrupt, InvalidConfig, NoResource
from cremant.model.settings import SETTINGS

_DEFAULTS = {setting.name: setting.default for setting in SETTINGS}
CLUSTER_FILE = "cluster.json"


class RunningRole(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One supervised process. `pid` is 0 while it is being restarted."""

    url: str
    pid: int


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a running supervisor tells other commands of this machine."""

    controller: str
    broker: str
    log_dir: str
    supervisor_pid: int
    #: Brokers and properties file of the epoch log; empty = the embedded log.
    kafka: str = ""
    kafka_properties: str = ""
    roles: dict[str, RunningRole] = {}


def write_cluster_file(data_dir: Path, content: ClusterFile) -> None:
    """Atomic: a reader sees the old or the new content."""
    path = data_dir / CLUSTER_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
    temporary.replace(path)


def read_cluster_file(data_dir: Path) -> ClusterFile | None:
    path = data_dir / CLUSTER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterFile)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoResource(
            f"cannot read {path}: {error.strerror}", hint="give another --data-dir, or --controller"
        ) from error
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is not readable: {error}", hint="remove the file, or give --controller") from error


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as a command sees it. `log_dir` only when its embedded log is a directory of this machine."""

    controller: str
    broker: str | None
    log_dir: Path | None


def usual_cluster() -> Target:
    """What is meant where nothing says more."""
    return Target(controller=_DEFAULTS["controller_url"], broker=os.environ.get("CREMANT_BROKER"), log_dir=None)


def find_cluster(controller: str | None, data_dir: Path | None) -> Target:
    given = controller or os.environ.get("CREMANT_CONTROLLER")
    broker = os.environ.get("CREMANT_BROKER")
    if given:
        if not given.startswith(("http://", "https://")):
            raise InvalidConfig(f"the controller's URL {given!r}: expected http://HOST:PORT")
        return Target(controller=given.rstrip("/"), broker=broker, log_dir=None)
    directory = data_dir or Path(os.environ.get("CREMANT_DATA_DIR") or _DEFAULTS["data_dir"])
    written = read_cluster_file(directory)
    if written is None:
        return usual_cluster()
    log_dir = Path(written.log_dir)
    return Target(
        controller=written.controller, broker=broker or written.broker, log_dir=log_dir if log_dir.is_dir() else None
    )
