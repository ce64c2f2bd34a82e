# SPDX-License-Identifier: Apache-2.0
"""How `scripts/test` spreads the tests over two workers (pytest-xdist): by lanes.

What starts real processes runs one after the other, in lanes that one worker takes as a whole: real clusters; Spark and
Kafka, whose session and brokers a lane shares; and the soak, which judges memory, files and threads, so that a busy
machine does not matter to it. They come first. The files of the other tests follow, one by one, to whichever worker has
nothing to do.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

#: The first that fits counts. A worker that gets a lane of one or two tests gets the next one, too.
LANES: dict[str, tuple[str, ...]] = {
    "soak": ("tests/process/test_soak.py",),
    "clusters": ("tests/process/",),
    "spark and kafka": ("tests/spark/", "tests/contract/log/", "tests/unit/controller/test_kafka.py"),
}


def lane_of(nodeid: str) -> str:
    """Its lane, or its file."""
    file = nodeid.partition("::")[0]
    return next((lane for lane, beginnings in LANES.items() if file.startswith(beginnings)), file)


def lanes_first(items: list[pytest.Item]) -> None:
    order = list(LANES)
    items.sort(key=lambda item: order.index(lane) if (lane := lane_of(item.nodeid)) in LANES else len(order))


#: Rooms of the roles, whose tests run servers in threads.
ROLES = ("broker", "cluster", "controller", "pipeline", "server", "shell")

#: Message of a failure that is never a matter of time.
WRONG = "wrong answers"


#: Tests that start processes, threads and sockets and wait for them with deadlines.
WAITING = ("tests/process/", "tests/spark/", "tests/contract/", *(f"tests/unit/{room}/" for room in ROLES))


def once_more(items: list[pytest.Item]) -> None:
    """What runs beside a test that waits may be slow: it has a second try, which the summary counts. Wrong answers and
    broken rules have none; E-8 is a rule that a stream breaks, as tests make it."""
    for item in items:
        if item.nodeid.startswith(WAITING):
            item.add_marker(
                pytest.mark.flaky(reruns=1, rerun_except=[WRONG, r"InvariantViolation|\b(E-[1-7]|[IU]-\d)\b"])
            )


class Lanes(LoadScopeScheduling):
    """A lane is a unit of work. Units are handed out in the order of the tests, not by size."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)
