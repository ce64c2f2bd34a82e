# SPDX-License-Identifier: Apache-2.0
"""The functions of the expression language: arithmetic, text, logic. Times and JSON: the sibling modules.

Integers stay integers under plus, minus, times, mod (Pinot computes doubles and cuts them, which is the same below
2^53); divide is always a double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cremant.ingest.evaluate import (
    Body,
    Function,
    Kind,
    Value,
    constant,
    either,
    literal_number,
    literal_text,
    to_kind,
    truth,
    unify,
)
from cremant.model.errors import InvalidConfig

_LONG_LIMIT = float(2**63)


def strict(compute: Callable[..., pa.Array]) -> Callable[[dict[int, Any], str], Body]:
    """A function that computes columns from columns and cannot fail."""

    def make(literals: dict[int, Any], where: str) -> Body:
        def body(args: list[Value], count: int) -> Value:
            return Value(compute(*(arg.array for arg in args)), either(*(arg.failed for arg in args)))

        return body

    return make


def _arithmetic(name: str) -> Callable[[dict[int, Any], str], Body]:
    operations = {"plus": pc.add, "minus": pc.subtract, "times": pc.multiply}

    def make(literals: dict[int, Any], where: str) -> Body:
        def body(args: list[Value], count: int) -> Value:
            kind = Kind.LONG if all(pa.types.is_integer(arg.array.type) for arg in args) else Kind.DOUBLE
            values = [to_kind(arg, kind) for arg in args]
            failed = either(*(value.failed for value in values))
            total = values[0].array
            for value in values[1:]:
                if kind is Kind.LONG:
                    exact = operations[name](
                        total.cast(pa.float64(), safe=False), value.array.cast(pa.float64(), safe=False)
                    )
                    over = pc.greater_equal(pc.abs(exact), _LONG_LIMIT)
                    failed = either(failed, truth(over) if pc.any(over).as_py() else None)
                total = operations[name](total, value.array)
            return Value(total, failed)

        return body

    return make


def _mod(left: pa.Array, right: pa.Array) -> pa.Array:
    """Sign of the dividend, as in Java; 0 as divisor gives NaN."""
    if pa.types.is_integer(left.type) and pa.types.is_integer(right.type):
        some = pc.if_else(pc.equal(right, 0), None, right)
        return pc.subtract(left, pc.multiply(pc.divide(left, some), some))
    one, other = left.cast(pa.float64(), safe=False), right.cast(pa.float64(), safe=False)
    with np.errstate(all="ignore"):
        result = np.fmod(pc.fill_null(one, 0.0).to_numpy(), pc.fill_null(other, 0.0).to_numpy())
    return pc.if_else(pc.and_(one.is_valid(), other.is_valid()), pa.array(result), None)


def _compare(name: str) -> Callable[[dict[int, Any], str], Body]:
    operation: Callable[[pa.Array, pa.Array], pa.Array] = getattr(pc, name)

    def make(literals: dict[int, Any], where: str) -> Body:
        def body(args: list[Value], count: int) -> Value:
            left, right = same_kind(args)
            return Value(operation(left.array, right.array), either(left.failed, right.failed))

        return body

    return make


def kind_of(array: pa.Array) -> Kind | None:
    if pa.types.is_null(array.type):
        return None
    if pa.types.is_binary(array.type):
        return Kind.BYTES
    if pa.types.is_boolean(array.type):
        return Kind.BOOLEAN
    if pa.types.is_integer(array.type):
        return Kind.LONG
    return Kind.DOUBLE if pa.types.is_floating(array.type) or pa.types.is_decimal(array.type) else Kind.STRING


def same_kind(args: Sequence[Value]) -> list[Value]:
    kind = unify([kind_of(arg.array) for arg in args])
    return [to_kind(arg, kind) for arg in args]


def _between(args: list[Value], count: int) -> Value:
    value, low, high = same_kind(args)
    inside = pc.and_(pc.greater_equal(value.array, low.array), pc.less_equal(value.array, high.array))
    return Value(inside, either(*(arg.failed for arg in (value, low, high))))


def _is_in(args: list[Value], count: int) -> Value:
    value, *others = same_kind(args)
    found = constant(False, Kind.BOOLEAN, count)
    for other in others:
        found = pc.or_kleene(found, pc.equal(value.array, other.array))
    return Value(found, either(*(arg.failed for arg in (value, *others))))


def _and(args: list[Value], count: int) -> Value:
    """A false side decides, also over a failed one."""
    total = args[0].array
    false = ~truth(pc.fill_null(args[0].array, True)) & _fine(args[0], count)
    for arg in args[1:]:
        total = pc.and_kleene(total, arg.array)
        false |= ~truth(pc.fill_null(arg.array, True)) & _fine(arg, count)
    failed = either(*(arg.failed for arg in args))
    if failed is None:
        return Value(total)
    return Value(pc.if_else(pa.array(false), False, total), failed & ~false)


def _or(args: list[Value], count: int) -> Value:
    """A true side decides, also over a failed one."""
    total = args[0].array
    true = truth(args[0].array) & _fine(args[0], count)
    for arg in args[1:]:
        total = pc.or_kleene(total, arg.array)
        true |= truth(arg.array) & _fine(arg, count)
    failed = either(*(arg.failed for arg in args))
    if failed is None:
        return Value(total)
    return Value(pc.if_else(pa.array(true), True, total), failed & ~true)


def _fine(arg: Value, count: int) -> np.ndarray:
    return np.ones(count, dtype=bool) if arg.failed is None else ~arg.failed


def _coalesce(args: list[Value], count: int) -> Value:
    values = same_kind(args)
    result = values[0].array
    failed = np.zeros(count, dtype=bool)
    open_rows = np.ones(count, dtype=bool)
    for value in values:
        result = pc.coalesce(result, value.array)
        if value.failed is not None:
            failed |= value.failed & open_rows
        open_rows &= ~truth(value.array.is_valid())
    return Value(result, failed if failed.any() else None)


def _case(args: list[Value], count: int) -> Value:
    """case(condition, value, ..., otherwise): only the branch that is taken can fail."""
    conditions = [to_kind(arg, Kind.BOOLEAN) for arg in args[:-1:2]]
    values = same_kind([*args[1::2], args[-1]])
    result = values[-1].array
    failed = np.zeros(count, dtype=bool) if values[-1].failed is None else values[-1].failed.copy()
    for condition, value in zip(reversed(conditions), reversed(values[:-1]), strict=True):
        taken = truth(condition.array)
        result = pc.if_else(pa.array(taken), value.array, result)
        failed = np.where(taken, False if value.failed is None else value.failed, failed)
        if condition.failed is not None:
            failed = failed | condition.failed
    return Value(result, failed if failed.any() else None)


def _null_if(args: list[Value], count: int) -> Value:
    value, other = same_kind(args)
    equal = pc.fill_null(pc.equal(value.array, other.array), False)
    return Value(pc.if_else(equal, None, value.array), either(value.failed, other.failed))


def _nullness(wanted: bool) -> Callable[[dict[int, Any], str], Body]:
    def make(literals: dict[int, Any], where: str) -> Body:
        def body(args: list[Value], count: int) -> Value:
            array = args[0].array
            return Value(array.is_null() if wanted else array.is_valid(), args[0].failed)

        return body

    return make


def _body(body: Body) -> Callable[[dict[int, Any], str], Body]:
    return lambda literals, where: body


def _concat(args: list[Value], count: int) -> Value:
    """concat(a, b) or concat(a, b, separator)."""
    texts = [arg.array for arg in args]
    if len(texts) == 3:
        joined = pc.binary_join_element_wise(texts[0], texts[1], texts[2])
    else:
        joined = pc.binary_join_element_wise(*texts, "")
    return Value(joined, either(*(arg.failed for arg in args)))


def _substr(literals: dict[int, Any], where: str) -> Body:
    """0-based, end exclusive; end -1 or absent: up to the end."""
    start = literal_number(literals, 1, where)
    end = literal_number(literals, 2, where, -1)
    if start < 0:
        raise InvalidConfig(f"{where}: substr starts at 0 or later, found {start}")
    stop = None if end == -1 else max(end, start)

    def body(args: list[Value], count: int) -> Value:
        return Value(pc.utf8_slice_codeunits(args[0].array, start, stop), args[0].failed)

    return body


def _replace(literals: dict[int, Any], where: str) -> Body:
    old, new = literal_text(literals, 1, where), literal_text(literals, 2, where)

    def body(args: list[Value], count: int) -> Value:
        return Value(pc.replace_substring(args[0].array, old, new), args[0].failed)

    return body


def _pattern(
    compute: Callable[[pa.Array, str], pa.Array], *, is_regex: bool = False
) -> Callable[[dict[int, Any], str], Body]:
    def make(literals: dict[int, Any], where: str) -> Body:
        pattern = literal_text(literals, 1, where)
        try:
            compute(pa.array([""]), pattern)
        except pa.ArrowInvalid as error:
            raise InvalidConfig(f"{where}: pattern {pattern!r}: {error}") from error

        def body(args: list[Value], count: int) -> Value:
            return Value(compute(args[0].array, pattern), args[0].failed)

        return body

    return make


_CAST_KINDS = {
    "INT": Kind.LONG, "INTEGER": Kind.LONG, "LONG": Kind.LONG, "BIGINT": Kind.LONG, "TIMESTAMP": Kind.LONG,
    "FLOAT": Kind.DOUBLE, "DOUBLE": Kind.DOUBLE, "BOOLEAN": Kind.BOOLEAN, "STRING": Kind.STRING,
    "VARCHAR": Kind.STRING, "JSON": Kind.STRING, "BYTES": Kind.BYTES, "VARBINARY": Kind.BYTES,
}  # fmt: skip


def cast_kind(name: Any, where: str) -> Kind:
    """The kind that CAST(x AS name) gives. Raises InvalidConfig."""
    kind = _CAST_KINDS.get(str(name).upper())
    if kind is None:
        raise InvalidConfig(f"{where}: cannot cast to {name!r}", hint=f"one of {', '.join(_CAST_KINDS)}")
    return kind


def _cast(literals: dict[int, Any], where: str) -> Body:
    kind = cast_kind(literals[1], where)
    return lambda args, count: to_kind(args[0], kind)


def _round(array: pa.Array) -> pa.Array:
    return pc.floor(pc.add(array, 0.5))


def function(
    name: str,
    params: tuple[Kind | None, ...],
    result: Kind | Callable[[dict[int, Any], str], Kind] | None,
    make: Callable[[dict[int, Any], str], Body],
    least: int | None = None,
    most: int | None = None,
    literals: tuple[int, ...] = (),
    arrays: tuple[int, ...] = (),
    many: bool = False,
) -> Function:
    count = len(params)
    return Function(
        name, params, result, make, count if least is None else least, most or count, literals, arrays, many
    )  # fmt: skip


_L, _D, _S, _B, _ANY = Kind.LONG, Kind.DOUBLE, Kind.STRING, Kind.BOOLEAN, None
_MANY = 100

GENERAL: tuple[Function, ...] = (
    *(function(name, (_ANY,), None, _arithmetic(name), 2, _MANY) for name in ("plus", "times")),
    function("minus", (_ANY, _ANY), None, _arithmetic("minus")),
    function("divide", (_D, _D), _D, strict(pc.divide)),
    function("mod", (_ANY, _ANY), None, strict(_mod)),
    *(function(name, (_D,), _D, strict(compute)) for name, compute in (
        ("abs", pc.abs), ("ceil", pc.ceil), ("floor", pc.floor), ("sqrt", pc.sqrt), ("exp", pc.exp), ("ln", pc.ln),
        ("log10", pc.log10), ("log2", pc.log2), ("sign", pc.sign),
    )),
    function("power", (_D, _D), _D, strict(pc.power)),
    function("least", (_D,), _D, strict(lambda *items: pc.min_element_wise(*items, skip_nulls=False)), 2, _MANY),
    function("greatest", (_D,), _D, strict(lambda *items: pc.max_element_wise(*items, skip_nulls=False)), 2, _MANY),
    function("rounddecimal", (_D,), _D, strict(_round)),
    *(function(name, (_ANY, _ANY), _B, _compare(operation)) for name, operation in (
        ("equals", "equal"), ("notequals", "not_equal"), ("lessthan", "less"), ("lessthanorequal", "less_equal"),
        ("greaterthan", "greater"), ("greaterthanorequal", "greater_equal"),
    )),
    function("between", (_ANY, _ANY, _ANY), _B, _body(_between)),
    function("in", (_ANY,), _B, _body(_is_in), 2, 1000),
    function("and", (_B,), _B, _body(_and), 2, _MANY),
    function("or", (_B,), _B, _body(_or), 2, _MANY),
    function("not", (_B,), _B, strict(pc.invert)),
    function("isnull", (_ANY,), _B, _nullness(True)),
    function("isnotnull", (_ANY,), _B, _nullness(False)),
    function("coalesce", (_ANY,), None, _body(_coalesce), 1, _MANY),
    function("nullif", (_ANY, _ANY), None, _body(_null_if)),
    function("cast", (_ANY, _S), lambda literals, where: cast_kind(literals[1], where), _cast, literals=(1,)),
    function("case", (_ANY,), None, _body(_case), 3, 201),
    function("lower", (_S,), _S, strict(pc.utf8_lower)),
    function("upper", (_S,), _S, strict(pc.utf8_upper)),
    function("trim", (_S,), _S, strict(pc.utf8_trim_whitespace)),
    function("ltrim", (_S,), _S, strict(pc.utf8_ltrim_whitespace)),
    function("rtrim", (_S,), _S, strict(pc.utf8_rtrim_whitespace)),
    function("reverse", (_S,), _S, strict(pc.utf8_reverse)),
    function("length", (_S,), _L, strict(lambda text: pc.utf8_length(text).cast(pa.int64()))),
    function("concat", (_S,), _S, _body(_concat), 2, 3),
    function("substr", (_S, _L, _L), _S, _substr, 2, 3, (1, 2)),
    function("replace", (_S, _S, _S), _S, _replace, literals=(1, 2)),
    function("startswith", (_S, _S), _B, _pattern(pc.starts_with), literals=(1,)),
    function("endswith", (_S, _S), _B, _pattern(pc.ends_with), literals=(1,)),
    function("contains", (_S, _S), _B, _pattern(pc.match_substring), literals=(1,)),
    function("like", (_S, _S), _B, _pattern(pc.match_like), literals=(1,)),
    function("regexplike", (_S, _S), _B, _pattern(pc.match_substring_regex), literals=(1,)),
)  # fmt: skip

ALIASES: dict[str, str] = {
    "add": "plus", "sub": "minus", "mult": "times", "div": "divide", "ceiling": "ceil", "pow": "power",
    "substring": "substr", "nvl": "coalesce", "ifnull": "coalesce", "casewhen": "case", "strlen": "length",
    "equal": "equals", "notequal": "notequals", "ne": "notequals", "eq": "equals",
}  # fmt: skip
