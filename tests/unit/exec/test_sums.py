# SPDX-License-Identifier: Apache-2.0
"""Sums without the engine: what other rows hold never shows, whole numbers are exact, answers repeat to the bit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from cremant.exec.stop import Stop
from cremant.exec.sums import Part, totals
from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.segment.rows import RowMask

ROWS = 150_000
STEPS = [2, 50, 1_000]


@pytest.fixture(scope="module")
def helpers() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def stop() -> Stop:
    return Stop(time.monotonic() + 60)


def every(step: int, rows: int) -> RowMask:
    flags = np.arange(rows) % step == 0
    return RowMask(flags, int(np.count_nonzero(flags)))


def batch(values: np.ndarray) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values)], ["x"])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("others", [math.nan, math.inf, -math.inf])
def test_rows_that_do_not_match_are_not_seen(helpers: Executor, step: int, others: float) -> None:
    mask = every(step, ROWS)
    values = np.full(ROWS, others)
    values[mask.flags] = 0.25
    parts: list[Part] = [(batch(values), mask), (batch(values), mask)]
    assert totals(["x"], parts, helpers, stop()) == [0.5 * mask.count]


@pytest.mark.parametrize("step", STEPS)
def test_numbers_that_are_none_and_infinities_of_matching_rows_are_added(helpers: Executor, step: int) -> None:
    mask = every(step, ROWS)
    values = np.ones(ROWS)
    values[0] = math.inf
    assert totals(["x"], [(batch(values), mask), (batch(np.ones(ROWS)), None)], helpers, stop()) == [math.inf]
    values[0] = math.nan
    (found,) = totals(["x"], [(batch(values), mask)], helpers, stop())
    assert math.isnan(found)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("extreme", [2**31 - 1, -(2**31)])
def test_int_is_exact_and_long_and_float_are_double(helpers: Executor, step: int, extreme: int) -> None:
    mask = every(step, ROWS)
    ints = batch(np.full(ROWS, extreme, np.int32))
    (found,) = totals(["x"], [(ints, mask), (ints, None)], helpers, stop())
    assert isinstance(found, int)
    assert found == extreme * (mask.count + ROWS)
    longs = batch(np.full(ROWS, 2**62, np.int64))
    assert totals(["x"], [(longs, mask), (longs, None)], helpers, stop()) == [float(2**62) * (mask.count + ROWS)]
    floats = batch(np.full(ROWS, 0.5, np.float32))
    assert totals(["x"], [(floats, mask)], helpers, stop()) == [0.5 * mask.count]


def test_batches_too_large_for_exact_doubles_are_added_as_integers(
    helpers: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.exec.sums.EXACT_ROWS", 10)
    mask = every(2, ROWS)
    assert totals(["x"], [(batch(np.full(ROWS, 7, np.int32)), mask)], helpers, stop()) == [7 * mask.count]


def test_the_same_question_has_the_same_answer_to_the_last_bit(helpers: Executor) -> None:
    dice = np.random.default_rng(5)
    parts: list[Part] = [
        (batch(dice.random(20_000) * 10.0 ** dice.integers(-8, 8)), every(3, 20_000)) for _ in range(40)
    ]
    found = {tuple(totals(["x"], parts, helpers, stop())) for _ in range(20)}
    assert len(found) == 1
    exact = math.fsum(value for own, mask in parts if mask for value in own["x"].to_numpy()[mask.flags].tolist())
    assert next(iter(found))[0] == pytest.approx(exact, rel=1e-12)


def test_it_stops_and_no_helper_goes_on(helpers: Executor) -> None:
    cancelled = stop()
    cancelled.cancel()
    with pytest.raises(QueryError) as failed:
        totals(["x"], [(batch(np.ones(ROWS)), None)] * 4, helpers, cancelled)
    assert failed.value.code == QueryCode.QUERY_CANCELLED


def test_nothing_is_zero_of_each_column(helpers: Executor) -> None:
    assert totals(["x", "y"], [], helpers, stop()) == [0, 0]
