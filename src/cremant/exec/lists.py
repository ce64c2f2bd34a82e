# SPDX-License-Identifier: Apache-2.0
"""Arrow lists: tests of elements carried back to the lists they are in."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def _counts(lists: pa.Array, holds: pa.Array) -> np.ndarray:
    """Running count of elements that hold, at every offset of `lists`. `holds`: one per element of `lists.values`."""
    flags = pc.fill_null(holds, False).to_numpy(zero_copy_only=False)
    running = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    counts: np.ndarray = running[lists.offsets.to_numpy()]
    return counts


def any_of(lists: pa.Array, holds: pa.Array) -> pa.Array:
    """Whether any element of each list holds; NULL for a NULL list."""
    counts = _counts(lists, holds)
    found = pa.array(counts[1:] > counts[:-1])
    return found if not lists.null_count else pc.if_else(lists.is_valid(), found, pa.scalar(None, pa.bool_()))


def kept(lists: pa.Array, holds: pa.Array) -> pa.Array:
    """The lists without elements that do not hold."""
    first, last = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    inside = pc.fill_null(holds, False).slice(first, last - first)
    values = lists.values.slice(first, last - first).filter(inside)
    counts = _counts(lists, holds)
    offsets = pa.array((counts - counts[0]).astype(np.int32))
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(offsets, values, mask=mask)
