# SPDX-License-Identifier: Apache-2.0
"""BIG_DECIMAL as it is stored: one text per number, of any size.

Arrow's decimals end at 38 and 76 digits; Pinot's end nowhere, and 1E+307 is found in real tables. So a column holds
texts: without exponent or superfluous zeros (`12.5`, `-0.001`, `100`), from PLAIN_CHARS_MAX characters on with an
exponent (`1E+307`). Equal numbers have equal texts; their order is not that of the texts.
"""

from __future__ import annotations

import decimal
from decimal import Decimal

from cremant.model.limits import BIG_DECIMAL_DIGITS_MAX

#: Longer than any number of Arrow's widest decimals (76 digits, sign, point, zero before it).
PLAIN_CHARS_MAX = 100

EXACT = decimal.Context(prec=2 * BIG_DECIMAL_DIGITS_MAX, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def stored_decimal(number: Decimal) -> str:
    """Raises ValueError for what is no number, or written out would have more than BIG_DECIMAL_DIGITS_MAX digits."""
    if not number.is_finite():
        raise ValueError(f"{number} is not a number")
    if number == 0:
        return "0"
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    if len(digits) + abs(exponent) > BIG_DECIMAL_DIGITS_MAX:
        raise ValueError(f"a number of more than {BIG_DECIMAL_DIGITS_MAX} digits")
    short = number.normalize(EXACT)
    plain = f"{short:f}"
    return plain if len(plain) < PLAIN_CHARS_MAX else str(short)


def plain_decimal(text: str) -> str:
    """A stored text without exponent."""
    return f"{Decimal(text):f}" if "E" in text else text


def decimal_sum(texts: list[str]) -> Decimal:
    """Exact, whatever the sizes. Raises ValueError for a text that is no number."""
    total = Decimal(0)
    for text in texts:
        try:
            total = EXACT.add(total, Decimal(text))
        except decimal.InvalidOperation as error:
            raise ValueError(f"{text[:100]!r} is not a value of type BIG_DECIMAL") from error
    return total
