# SPDX-License-Identifier: Apache-2.0
"""How Java writes floating-point numbers: shortest digits; plain from 0.001 to 10,000,000, else `d.dddE±n`."""

from __future__ import annotations

import math
from decimal import Decimal


def java_double(value: float) -> str:
    """java.lang.Double.toString."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return java_digits(repr(value), value)


def java_digits(shortest: str, value: float) -> str:
    """The digits `shortest` of a finite `value` in Java's layout."""
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    sign, digits, exponent = Decimal(shortest).normalize().as_tuple()
    text = "".join(map(str, digits))
    assert isinstance(exponent, int)
    point = len(text) + exponent
    minus = "-" if sign else ""
    if 1e-3 <= abs(value) < 1e7:
        if point <= 0:
            return f"{minus}0.{'0' * -point}{text}"
        text = text.ljust(point, "0")
        return f"{minus}{text[:point]}.{text[point:] or '0'}"
    return f"{minus}{text[0]}.{text[1:] or '0'}E{point - 1}"
