# SPDX-License-Identifier: Apache-2.0
"""Structured logs, cause ids, backoff."""

from __future__ import annotations

import json
import logging
import random

from cremant.shell.backoff import Backoff
from cremant.shell.logs import JsonFormatter, cause, current_cause


def _format(**extra: object) -> dict[str, object]:
    record = logging.makeLogRecord({"name": "cremant.x", "levelname": "INFO", "msg": "cut decided", **extra})
    line = JsonFormatter("server", "Server_x").format(record)
    assert "\n" not in line
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_a_line_names_role_instance_event_and_fields() -> None:
    line = _format(fields={"segment": "gold__0__0__x", "waited_ms": 5, "odd": {1}})
    assert (line["role"], line["instance"], line["event"], line["level"]) == (
        "server", "Server_x", "cut decided", "info",
    )  # fmt: skip
    assert (line["segment"], line["waited_ms"], line["odd"]) == ("gold__0__0__x", 5, [1])
    assert str(line["at"]).endswith("Z")


def test_lines_name_the_cause_in_force_and_none_outside_of_one() -> None:
    assert "cause" not in _format()
    with cause("abc"):
        assert _format()["cause"] == "abc"
        with cause() as inner:
            assert _format()["cause"] == inner != "abc"
        assert current_cause() == "abc"
    assert current_cause() == ""


def test_backoff_doubles_with_jitter_up_to_its_bound_and_starts_anew_after_success() -> None:
    backoff = Backoff(100, 1_000, dice=random.Random(1))
    waits = [backoff.next_ms() for _ in range(8)]
    for attempt, wait_ms in enumerate(waits):
        ceiling = min(1_000, 100 * 2**attempt)
        assert ceiling // 2 <= wait_ms <= ceiling
    backoff.reset()
    assert backoff.next_ms() <= 100
