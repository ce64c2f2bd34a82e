# SPDX-License-Identifier: Apache-2.0
"""Tokens of writes: the offset of the last row written, per partition of a stream.

What a producer hands on so that a query sees its rows: `SET readYourWrites = '{"0": 41, "3": 17}'`. Plain JSON, made by
HTTP produce, by `cremant.read_your_writes` out of Kafka's delivery reports, or by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cremant.model.errors import UserError
from cremant.model.limits import PARTITIONS_MAX

_OFFSET_MAX = 2**63 - 2
_SHOWN_CHARS = 80
_EXPECTED = """expected JSON of partition: offset of the last row written, like {"0": 41, "3": 17}"""


def write_token(written: Mapping[int, int]) -> str:
    """`written`: partition -> offset of the last row written there. Equal writes have equal tokens."""
    return msgspec.json.encode({str(partition): written[partition] for partition in sorted(written)}).decode()


def parse_write_token(text: str) -> dict[int, int]:
    """Partition -> offset of the last row written there. Raises UserError for what is no such token."""
    shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
    try:
        found = msgspec.json.decode(text, type=dict[int, int])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UserError(f"not a token of writes: {error}; {_EXPECTED}, found {shown!r}") from error
    for partition, offset in found.items():
        if not 0 <= partition < PARTITIONS_MAX:
            raise UserError(f"not a token of writes: partition {partition} is not within 0..{PARTITIONS_MAX - 1}")
        if not 0 <= offset <= _OFFSET_MAX:
            raise UserError(f"not a token of writes: offset {offset} of partition {partition}; {_EXPECTED}")
    return found
