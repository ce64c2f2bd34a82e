# SPDX-License-Identifier: Apache-2.0
"""Where a lag is spent: shares that sum up to it, each with the one who is to blame; states; promises."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.cluster.stages import (
    CAUGHT_UP_MS,
    IDLE_AFTER_MS,
    STUCK_AFTER_MS,
    Pipe,
    Server,
    greatest,
    promise,
    stages,
    state_of,
)
from cremant.wire.freshness import Stages

NOW_MS = 1_000_000
times = st.integers(0, 2 * NOW_MS)
maybe = st.none() | times
servers = st.builds(Server, said_ms=times, answers=st.booleans(), log_silent_since_ms=maybe)
pipes = st.builds(Pipe, closed_ms=maybe, read_ms=maybe, stream_silent=st.booleans(), known=st.booleans())


@given(times, servers, pipes)
def test_shares_are_never_negative_and_sum_up_to_the_lag(fresh_ms: int, server: Server, pipe: Pipe) -> None:
    found = stages(fresh_ms, NOW_MS, server, pipe)
    assert all(share >= 0 for share in msgspec.structs.asdict(found).values())
    assert found.total_ms == max(0, NOW_MS - fresh_ms)


@given(times, servers, pipes)
def test_nobody_is_blamed_whom_nothing_points_at(fresh_ms: int, server: Server, pipe: Pipe) -> None:
    found = stages(fresh_ms, NOW_MS, server, pipe)
    if not pipe.known:
        assert found.stream == found.pipeline == 0
    if not pipe.stream_silent:
        assert found.stream == 0
    if server.log_silent_since_ms is None:
        assert found.log == 0
    if pipe.closed_ms is None or pipe.closed_ms <= fresh_ms:
        assert found.server == 0


def said(age_ms: int, *, answers: bool = True, log_silent_ms: int | None = None) -> Server:
    silent_ms = None if log_silent_ms is None else NOW_MS - log_silent_ms
    return Server(said_ms=NOW_MS - age_ms, answers=answers, log_silent_since_ms=silent_ms)


def closed(age_ms: int, *, read_ms: int, stream_silent: bool = False) -> Pipe:
    return Pipe(closed_ms=NOW_MS - age_ms, read_ms=NOW_MS - read_ms, stream_silent=stream_silent, known=True)


@pytest.mark.parametrize(
    ("lag_ms", "server", "pipe", "expected"),
    [
        pytest.param(5_000, said(0), closed(400, read_ms=100), Stages(server=4_600, pipeline=400), id="server behind"),
        pytest.param(5_000, said(0), closed(5_000, read_ms=4_900), Stages(pipeline=5_000), id="pipeline stopped"),
        pytest.param(
            9_000, said(0), closed(9_000, read_ms=8_500, stream_silent=True), Stages(pipeline=500, stream=8_500),
            id="stream stopped",
        ),
        pytest.param(
            4_000, said(3_900, answers=False), closed(200, read_ms=100), Stages(server=3_800, pipeline=200),
            id="server stopped",
        ),
        pytest.param(
            4_000, said(0, log_silent_ms=3_500), closed(200, read_ms=100), Stages(server=500, log=3_500),
            id="log stopped",
        ),
        pytest.param(
            900, said(700), closed(100, read_ms=100), Stages(server=200, unknown=600, pipeline=100), id="old report"
        ),
        pytest.param(
            900, said(0), Pipe(closed_ms=None, read_ms=None, stream_silent=False, known=False), Stages(unknown=900),
            id="controller away",
        ),
        pytest.param(-500, said(0), closed(0, read_ms=0), Stages(), id="clock ahead"),
    ],
)  # fmt: skip
def test_the_lag_is_cut_where_evidence_ends(lag_ms: int, server: Server, pipe: Pipe, expected: Stages) -> None:
    assert stages(NOW_MS - lag_ms, NOW_MS, server, pipe) == expected


def test_the_greatest_share_holds_back() -> None:
    assert greatest(Stages(server=5, pipeline=4)) == "server"
    assert greatest(Stages()) is None


@pytest.mark.parametrize(
    ("lag_ms", "event_age_ms", "lag_rows", "quiet_ms", "expected"),
    [
        (50, 50, 3, 0, "caughtUp"),
        (CAUGHT_UP_MS, 50, 3, 0, "caughtUp"),
        (CAUGHT_UP_MS + 1, 50, 3, 0, "behind"),
        (50, IDLE_AFTER_MS + 1, 0, IDLE_AFTER_MS + 1, "idle"),
        (50, None, 0, 0, "idle"),
        (60_000, 60_000, 0, 60_000, "idle"),
        (60_000, 60_000, 7, STUCK_AFTER_MS + 1, "stuck"),
        (60_000, 60_000, 7, STUCK_AFTER_MS, "behind"),
        (60_000, 60_000, None, STUCK_AFTER_MS + 1, "behind"),
        (None, None, 7, 0, "behind"),
        (None, None, None, 0, "unknown"),
    ],
)
def test_states(
    lag_ms: int | None, event_age_ms: int | None, lag_rows: int | None, quiet_ms: int, expected: str
) -> None:
    assert state_of(False, True, lag_ms, event_age_ms, lag_rows, quiet_ms) == expected
    assert state_of(True, True, lag_ms, event_age_ms, lag_rows, quiet_ms) == "paused"
    assert state_of(False, False, lag_ms, event_age_ms, lag_rows, quiet_ms) == "unknown"


def test_a_bound_is_broken_by_what_is_above_it_since_it_was() -> None:
    assert promise(2_000, 5, NOW_MS, 2_000, None, "why")[0] == "ok"
    state, alert = promise(2_300, 5, NOW_MS, 2_000, None, "why")
    assert (state, alert.state, alert.since_ms) == ("violated", "firing", NOW_MS - 300)
    assert alert.reason is not None
    assert "2300 ms" in alert.reason
    assert "why" in alert.reason


def test_a_silent_producer_breaks_the_promise_of_newest_events() -> None:
    state, alert = promise(10, 70_000, NOW_MS, 2_000, 60_000, "why")
    assert (state, alert.since_ms) == ("violated", NOW_MS - 10_000)


def test_unknown_freshness_fires_and_is_called_unknown() -> None:
    assert promise(None, None, NOW_MS, None, None, "why") == ("none", promise(1, 1, NOW_MS, None, None, "")[1])
    state, alert = promise(None, 3, NOW_MS, 2_000, None, "no server answers")
    assert (state, alert.state, alert.since_ms) == ("unknown", "firing", None)
    assert promise(None, None, NOW_MS, None, 1_000, "why")[0] == "unknown"
    # Whichever bound is promised, as answers to queries have it.
    assert promise(None, 3, NOW_MS, None, 1_000, "why")[0] == "unknown"
    for sla_ms in (None, 2_000):
        assert promise(10, None, NOW_MS, sla_ms, 1_000, "why")[0] == "unknown"
