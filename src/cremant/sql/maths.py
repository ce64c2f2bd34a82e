# SPDX-License-Identifier: Apache-2.0
"""Functions of numbers. Pinot computes in DOUBLE whatever the arguments are, or in BIG_DECIMAL if one of them is."""

from __future__ import annotations

import math

from cremant.model.schema import DataType
from cremant.sql.bound import FLOATS, Bound, as_double, as_type, common_type, invalid
from cremant.sql.scalar import SHORT_SQL_CHARS, Args, Bind, Scalar, integer_arg, is_null_literal, numeric, whole


def _double_arg(bound: Bound) -> str:
    return "CAST(NULL AS DOUBLE)" if is_null_literal(bound) else as_double(bound)


def _arithmetic(name: str, sign: str) -> Bind:
    def bind(args: Args) -> Bound:
        for arg in args:
            numeric(arg, name)
        if any(arg.type is DataType.BIG_DECIMAL and arg.literal is None for arg in args):
            return _decimal(name, args)
        sql = "(" + f" {sign} ".join(_double_arg(arg) for arg in args) + ")"
        return Bound(one_nan(sql) if _may_be_nan(sign, args) else sql, DataType.DOUBLE)

    return bind


def one_nan(sql: str) -> str:
    """Processors make NaNs of both signs, and DataFusion orders one before and one after all numbers: there is one
    NaN, the greatest of all, as in Java."""
    return f"nanvl({sql}, CAST('NaN' AS DOUBLE))"


def _may_be_nan(sign: str, args: Args) -> bool:
    """0/0, inf - inf, 0 * inf, x % 0: never of whole numbers alone, but for division."""
    floating = [arg for arg in args if arg.literal is None and arg.type in FLOATS]
    literal = args[-1].literal
    harmless = literal is not None and isinstance(literal.value, int | float) and literal.value not in (0, False)
    match sign:
        case "/":
            return not harmless
        case "%":
            return not harmless or bool(floating)
        case "*":
            return bool(floating) and not (len(args) == 2 and any(_is_number(arg) for arg in args))
        case _:
            return len(floating) > 1


def _is_number(bound: Bound) -> bool:
    """A literal that is neither 0 nor infinite."""
    value = bound.literal.value if bound.literal is not None else None
    return isinstance(value, int | float) and value != 0 and math.isfinite(value)


def _decimal(name: str, args: Args) -> Bound:
    decimals = [as_type(arg, DataType.BIG_DECIMAL) for arg in args]
    sql = decimals[0]
    for other in decimals[1:]:
        sql = f"fn_decimal_{name}({sql}, {other})"
    return Bound(sql, DataType.BIG_DECIMAL)


def _double(template: str, function: str, kind: DataType = DataType.DOUBLE) -> Bind:
    def bind(args: Args) -> Bound:
        for arg in args:
            numeric(arg, function)
        return Bound(template.format(*(_double_arg(arg) for arg in args)), kind)

    return bind


def _rounding(kernel: str, one_argument: str) -> Bind:
    """ROUNDDECIMAL(x[, digits]), TRUNCATE(x[, digits])."""

    def bind(args: Args) -> Bound:
        numeric(args[0], kernel.upper())
        if len(args) == 1:
            return Bound(one_argument.format(_double_arg(args[0])), DataType.DOUBLE)
        digits = whole(args[1], kernel.upper())
        return Bound(f"fn_{kernel}({_double_arg(args[0])}, {digits})", DataType.DOUBLE)

    return bind


def _extreme(name: str) -> Bind:
    def bind(args: Args) -> Bound:
        kind = common_type(arg.type for arg in args)
        if kind is DataType.BIG_DECIMAL:
            raise invalid(f"{name} of BIG_DECIMAL is not supported", hint="CAST it AS DOUBLE")
        if kind is None or any(arg.multi for arg in args):
            raise invalid(f"{name} takes at least one value that is not NULL, and no multi-value column")
        return Bound(f"{name}({', '.join(as_type(arg, kind) for arg in args if arg.type)})", kind)

    return bind


def _bits(template: str, function: str) -> Bind:
    """Functions of the 64 bits of whole numbers; of 32 if all arguments have no more."""

    def bind(args: Args) -> Bound:
        kind = DataType.INT if all(arg.type is DataType.INT for arg in args) else DataType.LONG
        sql = template.format(*(integer_arg(arg, function) for arg in args))
        return Bound(f"CAST({sql} AS INT)" if kind is DataType.INT else sql, kind)

    return bind


def _longs(template: str, function: str) -> Bind:
    def bind(args: Args) -> Bound:
        return Bound(template.format(*(integer_arg(arg, function) for arg in args)), DataType.LONG)

    return bind


def _integer_division(args: Args) -> Bound:
    """INTDIV(a, b): the largest whole number not above a / b, as LONG."""
    for arg in args:
        numeric(arg, "INTDIV")
    return Bound(f"fn_to_long(floor({_double_arg(args[0])} / {_double_arg(args[1])}))", DataType.LONG)


def _or_zero(template: str, function: str, kind: DataType) -> Bind:
    """The result, or 0 where the divisor is 0."""

    def bind(args: Args) -> Bound:
        for arg in args:
            numeric(arg, function)
        divisor = _double_arg(args[1])
        if len(divisor) > SHORT_SQL_CHARS:
            raise invalid(f"the divisor of {function} is too long", hint="use a column or a simple expression")
        sql = template.format(_double_arg(args[0]), f"NULLIF({divisor}, 0.0)")
        return Bound(f"COALESCE({sql}, {'0' if kind is DataType.LONG else '0.0'})", kind)

    return bind


def _negative_root(name: str) -> Bind:
    return _with_nan("power({0}, 0.5)", name)


def _with_nan(template: str, function: str) -> Bind:
    """A function that makes NaN of numbers outside its domain."""
    return _double(one_nan(template), function)


_ONE = ("exp", "sin", "cos", "tan", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "degrees", "radians")

MATHS: tuple[Scalar, ...] = (
    Scalar(("plus", "add"), (2, 16), _arithmetic("plus", "+")),
    Scalar(("minus", "sub"), (2, 2), _arithmetic("minus", "-")),
    Scalar(("times", "mult"), (2, 16), _arithmetic("times", "*")),
    Scalar(("divide", "div"), (2, 2), _arithmetic("divide", "/")),
    Scalar(("mod",), (2, 2), _arithmetic("mod", "%")),
    Scalar(("abs",), (1, 1), _double("abs({0})", "ABS")),
    Scalar(("negate",), (1, 1), _with_nan("(- {0})", "NEGATE")),
    Scalar(("ceil", "ceiling"), (1, 1), _double("ceil({0})", "CEIL")),
    Scalar(("floor",), (1, 1), _double("floor({0})", "FLOOR")),
    *(Scalar((name,), (1, 1), _with_nan(f"{name}({{0}})", name.upper())) for name in _ONE),
    Scalar(("atan2",), (2, 2), _with_nan("atan2({0}, {1})", "ATAN2")),
    Scalar(("hypot",), (2, 2), _double("power(power({0}, 2.0) + power({1}, 2.0), 0.5)", "HYPOT")),
    Scalar(("ln", "log"), (1, 1), _with_nan("ln({0})", "LN")),
    Scalar(("log2",), (1, 1), _with_nan("log2({0})", "LOG2")),
    Scalar(("log10",), (1, 1), _with_nan("log10({0})", "LOG10")),
    Scalar(("sqrt",), (1, 1), _negative_root("SQRT")),
    Scalar(("power", "pow"), (2, 2), _with_nan("power({0}, {1})", "POWER")),
    Scalar(("sign",), (1, 1), _double("signum({0})", "SIGN")),
    Scalar(("rounddecimal",), (1, 2), _rounding("round", "floor({0} + 0.5)")),
    Scalar(("truncate",), (1, 2), _rounding("truncate", "trunc({0})")),
    Scalar(("intdiv",), (2, 2), _integer_division),
    Scalar(("intdivorzero",), (2, 2), _or_zero("fn_to_long(floor({0} / {1}))", "INTDIVORZERO", DataType.LONG)),
    Scalar(("moduloorzero",), (2, 2), _or_zero("({0} % {1})", "MODULOORZERO", DataType.DOUBLE)),
    Scalar(("isnan",), (1, 1), _double("isnan({0})", "ISNAN", DataType.BOOLEAN)),
    Scalar(("least",), (1, 16), _extreme("least")),
    Scalar(("greatest",), (1, 16), _extreme("greatest")),
    Scalar(("gcd",), (2, 2), _longs("gcd({0}, {1})", "GCD")),
    Scalar(("lcm",), (2, 2), _longs("lcm({0}, {1})", "LCM")),
    Scalar(("bitand",), (2, 2), _bits("({0} & {1})", "BITAND")),
    Scalar(("bitor",), (2, 2), _bits("({0} | {1})", "BITOR")),
    Scalar(("bitxor",), (2, 2), _bits("({0} ^ {1})", "BITXOR")),
    Scalar(("bitnot",), (1, 1), _bits("(-1 - {0})", "BITNOT")),
    Scalar(("bitshiftleft",), (2, 2), _longs("({0} << {1})", "BITSHIFTLEFT")),
    Scalar(("bitshiftright",), (2, 2), _longs("({0} >> {1})", "BITSHIFTRIGHT")),
)
