# SPDX-License-Identifier: Apache-2.0
"""What one run of a table's query is: fixed when the query starts, known to driver, planner and workers alike.

Files (in `run_dir`, on a disk that all of them see): `config-<version>.json` one per config version that a plan may
name, written before any plan names it; and per generation, so that an orphan of an earlier run disturbs nobody:
`wanted-<generation>.json` what the driver wants of the next plan, `stopped-<generation>.json` why planner or task gave
up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from cremant.model import errors
from cremant.model.cluster import TableRecord
from cremant.model.errors import Corrupt, CremantError, InvariantViolation
from cremant.model.settings import SETTINGS, Settings
from cremant.pipeline.plan import SeedPlan, Wanted


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`log_settings`: what `open_logs` needs. `starts`: where a query without checkpoint begins. `stream_version`: the
    config version whose stream properties say where the stream is; they stay in its file, so no secret is in here.

    `epoch = base + batch id`, except for the one batch that replays the epoch that was committed already.
    """

    run_dir: str
    log_settings: dict[str, Any]
    table: str
    incarnation: str
    topic: str
    topic_incarnation: str
    stream_version: int
    epoch_topic: str
    dead_letter_topic: str
    generation: int
    base: int
    starts: tuple[int, ...]
    tasks_max: int
    replay_batch: int | None = None
    replay_epoch: int | None = None
    #: Rows go through a function of the user's, which is part of the query: it and its config version are fixed for
    #: the run. The source emits rows, a writer behind the function appends them. None: the fused lane.
    function_version: int | None = None
    #: In how many partitions the key coordinator's state is; None: not an upsert table.
    state_partitions: int | None = None
    #: The first batch is a seed of the coordinator's state, read through these brokers, of each partition from there.
    seed: SeedPlan | None = None
    brokers: tuple[str, ...] = ()
    seed_from: tuple[int, ...] = ()

    def epoch_of(self, batch_id: int) -> int:
        if batch_id == self.replay_batch and self.replay_epoch is not None:
            return self.replay_epoch
        return self.base + batch_id

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        return msgspec.json.decode(text, type=cls)

    def settings(self) -> Settings:
        return Settings(("pipeline run", self.log_settings))


def log_settings_of(settings: Settings) -> dict[str, Any]:
    """The settings that decide how logs are opened, with absolute paths."""
    from cremant.log.open import log_directory

    names = [setting.name for setting in SETTINGS if setting.name.startswith(("log_", "epoch_log", "kafka_"))]
    found = {name: getattr(settings, name) for name in names}
    if found["kafka_properties"]:
        found["kafka_properties"] = str(Path(found["kafka_properties"]).absolute())
    return {**found, "log_dir": str(log_directory(settings))}


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` in one step; survives the death of this process at any moment, and a power cut. Only this user
    may read it: configs may hold secrets."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def config_path(run_dir: str | Path, version: int) -> Path:
    return Path(run_dir) / f"config-{version}.json"


def write_config(run_dir: str | Path, record: TableRecord) -> None:
    """Keeps a config version for replays. A version never changes, so one that is there stays."""
    path = config_path(run_dir, record.config_version)
    if not path.exists():
        write_durably(path, msgspec.json.encode(record))


def read_config(run_dir: str | Path, version: int) -> TableRecord:
    path = config_path(run_dir, version)
    try:
        return msgspec.json.decode(path.read_bytes(), type=TableRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise Corrupt(f"config version {version} of a planned epoch cannot be read from {path}: {error}") from error


def _wanted_path(spec: RunSpec) -> Path:
    return Path(spec.run_dir) / f"wanted-{spec.generation}.json"


def _stopped_path(spec: RunSpec) -> Path:
    return Path(spec.run_dir) / f"stopped-{spec.generation}.json"


def remove_old_files(spec: RunSpec) -> None:
    """What earlier generations left."""
    for pattern in ("wanted-*.json", "stopped-*.json"):
        for path in Path(spec.run_dir).glob(pattern):
            if int(path.stem.rpartition("-")[2]) < spec.generation:
                path.unlink(missing_ok=True)


def write_wanted(spec: RunSpec, wanted: Wanted) -> None:
    path = _wanted_path(spec)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(wanted))
    temporary.replace(path)


class WantedFile:
    """The planner's view of what is wanted; read again only when it changed."""

    def __init__(self, spec: RunSpec) -> None:
        self._path = _wanted_path(spec)
        self._stamp: tuple[int, int] | None = None
        self._wanted: Wanted | None = None

    def read(self) -> Wanted:
        stat = self._path.stat()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if self._wanted is None or stamp != self._stamp:
            self._wanted = msgspec.json.decode(self._path.read_bytes(), type=Wanted)
            self._stamp = stamp
        return self._wanted


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Why planner or task gave up: the error's class, text and hint, and what the class's constructor needs more."""

    kind: str
    message: str
    hint: str = ""
    rule: str = ""


#: Trying again changes nothing about these; the query ends in state `failed` until its config or topic changes.
FINAL = (errors.InvalidConfig, errors.InvariantViolation, errors.Corrupt)


def write_stopped(spec: RunSpec, error: CremantError) -> None:
    """Tells the driver in plain words what Spark will wrap in stack traces. The first final reason stays; the others
    are replaced by newer ones."""
    path = _stopped_path(spec)
    before = _read_stopped(path)
    if not isinstance(before, FINAL):
        rule = error.rule if isinstance(error, InvariantViolation) else ""
        write_durably(
            path,
            msgspec.json.encode(Stopped(kind=type(error).__name__, message=error.message, hint=error.hint, rule=rule)),
        )


def take_stopped(spec: RunSpec) -> CremantError | None:
    """The reason that was left, as an error; it is removed."""
    path = _stopped_path(spec)
    error = _read_stopped(path)
    path.unlink(missing_ok=True)
    return error


def _read_stopped(path: Path) -> CremantError | None:
    try:
        stopped = msgspec.json.decode(path.read_bytes(), type=Stopped)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    if stopped.rule:
        return InvariantViolation(stopped.rule, stopped.message.removeprefix(f"{stopped.rule}: "), hint=stopped.hint)
    kind = getattr(errors, stopped.kind, CremantError)
    try:
        revived = kind(stopped.message, hint=stopped.hint)
    except TypeError:
        revived = CremantError(stopped.message, hint=stopped.hint)
    return revived if isinstance(revived, CremantError) else CremantError(stopped.message, hint=stopped.hint)
