# SPDX-License-Identifier: Apache-2.0
"""JSON codec of internal messages. Errors name the place in the document; unknown fields are accepted (evolution)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from cremant.model.errors import UserError

T = TypeVar("T")

#: Version of the internal protocol. A message of another major version is refused with both numbers.
PROTOCOL = 1

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Raises UserError with the JSON path where the document is not a `kind`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        value: T = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error
    return value
