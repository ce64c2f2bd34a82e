# SPDX-License-Identifier: Apache-2.0
"""One sealed segment on its way to the deep store, and what can become of it."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cremant.model.errors import Corrupt, CremantError, DeadlineExceeded, NoResource, NotFound, UserError
from cremant.shell.backoff import Backoff
from cremant.store.files import NO_HARD_LINKS


class UploadState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    LANDED = "landed"
    FAILED = "failed"


class UploadCause(StrEnum):
    """Why an upload failed."""

    STORE_DOWN = "storeDown"
    STORE_FULL = "storeFull"
    TIMEOUT = "timeout"
    #: Our copy is damaged, or gone.
    CHECKSUM = "checksum"
    NOT_HELD = "notHeld"
    #: Our disk has no room, or fails.
    LOCAL_DISK = "localDisk"
    #: The store is set up wrongly.
    REFUSED = "refused"
    INTERNAL = "internal"

    @property
    def of_store(self) -> bool:
        """The store fails as a whole: what else there is to upload would fail, too."""
        return self in (UploadCause.STORE_DOWN, UploadCause.STORE_FULL, UploadCause.TIMEOUT)


def cause_of(error: Exception) -> UploadCause:
    """Of what putting an object raised."""
    match error:
        case DeadlineExceeded():
            return UploadCause.TIMEOUT
        case NoResource():
            return UploadCause.STORE_FULL
        case Corrupt():
            return UploadCause.CHECKSUM
        case NotFound() | FileNotFoundError():
            return UploadCause.NOT_HELD
        case UserError():
            return UploadCause.REFUSED
        case OSError():
            return UploadCause.LOCAL_DISK
        case CremantError():
            return UploadCause.STORE_DOWN
        case _:
            return UploadCause.INTERNAL


@dataclass(slots=True, eq=False)
class Upload:
    """One object. `skipped`: not even begun, for the store has failed too often; `hurried`: the store was not known to
    work when it began, so that no commit should wait for it."""

    table: str
    incarnation: str
    segment: str
    name: str
    checksum: str
    file_checksum: str
    state: UploadState = UploadState.WAITING
    size_bytes: int = 0
    url: str | None = None
    error: str | None = None
    cause: UploadCause | None = None
    skipped: bool = False
    hurried: bool = False
    began_s: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    #: When to tell the controller what came of it: a commit that names it comes first.
    report_at_s: float = math.inf
    #: A commit names it, or its outcome is not known: it must not be deleted.
    claimed: bool = False
    backoff: Backoff = field(default_factory=Backoff)


def keep_beside(source: Path, target: Path) -> None:
    """Another name for the same bytes, or a copy where the disk has no hard links: the segment may move to its place,
    or go, while they are uploaded. Raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        shutil.copyfile(source, target)
