# SPDX-License-Identifier: Apache-2.0
"""Messages that are not JSON, through the whole path; a registry that is away; what is bad and where that is seen."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import pytest
from pipelines import World, check, event, wait_for
from registry import SchemaRegistry

from cremant.log.api import Message
from cremant.model.limits import MESSAGE_BYTES_MAX
from cremant.model.names import dead_letter_topic

Session = Callable[[], Any]
AVRO = "org.apache.pinot.plugin.inputformat.avro"
CONFLUENT = f"{AVRO}.confluent.KafkaConfluentSchemaRegistryAvroMessageDecoder"
CSV = "org.apache.pinot.plugin.inputformat.csv.CSVMessageDecoder"
EVENT = {
    "type": "record", "name": "event",
    "fields": [
        {"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"]}, {"name": "v", "type": "double"},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}  # fmt: skip


def avro(number: int, schema_id: int) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(EVENT), json.loads(event(number)))
    return struct.pack(">bI", 0, schema_id) + stream.getvalue()


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as server:
        server.login = "me:secret"
        yield server


def letters(world: World) -> list[dict[str, Any]]:
    topic = dead_letter_topic("events", world.view().record.incarnation)
    batch = world.log.reader(topic, 0, 0).read(max_messages=1_000, max_bytes=10_000_000)
    return [json.loads(value) for value in batch.values.to_pylist()] if batch is not None else []


def test_a_registry_that_is_away_is_waited_for_and_its_login_is_a_secret(
    world: World, session: Session, registry: SchemaRegistry
) -> None:
    """Nothing is rejected meanwhile. A message of a schema that it does not know is."""
    registry.schemas[7] = EVENT
    registry.broken = 503
    world.add_table(
        partitions=1,
        stream={
            "decoder.class.name": CONFLUENT,
            "decoder.prop.schema.registry.rest.url": registry.url,
            "decoder.prop.schema.registry.basic.auth.user.info": "${file:" + str(world.directory / "login") + "}",
        },
    )
    (world.directory / "login").write_text("me:secret\n")
    world.stream.append(world.topic(), 0, [Message(avro(number, 7)) for number in range(200)])
    query = world.query(session)
    wait_for(lambda: query.report().state == "backoff", 120)
    assert f"schema registry {registry.url} does not give schema 7: HTTP 503" in (query.report().error or "")
    assert "secret" not in (query.report().error or "")
    registry.broken = None
    wait_for(lambda: world.closed_rows() == 200, 120)
    world.stream.append(world.topic(), 0, [Message(avro(200, 8)), Message(avro(200, 7))])
    wait_for(lambda: world.closed_rows() == 202, 120)
    check(world.read(), range(201))
    assert [(letter["offset"], letter["cause"]) for letter in letters(world)] == [(200, "unknownSchema")]
    run_dir = world.directory / "pipeline" / "tables"
    assert all("secret" not in path.read_text() for path in run_dir.rglob("*.json"))


def test_csv_through_the_whole_path(world: World, session: Session) -> None:
    world.add_table(stream={"decoder.class.name": CSV, "decoder.prop.header": "id,name,v,ts"})
    for partition in range(4):
        numbers = range(partition, 400, 4)
        rows = [json.loads(event(number)) for number in numbers]
        world.stream.append(
            world.topic(), partition,
            [Message(f'{row["id"]},"{row["name"]}",{row["v"]},{row["ts"]}'.encode()) for row in rows],
        )  # fmt: skip
    world.query(session)
    wait_for(lambda: world.closed_rows() == 400, 120)
    check(world.read(), range(400))


BAD: list[tuple[bytes | None, str]] = [
    (b'{"id": 1', "malformedJson"), (b'{"id": 1} x', "malformedJson"), (b'{"id": "\xff"}', "malformedJson"),
    (b"[1]", "notAnObject"), (b'{"id": "one"}', "wrongType"), (b'{"id": {"a": 1}}', "wrongType"),
    (b'{"id": 99999999999999999999}', "outOfRange"), (b"", "emptyMessage"), (None, "emptyMessage"),
    (b'{"x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "tooDeep"),
    (b'{"name": "' + b"x" * MESSAGE_BYTES_MAX + b'"}', "tooLarge"),
]  # fmt: skip


def test_every_kind_of_bad_message_is_rejected_alone_and_its_letter_says_where_and_why(
    world: World, session: Session
) -> None:
    """Between good ones; and messages that only look bad are rows: a column missing, a key twice, an unknown field."""
    world.add_table(partitions=1)
    for number, (message, _) in enumerate(BAD):
        world.stream.append(world.topic(), 0, [Message(event(number)), Message(message)])
    fine = [b'{"id": 100}', b'{"id": 5, "id": 101}', b'{"id": 102, "more": [1, {"a": null}]}']
    world.stream.append(world.topic(), 0, [Message(message) for message in fine])
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 2 * len(BAD) + 3, 180)
    (content,) = world.read()
    assert content.stopped is None
    assert [row["id"] for row in content.rows] == [*range(len(BAD)), 100, 101, 102]
    assert (content.rows[-1]["name"], content.rows[-1]["v"]) == ("null", 0.0)
    found = letters(world)
    assert [(letter["offset"], letter["cause"]) for letter in found] == [
        (2 * number + 1, cause) for number, (_, cause) in enumerate(BAD)
    ]
    assert all(letter["topic"] == world.topic() and letter["partition"] == 0 for letter in found)
    assert all(letter["detail"] for letter in found)
    assert found[4]["detail"] == "column id: 'one' is not a value of type LONG"
    assert all(len(letter["sample"]) <= 2_000 for letter in found)
    assert query.report().restarts == 0
    assert query.report().rejected_total == len(BAD)


def test_messages_whose_rows_are_much_larger_than_they_are_become_several_blocks(
    world: World, session: Session
) -> None:
    """Small messages, many wide defaults: a block of all of them would be larger than a record of the log may be."""
    wide = {f"c{number}": "x" * 400 for number in range(40)}
    schema = {
        "schemaName": "events",
        "dimensionFieldSpecs": [
            {"name": "id", "dataType": "LONG"},
            *({"name": name, "dataType": "STRING", "defaultNullValue": text} for name, text in wide.items()),
        ],
        "dateTimeFieldSpecs": [
            {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
        ],
    }
    world.add_table(partitions=1, schema=schema)
    world.produce(range(8_000), partitions=1)
    query = world.query(session)
    wait_for(lambda: world.closed_rows() == 8_000, 180)
    (content,) = world.read()
    assert content.stopped is None
    assert [row["id"] for row in content.rows] == list(range(8_000))
    assert query.report().restarts == 0
