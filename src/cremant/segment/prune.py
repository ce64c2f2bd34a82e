# SPDX-License-Identifier: Apache-2.0
"""Which rows need not be scanned: a term of the filter against the smallest and largest value of a column.

Rule: drop only when no value in [min, max] can satisfy the term *as the engine compares*. Where the engine may round
(integers beyond 2^53 against floats, FLOAT columns against doubles) the comparison is made both ways; where the types
do not compare, nothing is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from cremant.wire.messages import PruneTerm

Range = tuple[Any, Any]

_EXACT_INT_MAX = 2**53


def may_match(terms: Sequence[PruneTerm], range_of: Callable[[str], Range | None], single: frozenset[str]) -> bool:
    """False only if no row can satisfy all terms. `single`: columns of type FLOAT."""
    for term in terms:
        known = range_of(term.column)
        if known is not None and not _term_may_match(term, known, term.column in single):
            return False
    return True


def _term_may_match(term: PruneTerm, known: Range, single: bool) -> bool:
    if not term.values:
        return True
    test = _TESTS.get(term.op)
    if test is None:
        return True
    candidates = [value for wanted in term.values for value in _forms(wanted, single)]
    if not all(_comparable(value, bound) for value in candidates for bound in known):
        return True
    low, high = known
    return any(test(low, high, value) or _test_as_float(test, low, high, value) for value in candidates)


def _forms(wanted: Any, single: bool) -> list[Any]:
    if single and isinstance(wanted, int | float) and not isinstance(wanted, bool):
        try:
            return [wanted, struct.unpack("f", struct.pack("f", wanted))[0]]
        except OverflowError:
            return [wanted, float("inf") if wanted > 0 else float("-inf")]
    return [wanted]


def _test_as_float(test: Callable[[Any, Any, Any], bool], low: Any, high: Any, value: Any) -> bool:
    """The same test after the rounding that an engine does when it compares integers with floats."""
    mixed = {type(low), type(high), type(value)} == {int, float}
    if not mixed or all(abs(number) <= _EXACT_INT_MAX for number in (low, high, value)):
        return False
    return test(float(low), float(high), float(value))


def _comparable(value: Any, bound: Any) -> bool:
    if isinstance(value, bool) or isinstance(bound, bool):
        return isinstance(value, bool) and isinstance(bound, bool)
    if isinstance(value, float) and value != value:
        return False
    numbers = isinstance(value, int | float) and isinstance(bound, int | float)
    return numbers or (isinstance(value, str) and isinstance(bound, str))


def _inside(low: Any, high: Any, value: Any) -> bool:
    return bool(low <= value <= high)


_TESTS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "=": _inside,
    "in": _inside,
    "<": lambda low, high, value: bool(low < value),
    "<=": lambda low, high, value: bool(low <= value),
    ">": lambda low, high, value: bool(high > value),
    ">=": lambda low, high, value: bool(high >= value),
}
