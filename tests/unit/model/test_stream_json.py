# SPDX-License-Identifier: Apache-2.0
"""Stream properties: Pinot's keys of Kafka streams and of decoders."""

from __future__ import annotations

import pytest

from cremant.model.errors import InvalidConfig
from cremant.model.stream_json import parse_stream
from cremant.model.table import StartFrom

KAFKA = {
    "streamType": "kafka",
    "stream.kafka.topic.name": "meetups",
    "stream.kafka.broker.list": "one:9092, two:9093",
    "stream.kafka.consumer.type": "lowlevel",
    "stream.kafka.consumer.factory.class.name": "org.apache.pinot.plugin.stream.kafka30.KafkaConsumerFactory",
    "stream.kafka.decoder.class.name": "org.apache.pinot.plugin.inputformat.json.JSONMessageDecoder",
    "stream.kafka.consumer.prop.auto.offset.reset": "smallest",
    "realtime.segment.flush.threshold.rows": "0",
}


def test_a_kafka_stream_as_pinot_writes_it_is_read() -> None:
    found = parse_stream(KAFKA, "/here")
    assert (found.stream_type, found.topic, found.brokers) == ("kafka", "meetups", "one:9092,two:9093")
    assert (found.decoder, found.decoder_properties) == ("json", {})
    assert found.start_from is StartFrom.EARLIEST
    assert found.client_properties == {}
    assert found.properties == KAFKA


def test_plain_keys_and_those_behind_consumer_prop_are_for_the_client_and_the_latter_count_first() -> None:
    found = parse_stream(
        {
            **KAFKA,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "client.id": "plain",
            "stream.kafka.consumer.prop.client.id": "mine",
            "stream.kafka.consumer.prop.sasl.jaas.config": "${env:JAAS}",
            "stream.kafka.isolation.level": "read_uncommitted",
            "stream.kafka.hlc.zk.connect.string": "zoo:2181",
            "stream.kafka.fetch.timeout.millis": "5000",
            "topic.consumption.rate.limit": "100",
        },
        "/here",
    )
    assert found.client_properties == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "client.id": "mine",
        "sasl.jaas.config": "${env:JAAS}",
        "isolation.level": "read_uncommitted",
    }


@pytest.mark.parametrize(
    ("name", "needed", "decoder"),
    [
        ("", {}, "json"),
        ("org.apache.pinot.plugin.stream.kafka.KafkaJSONMessageDecoder", {}, "json"),
        ("org.apache.pinot.plugin.inputformat.csv.CSVMessageDecoder", {}, "csv"),
        ("org.apache.pinot.plugin.inputformat.avro.SimpleAvroMessageDecoder", {"schema": '"long"'}, "avro"),
        (
            "org.apache.pinot.plugin.inputformat.avro.confluent.KafkaConfluentSchemaRegistryAvroMessageDecoder",
            {"schema.registry.rest.url": "http://registry:8081"},
            "avroRegistry",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["kafka", "embedded"])
def test_decoders_are_known_by_the_names_of_pinots_classes(
    kind: str, name: str, needed: dict[str, str], decoder: str
) -> None:
    properties = {
        "streamType": kind,
        f"stream.{kind}.topic.name": "t",
        "stream.kafka.broker.list": "a:1",
        f"stream.{kind}.decoder.class.name": name,
        **{f"stream.{kind}.decoder.prop.{key}": value for key, value in needed.items()},
        f"stream.{kind}.decoder.prop.delimiter": ";",
    }
    found = parse_stream(properties, "/here")
    assert (found.decoder, found.decoder_properties) == (decoder, {**needed, "delimiter": ";"})
    if needed:
        with pytest.raises(InvalidConfig, match=f"decoder.prop.{next(iter(needed))} is missing"):
            parse_stream({key: value for key, value in properties.items() if not key.endswith(next(iter(needed)))}, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream.kafka.broker.list": ""}, "/here/stream.kafka.broker.list is missing"),
        ({"stream.kafka.broker.list": "one,two:1"}, "expected host:port, found 'one'"),
        ({"stream.kafka.broker.list": "one:port"}, "expected host:port"),
        ({"stream.kafka.broker.list": "one:65536"}, "expected host:port"),
        ({"stream.kafka.topic.name": ""}, "topic.name is missing"),
        ({"stream.kafka.decoder.class.name": "a.KafkaConfluentSchemaRegistryJsonMessageDecoder"}, "not supported"),
        ({"stream.kafka.decoder.class.name": "a.KafkaAvroMessageDecoder"}, "not supported"),
        ({"stream.kafka.decoder.class.name": "BadJSONMessageDecoder"}, "not supported"),
    ],
)
def test_a_kafka_stream_that_cannot_be_is_refused_with_what_to_change(change: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        parse_stream({**KAFKA, **change}, "/here")
