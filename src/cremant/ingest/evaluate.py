# SPDX-License-Identifier: Apache-2.0
"""Typed columns that expressions are computed on, and how a function says what it needs.

Five kinds of value: LONG (also timestamps, in epoch ms), DOUBLE, STRING, BOOLEAN, BYTES; and lists of them. A function
declares the kind of each parameter; arguments are converted by the ingest rules (`cremant.ingest.coerce`). Null in
gives null out, except for the functions that are about nulls. Where an argument is not null but nothing can be
computed, the row is *failed*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cremant.ingest.coerce_columns import convert_column
from cremant.model.errors import InvalidConfig
from cremant.model.schema import DataType


class Kind(Enum):
    LONG = DataType.LONG
    DOUBLE = DataType.DOUBLE
    STRING = DataType.STRING
    BOOLEAN = DataType.BOOLEAN
    BYTES = DataType.BYTES

    @property
    def arrow(self) -> pa.DataType:
        return _ARROW[self]


_ARROW = {
    Kind.LONG: pa.int64(), Kind.DOUBLE: pa.float64(), Kind.STRING: pa.string(), Kind.BOOLEAN: pa.bool_(),
    Kind.BYTES: pa.binary(),
}  # fmt: skip


class Value(NamedTuple):
    """One column of results. `failed`: bool mask of rows that could not be computed, None = no row."""

    array: pa.Array
    failed: np.ndarray | None = None


def either(*masks: np.ndarray | None) -> np.ndarray | None:
    """The rows that are in any of the masks."""
    found = [mask for mask in masks if mask is not None]
    if not found:
        return None
    return np.asarray(np.any(np.stack(found), axis=0))


def to_kind(value: Value, kind: Kind) -> Value:
    if value.array.type == kind.arrow:
        return value
    if pa.types.is_null(value.array.type):
        return Value(value.array.cast(kind.arrow), value.failed)
    converted = convert_column(value.array, kind.value)
    return Value(converted.array, either(value.failed, converted.failed))


def truth(array: pa.Array) -> np.ndarray:
    """A boolean column as a mask; null is false."""
    return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False))


def constant(value: Any, kind: Kind, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind.arrow), count)


#: What a function does with its converted arguments.
Body = Callable[[list[Value], int], Value]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the language.

    `params`: kind of each argument; the last one repeats if there are more; None = any kind. `least`, `most`: how many
    arguments. `literals`: indexes of arguments that must be literals; `make` gets their values by index. `result`: the
    kind it gives, or how the literals decide it, or None = the kind that `unify` finds for its arguments. `arrays`:
    indexes of arguments that are lists; `many`: so is the result.
    """

    name: str
    params: tuple[Kind | None, ...]
    result: Kind | Callable[[dict[int, Any], str], Kind] | None
    make: Callable[[dict[int, Any], str], Body]
    least: int
    most: int
    literals: tuple[int, ...] = ()
    arrays: tuple[int, ...] = ()
    many: bool = False

    def param(self, at: int) -> Kind | None:
        return self.params[min(at, len(self.params) - 1)] if self.params else None


def unify(kinds: Sequence[Kind | None]) -> Kind:
    """The kind in which values of several kinds meet: text with text, booleans with booleans, bytes with bytes (as hex
    with anything else), else numbers."""
    known = {kind for kind in kinds if kind is not None}
    if Kind.BYTES in known:
        return Kind.BYTES if known == {Kind.BYTES} else Kind.STRING
    if not known or known == {Kind.STRING}:
        return Kind.STRING
    if known == {Kind.BOOLEAN} or known == {Kind.BOOLEAN, Kind.STRING}:
        return Kind.BOOLEAN
    return Kind.LONG if known == {Kind.LONG} else Kind.DOUBLE


def literal_text(literals: dict[int, Any], at: int, where: str, default: str | None = None) -> str:
    value = literals.get(at, default)
    if not isinstance(value, str):
        raise InvalidConfig(f"{where}: argument {at + 1} must be text, found {value!r}")
    return value


def literal_number(literals: dict[int, Any], at: int, where: str, default: int | None = None) -> int:
    value = literals.get(at, default)
    if isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidConfig(f"{where}: argument {at + 1} must be an integer, found {value!r}")
    return value


def by_value(function: Callable[[Any], Any], array: pa.Array, kind: Kind) -> Value:
    """`function` for each distinct value; ValueError or OverflowError fails the rows that have it."""
    encoded = array.dictionary_encode()
    results = []
    bad = []
    for at, item in enumerate(encoded.dictionary.to_pylist()):
        try:
            results.append(function(item))
        except (ValueError, OverflowError):
            results.append(None)
            bad.append(at)
    taken = pa.array(results, kind.arrow).take(encoded.indices)
    if not bad:
        return Value(taken)
    return Value(taken, truth(pa.compute.is_in(encoded.indices, value_set=pa.array(bad, pa.int32()))))
