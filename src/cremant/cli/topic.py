# SPDX-License-Identifier: Apache-2.0
"""`cremant topic`: over HTTP for the embedded log, straight to a Kafka that is named. `cremant produce`: straight into
the embedded log where its directory is on this machine (also while no controller runs), else over HTTP; or into Kafka;
or into the stream of a table, wherever that is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rich.markup import escape
from rich.table import Table

from cremant.cli.client import Client
from cremant.cli.console import out, say, write_json
from cremant.cli.find import Target
from cremant.cli.streams import Kafka, kafka_log, local_log, table_stream
from cremant.log.api import Log
from cremant.log.produce import BATCH_LINES, produce_lines
from cremant.model.errors import InvalidConfig, NotFound, UserError
from cremant.model.limits import MIB, PARTITIONS_MAX
from cremant.model.names import check_topic_name, is_epoch_topic
from cremant.model.offsets import OffsetRange
from cremant.model.written import write_token

#: Lines sent over HTTP in one request: far below PRODUCE_BODY_BYTES_MAX.
_BODY_BYTES = 8 * MIB


def create_topic(target: Target, topic: str, partitions: int, *, kafka: Kafka | None, as_json: bool) -> None:
    check_topic_name(topic)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidConfig(f"--partitions {partitions}: expected 1 to {PARTITIONS_MAX}")
    if kafka is not None:
        with kafka_log(kafka) as log:
            log.create_topic(topic, partitions)
    else:
        with Client(target.controller) as client:
            client.create_topic(topic, partitions)
    if as_json:
        write_json({"topic": topic, "partitions": partitions})
    else:
        say(f"topic [bold]{escape(topic)}[/] created, {partitions} partition{'s' if partitions > 1 else ''}")


def delete_topic(target: Target, topic: str, *, kafka: Kafka | None, as_json: bool) -> None:
    if kafka is not None:
        with kafka_log(kafka) as log:
            log.delete_topic(topic)
    else:
        with Client(target.controller) as client:
            client.delete_topic(topic)
    if as_json:
        write_json({"topic": topic, "deleted": True})
    else:
        say(f"topic [bold]{escape(topic)}[/] deleted")


def list_topics(target: Target, *, kafka: Kafka | None, as_json: bool) -> None:
    if kafka is not None:
        with kafka_log(kafka) as log:
            topics = list(_topics_of(log))
    else:
        with Client(target.controller) as client:
            topics = client.topics()
    if as_json:
        write_json({"topics": topics})
        return
    table = Table("topic", "partitions", "messages", box=None, header_style="bold", pad_edge=False)
    for topic in topics:
        table.add_row(escape(topic["name"]), str(topic["partitions"]), f"{topic['messages']:,}")
    out.print(table if topics else "no topics")


def _topics_of(log: Log) -> Iterator[dict[str, Any]]:
    """As the controller lists its own: Kafka's and our own internal topics are not streams."""
    for topic in sorted(log.topics()):
        if topic.name.startswith(("__", "dead-letters.")) or is_epoch_topic(topic.name):
            continue
        spans = [
            log.latest(topic.name, partition) - log.earliest(topic.name, partition)
            for partition in range(topic.partitions)
        ]
        yield {"name": topic.name, "partitions": topic.partitions, "messages": sum(spans)}


def produce(
    target: Target, topic: str, source: str, *, keyed: bool, kafka: Kafka | None, to_table: bool, as_json: bool
) -> None:
    """`source` is a file or `-`. Prints what was appended: offsets per partition."""
    if is_epoch_topic(topic):
        raise UserError(f"topic {topic} is the epoch log of a table: only its pipeline writes to it")
    try:
        stream: BinaryIO = sys.stdin.buffer if source == "-" else Path(source).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise NotFound(f"cannot read {source}: {error.strerror}") from error
    with stream:
        if to_table:
            with table_stream(target, topic) as found:
                topic = found.topic
                ranges, messages = _produce(target, found.log, topic, stream, keyed=keyed)
        elif kafka is not None:
            with kafka_log(kafka) as log:
                ranges, messages = _produce(target, log, topic, stream, keyed=keyed)
        else:
            with local_log(target) as embedded:
                ranges, messages = _produce(target, embedded, topic, stream, keyed=keyed)
    if as_json:
        token = write_token({partition: spans[-1].next - 1 for partition, spans in ranges.items()})
        write_json({"topic": topic, "messages": messages, "offsets": offsets_json(ranges), "token": token})
        return
    for partition in sorted(ranges):
        spans = ", ".join(f"{first}..{following - 1}" for first, following in _joined(ranges[partition]))
        out.print(f"{topic} partition {partition}: offsets {spans}")
    say(f"{messages:,} message{'s' if messages != 1 else ''} appended")


def _produce(
    target: Target, log: Log | None, topic: str, stream: BinaryIO, *, keyed: bool
) -> tuple[dict[int, list[OffsetRange]], int]:
    if log is not None:
        produced = produce_lines(log, topic, stream, keyed=keyed)
        return produced.ranges, produced.messages
    with Client(target.controller, timeout_s=120.0) as client:
        return _produce_over_http(client, topic, stream, keyed=keyed)


def offsets_json(ranges: dict[int, list[OffsetRange]]) -> dict[str, list[list[int]]]:
    """Per partition the half-open offset ranges, neighbours joined."""
    return {str(partition): [list(span) for span in _joined(ranges[partition])] for partition in sorted(ranges)}


def _joined(ranges: list[OffsetRange]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for span in ranges:
        if joined and joined[-1][1] == span.first:
            joined[-1] = (joined[-1][0], span.next)
        else:
            joined.append((span.first, span.next))
    return joined


def _produce_over_http(
    client: Client, topic: str, lines: Iterable[bytes], *, keyed: bool
) -> tuple[dict[int, list[OffsetRange]], int]:
    ranges: dict[int, list[OffsetRange]] = {}
    messages = 0
    for body in _bodies(lines):
        answer = client.produce(topic, body, keyed=keyed)
        messages += int(answer["messages"])
        for partition, spans in answer["offsets"].items():
            ranges.setdefault(int(partition), []).extend(OffsetRange(first, following) for first, following in spans)
    return ranges, messages


def _bodies(lines: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    size = 0
    for line in lines:
        parts.append(line if line.endswith(b"\n") else line + b"\n")
        size += len(line)
        if size >= _BODY_BYTES or len(parts) >= BATCH_LINES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)
