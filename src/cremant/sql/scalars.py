# SPDX-License-Identifier: Apache-2.0
"""Scalar functions by name (lower case, no underscores). A function is a row in one of the families' tables.

What is not there is refused by name (code 700), never approximated.
"""

from __future__ import annotations

from collections.abc import Sequence

from cremant.model.limits import KERNEL_LITERAL_CHARS_MAX
from cremant.sql.arrays import ARRAYS
from cremant.sql.bound import Bound, as_type, invalid
from cremant.sql.casts import CASTS
from cremant.sql.datetimes import DATE_TIMES
from cremant.sql.jsons import JSONS, extract_scalar
from cremant.sql.maths import MATHS
from cremant.sql.scalar import Scalar, placeholder
from cremant.sql.texts import TEXTS_AND_BYTES

SCALARS: tuple[Scalar, ...] = (*MATHS, *TEXTS_AND_BYTES, *CASTS, *DATE_TIMES, *JSONS, *ARRAYS)

_ELEMENT_TYPES = ("int", "long", "float", "double", "string")
_BY_NAME = {name: scalar for scalar in SCALARS for name in scalar.names}
_BY_NAME |= {
    name + kind: scalar for scalar in SCALARS if scalar.typed for name in scalar.names for kind in _ELEMENT_TYPES
}
_JSON_EXTRACT = "jsonextractscalar"


def scalar_names() -> frozenset[str]:
    return frozenset({*_BY_NAME, _JSON_EXTRACT})


def bind_scalar(name: str, args: Sequence[Bound], *, null_handling: bool = False) -> Bound | None:
    """The bound call, or None if there is no such function. Raises QueryError 700 for wrong arguments."""
    if name == _JSON_EXTRACT:
        _check_count(name, len(args), (3, 4))
        _check_literals(name, args)
        return extract_scalar(args, strict=not null_handling)
    scalar = _BY_NAME.get(name)
    if scalar is None:
        return None
    _check_count(name, len(args), scalar.arity)
    bound = scalar.bind(args)
    if bound.sql.startswith("fn_"):
        _check_literals(name, args)
    if scalar.may_be_null and not null_handling and bound.type is not None and not bound.multi:
        return Bound(f"COALESCE({bound.sql}, {as_type(placeholder(bound.type), bound.type)})", bound.type)
    return bound


def _check_count(name: str, found: int, arity: tuple[int, int]) -> None:
    least, most = arity
    if not least <= found <= most:
        expected = str(least) if least == most else f"{least} to {most}"
        raise invalid(f"{name} takes {expected} arguments, found {found}")


def _check_literals(name: str, args: Sequence[Bound]) -> None:
    for arg in args:
        if arg.literal is not None and len(arg.literal.text) > KERNEL_LITERAL_CHARS_MAX:
            found = len(arg.literal.text)
            raise invalid(f"{name}: a literal of {found} characters, at most {KERNEL_LITERAL_CHARS_MAX} are allowed")


__all__ = ["SCALARS", "bind_scalar", "placeholder", "scalar_names"]
