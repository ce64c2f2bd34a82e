# SPDX-License-Identifier: Apache-2.0
"""Group keys as numbers: the values of coded columns get one number each for the whole table, and several columns of a
row become one number, by which DataFusion groups three times as fast as by their texts.

Rules:

- A segment's codes are its own; its *numbers* (code -> number in the table's dictionary) are made once and kept.
  Numbers are given in order of arrival and never change while the process lives.
- A column with more than NUMBERS_MAX values so far, or more than NUMBERS_BYTES_MAX, is not grouped by number any more:
  the plain query serves it.
- Rows that do not exist or do not match may be given HIDDEN as their number: one group more, that is left out of the
  answer, costs less than taking one row in ten out of every column (half as much, over 2 M rows of two columns).
- The number of a row is `n0 + n1 * size0 + n2 * size0 * size1 ...`, sizes as they are when the query begins.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cremant.segment.codes import Codes
from cremant.segment.rows import RowMask
from cremant.segment.scan import Piece

#: Values of one column of a table: some ten MB as Python keys. Segments have up to CODES_MAX each.
NUMBERS_MAX = 128 * 1024
#: Their texts: 128 bytes each.
NUMBERS_BYTES_MAX = 16 * 1024 * 1024
#: The number of rows that are in no group of the answer.
HIDDEN = -1
#: What a 32-bit number holds.
_COMBINED_MAX = 2**31


class Dictionary:
    """The values of one column of a table, by number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[object, int] = {}
        self._values: list[object] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def numbers(self, codes: Codes) -> np.ndarray | None:
        """Number of each code of a segment; None if there are too many values."""
        known = codes.numbers.get(self)
        if known is None:
            with self._lock:
                known_before = len(self._values)
                if known_before + len(codes.values) > NUMBERS_MAX:
                    return None
                if self._bytes + codes.values.nbytes > NUMBERS_BYTES_MAX:
                    return None
                values = codes.values.to_pylist()
                for value in values:
                    if self._numbers.setdefault(value, len(self._values)) == len(self._values):
                        self._values.append(value)
                known = np.array([self._numbers[value] for value in values], np.int32)
                self._bytes += codes.values.nbytes * (len(self._values) - known_before) // max(1, len(values))
            codes.numbers[self] = known
        return known

    def values(self, numbers: np.ndarray, kind: pa.DataType) -> pa.Array:
        wanted = pa.array([self._values[number] for number in np.unique(numbers).tolist()])
        places = pa.array(np.searchsorted(np.unique(numbers), numbers))
        return wanted.take(places).cast(kind)


class KeySpace:
    """The dictionaries of one table, made as queries group by its columns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._columns: dict[str, Dictionary] = {}

    def column(self, name: str) -> Dictionary:
        with self._lock:
            return self._columns.setdefault(name, Dictionary())


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys of a query over some pieces."""

    columns: tuple[str, ...]
    dictionaries: tuple[Dictionary, ...]
    sizes: tuple[int, ...]

    @property
    def type(self) -> pa.DataType:
        return pa.int16() if math.prod(self.sizes) < 2**15 else pa.int32()

    def numbers(self, piece: Piece, batch: int, shown: RowMask | None = None) -> pa.Array:
        """The number of each row of a batch; HIDDEN of those that are not `shown` (None: all are)."""
        first, rows = piece.first_rows[batch], piece.batches[batch].num_rows
        found: np.ndarray | None = None
        step = 1
        for name, dictionary, size in zip(self.columns, self.dictionaries, self.sizes, strict=True):
            codes = piece.index.codes(name) if piece.index is not None else None
            assert codes is not None
            numbers = dictionary.numbers(codes)
            assert numbers is not None
            part = _numbered(codes.codes[first : first + rows], numbers, self.type.to_pandas_dtype())
            part *= step
            found = part if found is None else np.add(found, part, out=part)
            step *= size
        assert found is not None
        if shown is not None:
            # All bits set is HIDDEN: a seventh of the time of a masked assignment.
            np.bitwise_or(found, shown.flags.view(np.int8) - 1, out=found)
        return pa.array(found)

    def columns_of(self, combined: pa.Array, kinds: Sequence[pa.DataType]) -> list[pa.Array]:
        """The values of each key column, of combined numbers."""
        rest = combined.to_numpy().astype(np.int64)
        columns = []
        for dictionary, size, kind in zip(self.dictionaries, self.sizes, kinds, strict=True):
            columns.append(dictionary.values(rest % size, kind))
            rest //= size
        return columns


def _numbered(codes: np.ndarray, numbers: np.ndarray, kind: type[np.generic]) -> np.ndarray:
    """The numbers of codes. Most segments of a table have the same few values, and their codes are the numbers."""
    if len(numbers) and numbers[0] == 0 and numbers[-1] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return codes.astype(kind)
    return np.take(numbers.astype(kind), codes)


def row_keys(space: KeySpace, columns: Sequence[str], pieces: Sequence[Piece]) -> tuple[RowKeys | None, list[Piece]]:
    """The keys, and the pieces that have all columns coded. None if there are none."""
    dictionaries = tuple(space.column(name) for name in columns)
    coded = []
    for piece in pieces:
        codes = [piece.index.codes(name) for name in columns] if piece.index is not None else [None]
        if all(
            one is not None and dictionary.numbers(one) is not None
            for one, dictionary in zip(codes, dictionaries, strict=False)
        ):
            coded.append(piece)
    sizes = tuple(max(1, len(dictionary)) for dictionary in dictionaries)
    # In Python's integers: the product of many columns is no 64-bit number.
    if not coded or math.prod(sizes) >= _COMBINED_MAX:
        return None, []
    return RowKeys(tuple(columns), dictionaries, sizes), coded
