# SPDX-License-Identifier: Apache-2.0
"""The ends of a stream: as of when they are, and doubted where they are below what is known to be in it.

A replica of Kafka that has just become leader may not know for a moment how far its partition is committed, and a
broker may answer for a partition that it does not lead any more. An end that stays below is final: the stream lost
messages, and what asked stops the table (E-2, E-8).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cremant.log.api import Log

T = TypeVar("T")

#: Five seconds: a new leader knows within one or two round trips of its followers, half a second each at most.
ASKED_MAX = 20
PAUSE_S = 0.25


def time_before(stream: Log) -> int:
    """Wall time to take before the ends of a stream are read: what its log stamped before then is below them."""
    return time.time_ns() // 1_000_000 - stream.stamped_ahead_ms


def asked_again(ask: Callable[[], T], reaches: Callable[[T], bool], pause: Callable[[float], None] = time.sleep) -> T:
    """The first answer that `reaches` what is known, or the last of ASKED_MAX that do not. Raises what `ask` raises."""
    for _ in range(ASKED_MAX - 1):
        answer = ask()
        if reaches(answer):
            return answer
        pause(PAUSE_S)
    return ask()
