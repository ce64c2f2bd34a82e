# SPDX-License-Identifier: Apache-2.0
"""The exclusive right to run a role on a data directory. Two processes on one directory would be kept apart by their
generations, tokens and terms, but would be of no use to anybody."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from cremant.model.cluster import Role
from cremant.model.errors import NoResource


def hold_directory(data_dir: str | Path, role: Role) -> IO[bytes]:
    """Held until the returned file is closed (kill -9 closes it, too). Raises NoResource."""
    directory = Path(data_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / f"{role}.lock").open("ab")
    except OSError as error:
        raise NoResource(
            f"data directory {directory} cannot be used: {error.strerror or error}",
            hint="it must be a directory that this user may write",
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise NoResource(
            f"another {role} runs on {directory}", hint="stop it, or give this one its own --data-dir"
        ) from error
    return file
