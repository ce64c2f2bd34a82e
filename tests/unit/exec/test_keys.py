# SPDX-License-Identifier: Apache-2.0
"""Group keys as numbers: several columns make one number and come back from it, or are left to the plain query."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cremant.exec.keys import KeySpace, row_keys
from cremant.model.table import IndexConfig
from cremant.segment.index import INDEX_FILE, build_index, open_index
from cremant.segment.scan import Piece

ROWS = 40_000


def piece(directory: Path, sizes: list[int]) -> Piece:
    """One batch with a column of as many different values for each size."""
    columns = [pa.array([f"v{row // (n + 1) % size:06d}" for row in range(ROWS)]) for n, size in enumerate(sizes)]
    batch = pa.record_batch([one.cast(pa.string_view()) for one in columns], [f"k{n}" for n in range(len(sizes))])
    path = directory / INDEX_FILE
    build_index(path, [batch], "c", IndexConfig())
    index = open_index(path, "c", IndexConfig())
    return Piece("k", 0, "s", (batch,), ROWS, None, immutable=True, index=index, first_rows=(0,))


@pytest.mark.parametrize("sizes", [[3], [128, 256], [128, 256, 1], [7, 1, 4_096], [1_024, 2_048]])
def test_values_come_back_from_the_number_of_their_row(tmp_path: Path, sizes: list[int]) -> None:
    """Also where the largest number is the largest of its type."""
    own = piece(tmp_path, sizes)
    names = own.batches[0].schema.names
    keys, coded = row_keys(KeySpace(), names, [own])
    assert keys is not None
    assert coded == [own]
    numbers = keys.numbers(own, 0)
    assert numbers.type == keys.type
    found = keys.columns_of(numbers, [pa.string_view()] * len(names))
    assert [column.to_pylist() for column in found] == [column.to_pylist() for column in own.batches[0].columns]


@pytest.mark.parametrize("sizes", [[256] * 8, [7_000] * 5, [10_000] * 3, [2_048, 1_024, 1_024]])
def test_keys_whose_number_would_be_too_large_are_left_to_the_plain_query(tmp_path: Path, sizes: list[int]) -> None:
    """Products beyond 64 bits, too: of some, what is left of them is small or negative."""
    own = piece(tmp_path, sizes)
    assert row_keys(KeySpace(), own.batches[0].schema.names, [own]) == (None, [])


def test_columns_of_too_many_or_too_long_values_are_left_to_the_plain_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is numbered is kept in memory as long as the table is."""
    own, space = piece(tmp_path, [300]), KeySpace()
    monkeypatch.setattr("cremant.exec.keys.NUMBERS_BYTES_MAX", 3_000)
    assert row_keys(space, ["k0"], [own]) == (None, [])
    monkeypatch.setattr("cremant.exec.keys.NUMBERS_BYTES_MAX", 100_000)
    monkeypatch.setattr("cremant.exec.keys.NUMBERS_MAX", 299)
    assert row_keys(space, ["k0"], [own]) == (None, [])
    monkeypatch.setattr("cremant.exec.keys.NUMBERS_MAX", 300)
    assert row_keys(space, ["k0"], [own])[1] == [own]


def test_no_groups_give_no_values(tmp_path: Path) -> None:
    own = piece(tmp_path, [3, 4])
    keys, _ = row_keys(KeySpace(), ["k0", "k1"], [own])
    assert keys is not None
    found = keys.columns_of(pa.array(np.zeros(0, np.int16)), [pa.string_view()] * 2)
    assert [(column.type, len(column)) for column in found] == [(pa.string_view(), 0)] * 2
