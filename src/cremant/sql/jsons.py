# SPDX-License-Identifier: Apache-2.0
"""JSON functions. Paths and types are literals, checked when the query is planned."""

from __future__ import annotations

from cremant.model.errors import QueryError
from cremant.model.jsonpath import parse_path
from cremant.model.schema import DataType
from cremant.sql.bound import TEXTS, Bound, invalid, text_sql
from cremant.sql.dialect import parse_condition
from cremant.sql.ir import Expr, Literal
from cremant.sql.lower import lower_condition
from cremant.sql.normalize import check_expressions
from cremant.sql.scalar import KERNEL_NAMES, Args, Bind, Scalar, is_null_literal, text_arg, typed, word

_STRING = DataType.STRING
_TYPES = {
    "INT": DataType.INT, "INTEGER": DataType.INT, "LONG": DataType.LONG, "BIGINT": DataType.LONG,
    "FLOAT": DataType.FLOAT, "DOUBLE": DataType.DOUBLE, "BOOLEAN": DataType.BOOLEAN,
    "TIMESTAMP": DataType.TIMESTAMP, "STRING": _STRING, "VARCHAR": _STRING, "JSON": DataType.JSON,
    "BIG_DECIMAL": DataType.BIG_DECIMAL,
}  # fmt: skip


def _document(bound: Bound, function: str) -> str:
    if bound.multi or (bound.type not in TEXTS and bound.type is not None):
        raise invalid(f"{function} takes a JSON or STRING column, found {bound.type}")
    return text_arg(bound, function)


def _path(bound: Bound, function: str) -> str:
    text = word(bound, f"the path of {function}")
    try:
        parse_path(text)
    except ValueError as error:
        raise invalid(f"{function}: {error}", hint="for example '$.a.b[0]' or '$.a[*].b'") from error
    return text_sql(text)


def extract_scalar(args: Args, *, strict: bool) -> Bound:
    """JSONEXTRACTSCALAR(json, path, type[, default]). `strict`: what is not found and has no default is an error."""
    document = _document(args[0], "JSONEXTRACTSCALAR")
    name = word(args[2], "the type of JSONEXTRACTSCALAR").upper()
    multi = name.endswith("_ARRAY")
    kind = _TYPES.get(name.removesuffix("_ARRAY"))
    if kind is None or (multi and kind is DataType.JSON):
        raise invalid(
            f"JSONEXTRACTSCALAR: unknown type {name}", hint=f"{', '.join(_TYPES)}, or one of them with _ARRAY"
        )
    path = _path(args[1], "JSONEXTRACTSCALAR")
    kernel = KERNEL_NAMES[kind]
    if multi:
        return Bound(f"fn_json_{kernel}_list({document}, {path})", kind, multi=True)
    default = typed(args[3], kind) if len(args) > 3 else "NULL"
    must = "TRUE" if strict and len(args) < 4 else "FALSE"
    shown = _STRING if kind is DataType.JSON else kind
    return Bound(f"fn_json_{kernel}({document}, {path}, {default}, {must})", shown)


def _typed_path(kind: DataType, missing: str) -> Bind:
    """JSONPATHLONG(json, path[, default]) and its like; `missing`: SQL of Pinot's default."""

    def bind(args: Args) -> Bound:
        name = f"JSONPATH{kind}"
        given = len(args) > 2 and not is_null_literal(args[2])
        default = typed(args[2], kind) if given else missing
        return Bound(
            f"fn_json_{KERNEL_NAMES[kind]}({_document(args[0], name)}, {_path(args[1], name)}, {default}, FALSE)", kind
        )

    return bind


def _array(args: Args) -> Bound:
    document = _document(args[0], "JSONPATHARRAY")
    return Bound(f"fn_json_text_list({document}, {_path(args[1], 'JSONPATHARRAY')})", _STRING, multi=True)


def _exists(args: Args) -> Bound:
    document = _document(args[0], "JSONPATHEXISTS")
    return Bound(f"fn_json_exists({document}, {_path(args[1], 'JSONPATHEXISTS')})", DataType.BOOLEAN)


def _keys(args: Args) -> Bound:
    """JSONEXTRACTKEY(json, path): the paths of what is found, `$['a'][0]`."""
    text = (word(args[1], "the path of JSONEXTRACTKEY") or "$..*").replace("**", "*")
    path = _path(Bound("", _STRING, literal=Literal(text, text)), "JSONEXTRACTKEY")
    return Bound(f"fn_json_keys({_document(args[0], 'JSONEXTRACTKEY')}, {path})", _STRING, multi=True)


def _format(args: Args) -> Bound:
    return Bound(f"fn_json_format({_document(args[0], 'JSONFORMAT')})", _STRING)


def _is_json(args: Args) -> Bound:
    return Bound(f"fn_is_json({_document(args[0], 'ISJSON')})", DataType.BOOLEAN)


def match_filter(args: Args) -> Bound:
    """JSON_MATCH(column, filter), by evaluation."""
    document, text = _document(args[0], "JSON_MATCH"), word(args[1], "the filter of JSON_MATCH")
    filter_condition(text)
    return Bound(f"fn_json_match({document}, {text_sql(text)})", DataType.BOOLEAN)


def filter_condition(text: str) -> Expr:
    """What the filter of a JSON_MATCH says. Raises QueryError 700."""
    try:
        condition = lower_condition(parse_condition(text))
        check_expressions([condition])
    except RecursionError as error:
        raise invalid("JSON_MATCH: the filter is nested too deeply", hint="use fewer parentheses") from error
    except QueryError as error:
        raise invalid(
            f"JSON_MATCH: cannot read the filter {text[:200]!r}: {error}",
            hint='it is one condition and nothing else, for example "$.a" = 1 AND "$.b[*]" > 2',
        ) from error
    return condition


JSONS: tuple[Scalar, ...] = (
    Scalar(("jsonpathlong",), (2, 3), _typed_path(DataType.LONG, "arrow_cast(-9223372036854775808, 'Int64')")),
    Scalar(("jsonpathdouble",), (2, 3), _typed_path(DataType.DOUBLE, "CAST('NaN' AS DOUBLE)")),
    Scalar(("jsonpathstring", "jsonpath"), (2, 3), _typed_path(_STRING, "NULL"), may_be_null=True),
    Scalar(("jsonpatharray", "jsonpatharraydefaultempty"), (2, 2), _array),
    Scalar(("jsonpathexists",), (2, 2), _exists),
    Scalar(("jsonextractkey",), (2, 2), _keys),
    Scalar(("jsonformat",), (1, 1), _format),
    Scalar(("isjson",), (1, 1), _is_json),
    Scalar(("jsonmatch",), (2, 2), match_filter),
)
