# SPDX-License-Identifier: Apache-2.0
"""Work keeps to its share of the time, unless it would be late."""

from __future__ import annotations

import pytest

from cremant.shell.pace import REST_MAX_S, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def work(self, share: float, within_s: float, *pieces_s: float) -> list[float]:
        """The rests of work whose pieces take so long."""
        pace = Pace(share, len(pieces_s), within_s, clock_s=lambda: self.now_s, sleep_s=self.sleep)
        for piece_s in pieces_s:
            self.now_s += piece_s
            pace.rest()
        return self.slept_s


@pytest.mark.parametrize(("share", "piece_s", "rests_s"), [(0.5, 0.2, 0.2), (0.25, 0.2, 0.6), (0.25, 60.0, REST_MAX_S)])
def test_a_rest_fits_the_piece_before_it(share: float, piece_s: float, rests_s: float) -> None:
    assert Clock().work(share, 1_000.0, *[piece_s] * 3) == pytest.approx([rests_s] * 3)


def test_who_may_use_a_whole_core_never_rests() -> None:
    assert Clock().work(1.0, 1_000.0, 5.0, 5.0) == []


def test_work_is_done_in_time_with_shorter_rests() -> None:
    clock = Clock()
    assert clock.work(0.1, 4.0, 0.5, 0.5, 0.5, 0.5) == pytest.approx([0.5] * 4)
    assert clock.now_s == pytest.approx(104.0)


def test_late_work_does_not_rest_until_it_is_in_time_again() -> None:
    assert Clock().work(0.5, 4.0, 3.0, 0.5, 0.1, 0.1) == pytest.approx([0.1])
