# SPDX-License-Identifier: Apache-2.0
"""One child process of the supervisor: start, notice its death, stop it; and the child's side, dying with its parent.

Each child leads a process group of its own, so that Ctrl-C in the terminal reaches only the supervisor, and whatever a
role starts (a JVM) can be ended with it. Its output goes to `<directory>/log.jsonl`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cremant.model.limits import MIB

#: A log larger than this at start moves to `log.1.jsonl`: two generations of a role's log are kept.
LOG_BYTES_MAX = 64 * MIB
_LOG_TAIL_BYTES = 16 * 1024
_PARENT_VARIABLE = "CREMANT_PARENT_PID"
_PR_SET_PDEATHSIG = 1


class Ended(NamedTuple):
    """How a child ended: exit status, or minus the signal that killed it."""

    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            return f"killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"killed by signal {-self.status}"


class Child:
    """A running process. Not started again: a restart is another Child."""

    def __init__(self, arguments: Sequence[str], directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = log_path(directory)
        if self._log.exists() and self._log.stat().st_size > LOG_BYTES_MAX:
            self._log.replace(self._log.with_name("log.1.jsonl"))
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cremant", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, _PARENT_VARIABLE: str(os.getpid())},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> Ended | None:
        """None while it runs. What is left of its process group when it ended is killed before anything restarts."""
        if self._process.returncode is None:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None:
                return None
            self.kill()  # the dead leader still holds the group's number: it cannot belong to anyone else
            self._process.wait()
        return Ended(self._process.returncode)

    def ask_to_stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # between fork and setsid, or all gone: nothing to kill
            self._process.kill()


def log_path(directory: Path) -> Path:
    return directory / "log.jsonl"


def last_log_lines(directory: Path, count: int) -> list[str]:
    """The last telling lines of a role's log, for a person: messages of JSON lines, no stack traces."""
    try:
        with log_path(directory).open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line for line in (_telling(raw) for raw in text.splitlines()[-200:]) if line]
    return lines[-count:]


def _telling(raw: str) -> str:
    if not raw.strip() or raw[0].isspace() or raw.startswith(("Traceback", "\tat ")):
        return ""
    if raw.startswith("{"):
        try:
            record = json.loads(raw)
        except ValueError:
            return raw[:200]
        known = [str(record[key]) for key in ("level", "event", "message", "error") if record.get(key)]
        return " ".join(known)[:200]
    return raw[:200]


def die_with_parent() -> None:
    """Called by a supervised role at its start: the kernel kills it when the supervisor dies, also by kill -9."""
    parent = os.environ.pop(_PARENT_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        os._exit(1)  # the supervisor was gone before the kernel was asked
