# SPDX-License-Identifier: Apache-2.0
"""What kernels of scalar functions share: one call per distinct value, arguments that are literals, a bound on output.

Rules: NULL in gives NULL out, unless a kernel says otherwise. A kernel whose answer may be much larger than its
arguments asks `check_bytes` first: DataFusion's memory pool does not see what a kernel makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datafusion import ScalarUDF, udf

from cremant.exec.functions import Factory
from cremant.model.limits import KERNEL_BYTES_MAX

Compute = Callable[..., pa.Array]


def scalar(name: str, compute: Compute, takes: Sequence[pa.DataType], gives: pa.DataType) -> tuple[str, Factory]:
    """A row of a module's table FUNCTIONS. `compute` never sees empty arrays: their literals have no value."""

    def nonempty(*arrays: pa.Array) -> pa.Array:
        return compute(*arrays) if len(arrays[0]) else pa.array([], gives)

    def make() -> ScalarUDF:
        return udf(nonempty, list(takes), gives, "immutable", name)

    return name, make


def by_distinct(one: Callable[[Any], Any], array: pa.Array, kind: pa.DataType) -> pa.Array:
    """`one` of each distinct value, computed once. `one` never sees NULL."""
    if pa.types.is_binary_view(array.type):
        array = array.cast(pa.binary())
    encoded = array.dictionary_encode()
    results = [None if value is None else one(value) for value in encoded.dictionary.to_pylist()]
    if pa.types.is_binary_view(kind):  # Arrow's `take` knows no views
        return pa.array(results, pa.binary()).take(encoded.indices).cast(kind)
    return pa.array(results, kind).take(encoded.indices)


def by_pair(one: Callable[[Any, Any], Any], left: pa.Array, right: pa.Array, kind: pa.DataType) -> pa.Array:
    """`one` of two columns, computed once for each distinct pair. It never sees NULL."""
    first, second = left.dictionary_encode(), right.dictionary_encode()
    width = max(1, len(second.dictionary))
    codes = pc.add(pc.multiply(first.indices.cast(pa.int64()), width), second.indices.cast(pa.int64()))
    lefts, rights = first.dictionary.to_pylist(), second.dictionary.to_pylist()
    return by_distinct(lambda code: one(lefts[code // width], rights[code % width]), codes, kind)


def constant(array: pa.Array) -> Any:
    """The value of an argument that is a literal."""
    return array[0].as_py() if len(array) else None


def check_bytes(size: float) -> None:
    """Raises ValueError for an answer that would be too large."""
    if size > KERNEL_BYTES_MAX:
        raise ValueError(
            f"a function would make {int(size)} bytes of text from one batch, at most {KERNEL_BYTES_MAX} are allowed"
        )


def bytes_of(array: pa.Array) -> int:
    """Bytes of the values of a text array."""
    total: int = array.get_total_buffer_size()
    return total
