# SPDX-License-Identifier: Apache-2.0
"""An inverted and range index in one: row numbers in the order of a column's values, searched by halving.

Four bytes per row; finding a value takes about twenty looks at the column. The same file answers equality, lists and
ranges, so `invertedIndexColumns` and `rangeIndexColumns` mean the same for a column that is not coded.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


class Ordered(Sequence[Any]):
    """The values of a column in the order of its index. `firsts`: first row number of each batch."""

    def __init__(self, columns: Sequence[pa.Array], firsts: Sequence[int], order: np.ndarray) -> None:
        self._columns = columns
        self._firsts = firsts
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, at: Any) -> Any:
        row = int(self._order[at])
        batch = bisect.bisect_right(self._firsts, row) - 1
        return self._columns[batch][row - self._firsts[batch]].as_py()
