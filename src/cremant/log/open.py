# SPDX-License-Identifier: Apache-2.0
"""Opens the log that a process's settings name."""

from __future__ import annotations

from pathlib import Path

from cremant.log.api import Log
from cremant.log.embedded import EmbeddedLog
from cremant.model.settings import Settings


def log_directory(settings: Settings) -> Path:
    return Path(settings.log_dir or Path(settings.data_dir) / "log").absolute()


def open_log(settings: Settings) -> Log:
    """The embedded log in `log_dir`. Raises InvalidConfig, NoResource (not writable), Corrupt (a foreign directory)."""
    return EmbeddedLog(
        log_directory(settings),
        fsync=settings.log_fsync,
        segment_bytes=settings.log_segment_bytes,
        retention_ms=settings.log_retention_ms,
    )
