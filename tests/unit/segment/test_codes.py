# SPDX-License-Identifier: Apache-2.0
"""Which values of a coded column occur in rows that are there, found by looking at a few rows of each."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.segment.codes import Codes


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32), values=st.integers(1, 40), rows=st.integers(1, 3_000),
    gone=st.sampled_from([0.0, 0.1, 0.9, 0.99, 1.0]), skew=st.sampled_from([0, 1, 4]), rows_first=st.booleans(),
)  # fmt: skip
def test_a_value_occurs_iff_some_row_that_is_there_has_it(
    seed: int, values: int, rows: int, gone: float, skew: int, rows_first: bool
) -> None:
    """Also values of many rows of which hardly any is there, and where all that are there stand at one end."""
    dice = np.random.default_rng(seed)
    numbers, places = np.unique((dice.random(rows) ** (1 + skew) * values).astype(int), return_inverse=True)
    coded = places.astype(np.uint8)
    there = dice.random(rows) >= gone
    there[: rows // 2] &= rows_first
    codes = Codes(pa.array([f"v{number:02d}" for number in numbers.tolist()]), coded)
    wanted = np.flatnonzero(dice.random(len(numbers)) < 0.7)
    for _ in range(2):  # what was learned of the rows is used again
        assert codes.occurring(wanted, there).tolist() == sorted({*wanted.tolist()} & {*coded[there].tolist()})
