# SPDX-License-Identifier: Apache-2.0
"""A rate holds over all who share it, and unused time is not saved up."""

from __future__ import annotations

from cremant.model.settings import Settings
from cremant.shell.rate import Rate


def test_what_is_taken_together_keeps_the_rate_after_a_seconds_worth() -> None:
    rate = Rate(100)
    assert [rate.take(50, 10.0) for _ in range(6)] == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0]
    assert rate.take(50, 12.0) == 0.5  # those before wait till then
    assert [rate.take(50, 1000.0) for _ in range(3)] == [0.0, 0.0, 0.5]


def test_nothing_is_no_limit_and_a_server_has_one_unless_it_is_told_otherwise() -> None:
    assert Rate(0).take(10**12, 0.0) == 0.0
    assert Rate(Settings().peer_bytes_per_s).take(10**9, 0.0) > 10
