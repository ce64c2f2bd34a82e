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


#: Message of a failure that is never a matter of time.
WRONG = "wrong answers"


def once_more(items: list[pytest.Item]) -> None:
    """Tests of real processes wait for them with deadlines, and what runs beside them may be slow: such a test has a
    second try, which the summary counts. Wrong answers and broken rules have none."""
    for item in items:
        if item.nodeid.startswith(("tests/process/", "tests/spark/", "tests/contract/log/")):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=[WRONG, r"InvariantViolation|\b[EIU]-\d\b"]))


class Lanes(LoadScopeScheduling):
    """A lane is a unit of work. Units are handed out in the order of the tests, not by size."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)
