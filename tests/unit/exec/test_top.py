# SPDX-License-Identifier: Apache-2.0
"""Rows left out of an order are never among its first ones: ties, NaN, infinities, masks, several pieces."""

from __future__ import annotations

import math
import time

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.exec.stop import Stop
from cremant.exec.top import narrowed
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece

numbers = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.5]))
batches = st.lists(st.tuples(numbers, st.booleans(), st.booleans()), min_size=1, max_size=9)
pieces_of_rows = st.lists(st.tuples(st.lists(batches, min_size=1, max_size=3), st.booleans()), min_size=1, max_size=3)


def mask_of(flags: list[bool]) -> RowMask:
    return RowMask(np.array(flags, np.bool_), sum(flags))


@settings(deadline=None)
@given(rows=pieces_of_rows, descending=st.booleans(), limit=st.integers(1, 6), filtered=st.booleans())
def test_the_first_rows_are_all_still_there(
    rows: list[tuple[list[list[tuple[float, bool, bool]]], bool]], descending: bool, limit: int, filtered: bool
) -> None:
    """Each row: its value, whether it exists, whether an index let it pass. Pieces are exact or not."""
    pieces = []
    for own, exact in rows:
        made = [pa.record_batch({"x": pa.array([value for value, _, _ in batch])}) for batch in own]
        validity = tuple(mask_of([exists for _, exists, _ in batch]) for batch in own)
        masks = tuple(mask_of([exists and passed for _, exists, passed in batch]) for batch in own) if exact else None
        count = sum(len(batch) for batch in own)
        pieces.append(Piece("k", 0, "s", tuple(made), count, validity, True, masks=masks, exact=exact))
    fewer, left_out = narrowed(
        pieces, "x", descending=descending, limit=limit, is_settled=not filtered, stop=Stop(time.monotonic() + 9)
    )  # fmt: skip
    before = [chosen(piece) for piece in pieces if piece.exact or not filtered]
    after = [chosen(piece) for old, piece in zip(pieces, fewer, strict=True) if old.exact or not filtered]
    everything = sorted((value for values in before for value in values if not math.isnan(value)), reverse=descending)
    left = sorted((value for values in after for value in values if not math.isnan(value)), reverse=descending)
    wanted = everything[:limit]
    assert left[: len(wanted)] == wanted
    ties = [value for value in everything if wanted and value == wanted[-1]]
    assert [value for value in left if wanted and value == wanted[-1]] == ties
    nans = [sum(math.isnan(value) for value in values) for values in before]
    assert [sum(math.isnan(value) for value in values) for values in after] == nans
    assert 0 <= left_out <= sum(map(len, before)) - sum(map(len, after))
    for old, new in zip(pieces, fewer, strict=True):
        if filtered and not old.exact:
            assert new is old


def chosen(piece: Piece) -> list[float]:
    values: list[float] = []
    for number, batch in enumerate(piece.batches):
        mask = piece.chosen(number)
        column = batch.column(0).to_numpy()
        values += (column if mask is None else column[mask.flags]).tolist()
    return values
