# SPDX-License-Identifier: Apache-2.0
"""Structured logs: one JSON object per line on stderr, with role, instance and the cause id in force.

The cause id says who started this. It arrives in the header `X-Cremant-Cause`, is drawn where a chain begins, rides in
every message and on every log line: `grep <cause>` over all roles tells the whole story.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import secrets
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

CAUSE_HEADER = "X-Cremant-Cause"

_cause: ContextVar[str] = ContextVar("cause", default="")


def new_cause() -> str:
    return secrets.token_hex(8)


def current_cause() -> str:
    """Cause id of the request or task that runs now; empty outside of one."""
    return _cause.get()


@contextlib.contextmanager
def cause(cause_id: str = "") -> Iterator[str]:
    """Runs a block under `cause_id` (a new one when empty)."""
    chosen = cause_id or new_cause()
    token = _cause.set(chosen)
    try:
        yield chosen
    finally:
        _cause.reset(token)


class JsonFormatter(logging.Formatter):
    """One record = one line: time, level, role, instance, logger, event, then the fields of the event."""

    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self._role = role
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, Any] = {
            "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "instance": self._instance,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if cause_id := getattr(record, "cause", "") or current_cause():
            line["cause"] = cause_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def setup_logging(role: str, instance: str, level: int = logging.INFO) -> None:
    """Makes the root logger write JSON lines to stderr. Called once, at process start; again replaces."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role, instance))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "uvicorn", "uvicorn.error", "py4j"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """`event` is a short sentence without data; data goes into `fields` (units last in names)."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})


def log_failure(logger: logging.Logger, event: str, error: BaseException, **fields: Any) -> None:
    """A failure that was expected as possible: what failed and why, without a stack trace."""
    log_event(logger, event, level=logging.WARNING, error_type=type(error).__name__, error=str(error), **fields)
