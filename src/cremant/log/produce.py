# SPDX-License-Identifier: Apache-2.0
"""Bulk produce of JSON lines into a topic: what `cremant produce` and `POST /topics/{topic}` do.

Lines are taken in batches. A batch is checked whole before anything of it is appended; a malformed line is refused
with its number and what was found, and batches before it stay appended. Within a batch each partition gets one append,
all or nothing where the log has `atomic_appends`; should the log fail, the error says how much was appended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cremant.log.api import Log, Message
from cremant.log.partitioner import Turns, partitions_of
from cremant.model.errors import CremantError, UserError
from cremant.model.limits import MESSAGE_BYTES_MAX, MIB, PRODUCE_BODY_BYTES_MAX
from cremant.model.offsets import OffsetRange

#: Lines of a batch when they come as an iterable; read in rounds so that wide lines make smaller batches.
BATCH_LINES = 10_000
_ROUND_LINES = 500
_BATCH_BYTES = PRODUCE_BODY_BYTES_MAX // 4
#: Read from a file or pipe at once.
_STREAM_BYTES = 1 * MIB
#: A largest value as a JSON string of escapes, and its key.
_LINE_BYTES_MAX = 8 * MESSAGE_BYTES_MAX
#: How much of a refused line a message shows.
_SHOWN_CHARS = 80


class Produced(NamedTuple):
    """Acknowledgement: offset ranges per partition in append order, and how many messages. Without `atomic_appends`
    messages of other producers may be among the offsets."""

    ranges: dict[int, list[OffsetRange]]
    messages: int


class _KeyedLine(msgspec.Struct):
    value: msgspec.Raw
    key: str | None = None


class _Batch(NamedTuple):
    """Messages of consecutive lines; `first_line` counts from 1."""

    first_line: int
    messages: list[Message]


_value_lines: msgspec.json.Decoder[msgspec.Raw] = msgspec.json.Decoder(msgspec.Raw)
_keyed_lines = msgspec.json.Decoder(_KeyedLine)
_string = msgspec.json.Decoder(str)
_turns = Turns(start=os.getpid())


def produce_lines(
    log: Log, topic: str, lines: bytes | Iterable[bytes], *, keyed: bool = False, turns: Turns | None = None
) -> Produced:
    """Appends each non-blank line of `lines` as a message. `lines`: bytes, a whole body, one batch; or a binary file or
    pipe, taken as it comes; or any iterable of lines.

    Not keyed: the line, a JSON object, is the value, keyless. Keyed: `{"key": string|null, "value": object|string}`;
    an object value is kept as the bytes it was written in, a string value is its UTF-8. A key goes to its murmur2
    partition; keyless messages of a batch go together to the next partition of `turns`. Order of lines is kept within
    a partition.
    Raises UserError (malformed line, with its number; nothing of its batch is appended), NotFound, NoResource.
    """
    partitions = log.topic(topic).partitions
    if isinstance(lines, bytes) and len(lines) > PRODUCE_BODY_BYTES_MAX:
        raise UserError(f"a body of {len(lines)} bytes, at most {PRODUCE_BODY_BYTES_MAX} are allowed at once")
    produced = Produced({}, 0)
    for first_line, text in _batches(lines):
        try:
            batch = _Batch(first_line, _parse(text, first_line, keyed))
            produced = _append(log, topic, partitions, batch, turns or _turns, produced)
        except CremantError as error:
            if produced.messages:
                error.message += f"; {produced.messages} messages before were appended"
            raise
    return produced


def _batches(lines: bytes | Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Batches of lines: (number of the first line, text)."""
    if isinstance(lines, bytes):
        return iter([(1, lines)])
    if isinstance(lines, BufferedIOBase):
        return _batches_of_stream(lines)
    return _batches_of_lines(lines)


def _batches_of_stream(stream: BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """What a file or pipe has at once, up to the last whole line: a slow pipe does not wait for a full batch."""
    first_line, rest = 1, b""
    while chunk := stream.read1(_STREAM_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            text = rest + chunk[:end]
            yield first_line, text
            first_line, rest = first_line + text.count(b"\n"), chunk[end:]
        elif len(rest) > _LINE_BYTES_MAX:
            raise UserError(f"line {first_line}: longer than {_LINE_BYTES_MAX} bytes", hint="is it JSON lines?")
        else:
            rest += chunk
    if rest:
        yield first_line, rest


def _batches_of_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    rest = iter(lines)
    first_line, count, size = 1, 0, 0
    parts: list[bytes] = []
    while some := [line.rstrip(b"\r\n") for line in islice(rest, _ROUND_LINES)]:
        parts += some
        count += len(some)
        size += sum(map(len, some))
        if count >= BATCH_LINES or size >= _BATCH_BYTES:
            yield first_line, b"\n".join(parts)
            first_line, count, size, parts = first_line + count, 0, 0, []
    if parts:
        yield first_line, b"\n".join(parts)


def _parse(text: bytes, first_line: int, keyed: bool) -> list[Message]:
    """The messages of all lines. Raises UserError naming the first line that is not one."""
    _check_utf8(text, first_line)
    try:
        messages = _messages(text, keyed)
    except (msgspec.MsgspecError, UserError):
        messages = None
    if messages is None or len(messages) > text.count(b"\n") + 1 or _spans_lines(messages):
        return _parse_one_by_one(text, first_line, keyed)
    return messages


def _spans_lines(messages: list[Message]) -> bool:
    """A value that was written over several lines is not a line."""
    return any(b"\n" in message.value for message in messages if message.value is not None)


def _parse_one_by_one(text: bytes, first_line: int, keyed: bool) -> list[Message]:
    messages: list[Message] = []
    for number, line in enumerate(text.split(b"\n"), first_line):
        try:
            found = _messages(line, keyed)
        except (msgspec.MsgspecError, UserError) as error:
            raise UserError(
                f"line {number}: {error}, found {_shown(line)}",
                hint='a line is {"key": "…" or null, "value": {…} or "…"}' if keyed else "a line is one JSON object",
            ) from None
        if len(found) > 1:
            raise UserError(f"line {number}: expected one JSON object, found {len(found)}: {_shown(line)}")
        messages += found
    return messages


def _messages(text: bytes, keyed: bool) -> list[Message]:
    """Raises MsgspecError or UserError without saying where."""
    keys: list[bytes | None]
    if keyed:
        found = _keyed_lines.decode_lines(text)
        values = [bytes(line.value) for line in found]
        keys = [None if line.key is None else line.key.encode() for line in found]
        values = [_string.decode(value).encode() if value[:1] == b'"' else value for value in values]
        if any(bytes(line.value)[:1] not in b'{"' for line in found):
            raise UserError("expected the value to be an object or a string")
        messages = list(map(Message, values, keys))
    else:
        values = [bytes(value) for value in _value_lines.decode_lines(text)]
        if any(value[:1] != b"{" for value in values):
            raise UserError("expected a JSON object")
        messages = list(map(Message, values))
    largest = max(map(len, values), default=0)
    if largest > MESSAGE_BYTES_MAX:
        raise UserError(f"a value of {largest} bytes, at most {MESSAGE_BYTES_MAX} are allowed")
    return messages


def _check_utf8(text: bytes, first_line: int) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        number = first_line + text.count(b"\n", 0, error.start)
        raise UserError(f"line {number}: expected UTF-8, found {text[error.start : error.start + 4]!r}") from None


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _append(log: Log, topic: str, partitions: int, batch: _Batch, turns: Turns, produced: Produced) -> Produced:
    """One append per partition. Raises with what was appended of this batch in the message."""
    ranges, total = produced
    done = 0
    for partition, messages in _by_partition(batch.messages, partitions, turns):
        try:
            appended = log.append(topic, partition, messages)
        except CremantError as error:
            if done:
                error.message += (
                    f"; {done} of {len(batch.messages)} messages from line {batch.first_line} on were appended"
                )
            raise
        done += len(messages)
        _add_range(ranges.setdefault(partition, []), OffsetRange(appended.first_offset, appended.next_offset))
    return Produced(ranges, total + done)


def _by_partition(messages: list[Message], partitions: int, turns: Turns) -> Iterator[tuple[int, list[Message]]]:
    """Groups by partition, lines in order within each."""
    if not messages:
        return
    keyed = [index for index, message in enumerate(messages) if message.key is not None]
    if not keyed:
        yield turns.take(partitions), messages
        return
    chosen = np.empty(len(messages), dtype=np.int64)
    if len(keyed) < len(messages):
        chosen.fill(turns.take(partitions))
    keys: list[Any] = [messages[index].key for index in keyed]
    chosen[keyed] = partitions_of(keys, partitions)
    order = np.argsort(chosen, kind="stable")
    starts = np.searchsorted(chosen[order], np.arange(partitions + 1))
    for partition in range(partitions):
        rows = order[starts[partition] : starts[partition + 1]].tolist()
        if rows:
            yield partition, [messages[row] for row in rows]


def _add_range(ranges: list[OffsetRange], added: OffsetRange) -> None:
    if ranges and ranges[-1].next == added.first:
        ranges[-1] = OffsetRange(ranges[-1].first, added.next)
    else:
        ranges.append(added)
