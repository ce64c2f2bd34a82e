# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and how settings come together: defaults < file < environment < flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cremant.cli.console import warn
from cremant.model.errors import InvalidConfig
from cremant.model.settings import SETTINGS, Settings

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Directory of the cluster's data [default: ./cremant-data]", show_default=False),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings", envvar="CREMANT_CONFIG", show_default=False)
]
ControllerUrl = Annotated[
    str | None,
    typer.Option("--controller", help="URL of the controller [default: found by data directory]", show_default=False),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow to listen on other addresses than loopback, without authentication")
]
SetValues = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated")
]
EpochKafka = Annotated[
    str | None,
    typer.Option("--kafka", metavar="HOST:PORT,…", help="Keep epoch logs in this Kafka, instead of the embedded log",
                 show_default=False),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Answer as JSON, for programs")]

_PREFIX = "CREMANT_"
#: Variables with the prefix that are not settings.
_OTHER_VARIABLES = {
    "CREMANT_CONFIG",
    "CREMANT_CONTROLLER",
    "CREMANT_BROKER",
    "CREMANT_DEBUG",
    "CREMANT_PARENT_PID",
    "CREMANT_VENV",
}


class Format(StrEnum):
    """How `cremant sql` prints an answer."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    ARROW = "arrow"


def load_settings(
    config: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Settings:
    """Flags that are None count as not given. Raises InvalidConfig with the place a bad value came from."""
    layers: list[tuple[str, dict[str, Any]]] = []
    if config is not None:
        layers.append((f"file {config}", _read_file(config)))
    layers.append(("environment", _from_environment(os.environ if environment is None else environment)))
    layers.append(("command line", {name: _plain(value) for name, value in flags.items() if value is not None}))
    return Settings(*layers)


def set_values(values: list[str] | None) -> dict[str, object]:
    """What `--set NAME=VALUE` says. Raises InvalidConfig."""
    found: dict[str, object] = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidConfig(f"--set {text}: expected NAME=VALUE")
        found[name] = value
    return found


def kafka_flags(brokers: str | None, properties: Path | None) -> dict[str, object]:
    """`--kafka` and `--properties` as settings. Raises InvalidConfig, NotFound."""
    from cremant.cli.streams import kafka_of

    kafka = kafka_of(brokers, properties)
    return dict(kafka.settings()) if kafka is not None else {}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidConfig(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"settings file {path} is not TOML: {error}") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`a.b = 1` in TOML is a table within a table; as a setting it is one name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {_PREFIX + setting.name.upper(): setting.name for setting in SETTINGS}
    unknown = [
        name
        for name in sorted(environment)
        if name.startswith(_PREFIX) and name not in known and name not in _OTHER_VARIABLES
    ]
    if unknown:
        warn(f"ignored environment: {', '.join(unknown)} (no settings of these names)")
    return {setting: environment[variable] for variable, setting in known.items() if variable in environment}
