# SPDX-License-Identifier: Apache-2.0
"""Functions of multi-value columns. Pinot writes the element type into many names (`arraySortInt`); here any of the
spellings takes any element type. Positions count from 0, but for ARRAYELEMENTAT and `column[n]` (from 1)."""

from __future__ import annotations

from cremant.model.schema import DataType
from cremant.sql.bound import INTEGERS, NUMBERS, TEXTS, Bound, common_type, invalid, text_sql
from cremant.sql.ir import Literal
from cremant.sql.jsons import extract_scalar
from cremant.sql.scalar import (
    ARROW_NAMES,
    KERNEL_NAMES,
    Args,
    Bind,
    Scalar,
    element,
    literal_text,
    typed,
    whole,
    word,
)

_INT, _LONG, _DOUBLE, _STRING, _BOOLEAN = (
    DataType.INT, DataType.LONG, DataType.DOUBLE, DataType.STRING, DataType.BOOLEAN,
)  # fmt: skip
#: Elements of one GENERATE...ARRAY.
_SERIES_MAX = 1_000_000


def _list(bound: Bound, function: str, *, numbers: bool = False) -> DataType:
    """The type of the elements."""
    if not bound.multi or bound.type is None:
        raise invalid(f"{function} takes a multi-value column, found {bound.type}")
    if numbers and bound.type not in NUMBERS:
        raise invalid(f"{function} takes a multi-value column of numbers, found {bound.type}")
    return bound.type


def _value(bound: Bound, kind: DataType, function: str) -> str:
    if bound.multi or bound.literal is None:
        raise invalid(f"{function} takes a literal to look for")
    return typed(bound, kind)


def _length(args: Args) -> Bound:
    _list(args[0], "ARRAYLENGTH")
    return Bound(f"CAST(cardinality({args[0].sql}) AS INT)", _INT)


def _extreme(name: str) -> Bind:
    def bind(args: Args) -> Bound:
        return Bound(f"array_{name}({args[0].sql})", _ordered(args[0], f"ARRAY{name.upper()}"))

    return bind


def _ordered(bound: Bound, function: str) -> DataType:
    """The type of elements whose stored form has their order."""
    kind = _list(bound, function)
    if kind is DataType.BIG_DECIMAL:
        raise invalid(f"{function} of BIG_DECIMAL is not supported", hint="CAST it AS DOUBLE")
    return kind


def _sort(args: Args) -> Bound:
    return Bound(f"array_sort({args[0].sql})", _ordered(args[0], "ARRAYSORT"), multi=True)


def _total(template: str, function: str, kind: DataType) -> Bind:
    def bind(args: Args) -> Bound:
        _list(args[0], function, numbers=True)
        return Bound(template.format(args[0].sql), kind)

    return bind


def _same(template: str, function: str) -> Bind:
    """A list of the same elements."""

    def bind(args: Args) -> Bound:
        return Bound(template.format(args[0].sql), _list(args[0], function), multi=True)

    return bind


def _with_value(template: str, function: str, result: DataType | None) -> Bind:
    """A function of a list and a literal; `result` None: a list of the same elements."""

    def bind(args: Args) -> Bound:
        kind = _list(args[0], function)
        sql = template.format(args[0].sql, _value(args[1], kind, function))
        return Bound(sql, kind, multi=True) if result is None else Bound(sql, result)

    return bind


def _two(template: str, function: str) -> Bind:
    """Two lists of one element type."""

    def bind(args: Args) -> Bound:
        kind = _list(args[0], function)
        if _list(args[1], function) is not kind:
            raise invalid(f"{function} takes two multi-value columns of one type, found {kind} and {args[1].type}")
        # Nullable elements on both sides: DataFusion joins lists of the same type only.
        lists = (f"arrow_cast({arg.sql}, 'List({ARROW_NAMES[kind]})')" for arg in args)
        return Bound(template.format(*lists), kind, multi=True)

    return bind


def _overlap(args: Args) -> Bound:
    both = _two("array_has_any({0}, {1})", "ARRAYSOVERLAP")(args)
    return Bound(both.sql, _BOOLEAN)


def _indexes_of(args: Args) -> Bound:
    kind = _list(args[0], "ARRAYINDEXESOF")
    value = _value(args[1], kind, "ARRAYINDEXESOF")
    return Bound(f"fn_indexes_of_{KERNEL_NAMES[kind]}({args[0].sql}, {value})", _INT, multi=True)


def _slice(args: Args) -> Bound:
    """ARRAYSLICE(list, start, end): from 0, the end is exclusive."""
    kind, start, end = _list(args[0], "ARRAYSLICE"), whole(args[1], "ARRAYSLICE"), whole(args[2], "ARRAYSLICE")
    if start < 0 or end < start:
        raise invalid(f"ARRAYSLICE: range {start} to {end} is not valid")
    if start == end:
        return Bound(f"array_slice({args[0].sql}, 2, 1)", kind, multi=True)
    return Bound(f"array_slice({args[0].sql}, {start + 1}, {end})", kind, multi=True)


def _element_at(args: Args) -> Bound:
    kind, at = _list(args[0], "ARRAYELEMENTAT"), whole(args[1], "ARRAYELEMENTAT")
    if at < 1:
        return Bound("NULL", None)
    return Bound(f"array_element({args[0].sql}, {at})", kind)


def _item(args: Args) -> Bound:
    """`column['key']` of a JSON column, `column[n]` of a multi-value one."""
    if args[0].multi:
        return _element_at(args)
    if args[0].type not in TEXTS:
        raise invalid(f"[...] takes a JSON or a multi-value column, found {args[0].type}")
    key = word(args[1], "the key in [...]").replace("\\", "\\\\").replace("'", "\\'")
    path = f"$['{key}']"
    string = Bound(text_sql("STRING"), _STRING, literal=_text("STRING"))
    return extract_scalar([args[0], Bound(text_sql(path), _STRING, literal=_text(path)), string], strict=False)


def _text(value: str) -> Literal:
    return Literal(value, value)


def _value_in(args: Args) -> Bound:
    """VALUEIN(column, v...): the elements that are among the values."""
    kind = _list(args[0], "VALUEIN")
    values = ", ".join(_value(arg, kind, "VALUEIN") for arg in args[1:])
    return Bound(f"fn_value_in_{KERNEL_NAMES[kind]}({args[0].sql}, make_array({values}))", kind, multi=True)


def _map_value(args: Args) -> Bound:
    """MAPVALUE(keys, key, values): the value at the place where the key stands."""
    kind = _list(args[0], "MAPVALUE")
    key = _value(args[1], kind, "MAPVALUE")
    place = f"CAST(array_position({args[0].sql}, {key}) AS BIGINT)"
    return Bound(f"array_element({args[2].sql}, {place})", _list(args[2], "MAPVALUE"))


def _make(args: Args) -> Bound:
    """ARRAY[v...]: literals and single-value expressions of one type."""
    kind = common_type(arg.type for arg in args)
    if kind is None or any(arg.multi or arg.type is None for arg in args):
        raise invalid("ARRAY takes single values that are not NULL")
    items = [typed(arg, kind) for arg in args]
    if kind in TEXTS:
        items = [f"arrow_cast({item}, 'Utf8')" for item in items]
    return Bound(f"make_array({', '.join(items)})", kind, multi=True)


def _series(kind: DataType) -> Bind:
    def bind(args: Args) -> Bound:
        numbers = [arg.literal.value if arg.literal is not None else None for arg in args]
        start, end, step = (
            value if isinstance(value, int | float) and not isinstance(value, bool) else None for value in numbers
        )
        if start is None or end is None or step is None or step == 0:
            raise invalid(f"GENERATE{kind}ARRAY takes numbers: start, end, step; the step is not 0")
        if (end - start) / step > _SERIES_MAX:
            raise invalid(f"GENERATE{kind}ARRAY makes at most {_SERIES_MAX} elements")
        items = ", ".join(element(int(v) if kind in INTEGERS else float(v), kind) for v in (start, end, step))
        return Bound(f"fn_series_{KERNEL_NAMES[kind]}({items})", kind, multi=True)

    return bind


def _to_string(args: Args) -> Bound:
    """ARRAYTOSTRING(list, separator[, text for missing elements])."""
    kind = _list(args[0], "ARRAYTOSTRING")
    if kind not in TEXTS:
        raise invalid(f"ARRAYTOSTRING takes a multi-value STRING, found {kind}")
    separator = literal_text(args[1], "the separator of ARRAYTOSTRING")
    instead = literal_text(args[2], "the text for missing elements of ARRAYTOSTRING") if len(args) > 2 else "NULL"
    return Bound(f"fn_join({args[0].sql}, {separator}, {instead})", _STRING)


ARRAYS: tuple[Scalar, ...] = (
    Scalar(("arraylength", "cardinality"), (1, 1), _length),
    Scalar(("arraymin",), (1, 1), _extreme("min")),
    Scalar(("arraymax",), (1, 1), _extreme("max")),
    Scalar(("arraysum",), (1, 1), _total("CAST(array_sum({0}) AS DOUBLE)", "ARRAYSUM", _DOUBLE)),
    Scalar(("arraysumint",), (1, 1), _total("fn_to_int(CAST(array_sum({0}) AS DOUBLE))", "ARRAYSUMINT", _INT)),
    Scalar(("arraysumlong",), (1, 1), _total("fn_to_long(CAST(array_sum({0}) AS DOUBLE))", "ARRAYSUMLONG", _LONG)),
    Scalar(("arrayaverage", "arrayavg"), (1, 1), _total("CAST(array_avg({0}) AS DOUBLE)", "ARRAYAVERAGE", _DOUBLE)),
    Scalar(("arrayreverse",), (1, 1), _same("array_reverse({0})", "ARRAYREVERSE"), typed=True),
    Scalar(("arraysort",), (1, 1), _sort, typed=True),
    Scalar(("arraydistinct",), (1, 1), _same("array_distinct({0})", "ARRAYDISTINCT"), typed=True),
    Scalar(
        ("arrayindexof",),
        (2, 2),
        _with_value("CAST(COALESCE(array_position({0}, {1}), 0) AS INT) - 1", "ARRAYINDEXOF", _INT),
        typed=True,
    ),
    Scalar(("arrayindexesof",), (2, 2), _indexes_of, typed=True),
    Scalar(("arraycontains",), (2, 2), _with_value("array_has({0}, {1})", "ARRAYCONTAINS", _BOOLEAN), typed=True),
    Scalar(("arrayremove",), (2, 2), _with_value("array_remove({0}, {1})", "ARRAYREMOVE", None), typed=True),
    Scalar(("arraypushback",), (2, 2), _with_value("array_append({0}, {1})", "ARRAYPUSHBACK", None), typed=True),
    Scalar(("arraypushfront",), (2, 2), _with_value("array_prepend({1}, {0})", "ARRAYPUSHFRONT", None), typed=True),
    Scalar(("arrayslice",), (3, 3), _slice, typed=True),
    Scalar(("arrayconcat",), (2, 2), _two("array_concat({0}, {1})", "ARRAYCONCAT"), typed=True),
    Scalar(("arrayunion",), (2, 2), _two("array_distinct(array_concat({0}, {1}))", "ARRAYUNION"), typed=True),
    Scalar(("arraysoverlap",), (2, 2), _overlap),
    Scalar(("arrayelementat",), (2, 2), _element_at, may_be_null=True, typed=True),
    Scalar(("item",), (2, 2), _item, may_be_null=True),
    Scalar(("valuein",), (2, 1000), _value_in),
    Scalar(("mapvalue",), (3, 3), _map_value, may_be_null=True),
    Scalar(("array", "arrayvalueconstructor"), (1, 1000), _make),
    *(
        Scalar((f"generate{kind}array".lower(),), (3, 3), _series(kind))
        for kind in (_INT, _LONG, DataType.FLOAT, _DOUBLE)
    ),
    Scalar(("arraytostring",), (2, 3), _to_string),
)
