# SPDX-License-Identifier: Apache-2.0
"""Bulk produce of JSON lines into a topic: what `cremant produce` and `POST /topics/{topic}` do.

Lines are taken in batches. A batch is checked whole before anything of it is appended; a malformed line is refused
with its number and what was found, and batches before it stay appended. Within a batch each partition gets its appends
in turn, each all or nothing; should the log fail between two of them, the error says what was appended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cremant.log.api import Log
from cremant.log.partitioner import Turns
from cremant.model.offsets import OffsetRange

#: Lines of a batch when lines come as an iterable; bytes are one batch.
BATCH_LINES = 10_000


class Produced(NamedTuple):
    """Acknowledgement: offset ranges per partition in append order, and how many messages."""

    ranges: dict[int, list[OffsetRange]]
    messages: int


def produce_lines(
    log: Log, topic: str, lines: bytes | Iterable[bytes], *, keyed: bool = False, turns: Turns | None = None
) -> Produced:
    """Appends each non-blank line of `lines` (bytes: a whole body; an iterable: one line each) as a message.

    Not keyed: the line, a JSON object, is the value, keyless. Keyed: `{"key": string|null, "value": object|string}`;
    an object value is kept as the bytes it was written in, a string value is its UTF-8. A key goes to its murmur2
    partition; keyless messages of a batch go together to the next partition of `turns`. Order of lines is kept within
    a partition.
    Raises UserError (malformed line, with its number; nothing of its batch is appended), NotFound, NoResource.
    """
    raise NotImplementedError
