# SPDX-License-Identifier: Apache-2.0
"""The stream properties of a table config: which stream, from where, and when a consuming segment ends.

Keys are Pinot's. Of a Kafka stream, keys without a prefix and those behind `stream.kafka.consumer.prop.` are for the
client, in the spelling of Java's client or of librdkafka; what only Pinot's consumers know (factory, consumer type,
timeouts of theirs, the high-level consumer) has no meaning here and is ignored. Differences that are meant: streams are
read committed unless `isolation.level` says otherwise (Pinot: uncommitted), and Pinot spreads `...threshold.rows` over
the partitions of a server, while here it counts rows of one segment, as `...threshold.segment.rows` does.
"""

from __future__ import annotations

import re
from typing import Any

from cremant.model.errors import InvalidConfig
from cremant.model.names import check_topic_name
from cremant.model.table import FlushConfig, StartFrom, StreamConfig
from cremant.model.timeformat import parse_period_ms, parse_size_bytes

SUPPORTED_STREAMS = ("embedded", "kafka")

_THRESHOLD = "realtime.segment.flush.threshold"
_ROWS = (f"{_THRESHOLD}.segment.rows", f"{_THRESHOLD}.rows", f"{_THRESHOLD}.size")
_BYTES = (f"{_THRESHOLD}.segment.size", "realtime.segment.flush.desired.size")
_TIME = f"{_THRESHOLD}.time"
#: Rows threshold 0 means "by size": this many rows never come first (a block counts rows in 31 bits).
ROWS_UNBOUNDED = 2**31 - 1

#: Decoder by the end of the name of Pinot's class.
_DECODERS = {
    "ConfluentSchemaRegistryAvroMessageDecoder": "avroRegistry",
    "SimpleAvroMessageDecoder": "avro",
    "CSVMessageDecoder": "csv",
    ".JSONMessageDecoder": "json",
    ".KafkaJSONMessageDecoder": "json",
}
#: What a decoder cannot do without.
_DECODER_NEEDS = {"avro": "schema", "avroRegistry": "schema.registry.rest.url"}
_AVRO_SCHEMA_HINT = "the schema as JSON text, or the path of a file"
#: Keys without `stream.` that are not for the client.
_NOT_FOR_CLIENTS = re.compile(r"streamType$|stream\.|realtime\.|(topic|partition)\.consumption\.|hlc\.|zookeeper\.")
_BROKER = re.compile(r"(?:[A-Za-z_0-9]+://)?(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9._\-]+):\d{1,5}$")

_PORT_MAX = 65_535

_EARLIEST = ("smallest", "earliest")
_LATEST = ("largest", "latest")


def find_stream(document: dict[str, Any]) -> tuple[dict[str, str], str]:
    """The stream's properties as text, and the JSON pointer where they stand."""
    legacy = (document.get("tableIndexConfig") or {}).get("streamConfigs")
    ingestion = (document.get("ingestionConfig") or {}).get("streamIngestionConfig") or {}
    maps = ingestion.get("streamConfigMaps")
    modern_at = "/ingestionConfig/streamIngestionConfig/streamConfigMaps"
    legacy_at = "/tableIndexConfig/streamConfigs"
    if legacy and maps:
        raise InvalidConfig(f"streams are configured both at {legacy_at} and at {modern_at}", hint="keep one of them")
    if maps is not None and not isinstance(maps, list):
        raise InvalidConfig(f"{modern_at}: expected an array of objects, found {type(maps).__name__}")
    if maps and len(maps) > 1:
        raise InvalidConfig(
            f"{modern_at}: {len(maps)} streams for one table are not supported by this version", hint="use one stream"
        )
    properties, where = (maps[0], f"{modern_at}/0") if maps else (legacy, legacy_at)
    if not properties:
        raise InvalidConfig(f"a REALTIME table needs stream properties at {modern_at} or {legacy_at}")
    if not isinstance(properties, dict):
        raise InvalidConfig(f"{where}: expected an object of stream properties, found {type(properties).__name__}")
    return {key: _text(value, f"{where}/{key}") for key, value in properties.items() if value is not None}, where


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        raise InvalidConfig(f"{where}: a stream property is text, found {type(value).__name__}")
    return str(value)


def parse_stream(properties: dict[str, str], where: str) -> StreamConfig:
    kind = properties.get("streamType", "").strip()
    if not kind:
        raise InvalidConfig(f"{where}: streamType is missing", hint=f"one of {', '.join(SUPPORTED_STREAMS)}")
    if kind.lower() not in SUPPORTED_STREAMS:
        raise InvalidConfig(
            f"{where}: streamType {kind!r} is not supported by this version",
            hint=f"one of {', '.join(SUPPORTED_STREAMS)}",
        )
    prefix = f"stream.{kind}"
    topic = properties.get(f"{prefix}.topic.name", "").strip()
    if not topic:
        raise InvalidConfig(f"{where}: {prefix}.topic.name is missing")
    decoder, decoder_properties = _decoder(properties, prefix, where)
    on_kafka = kind.lower() == "kafka"
    return StreamConfig(
        stream_type=kind.lower(),
        topic=check_topic_name(topic),
        decoder=decoder,
        decoder_properties=decoder_properties,
        start_from=_start_from(properties, prefix, where),
        brokers=parse_brokers(properties.get(f"{prefix}.broker.list", ""), f"{where}/{prefix}.broker.list")
        if on_kafka
        else "",
        client_properties=_client_properties(properties, prefix) if on_kafka else {},
        properties=properties,
    )


def parse_brokers(text: str, where: str) -> str:
    """`host:port,host:port`, spaces taken out. Raises InvalidConfig."""
    brokers = [broker.strip() for broker in text.split(",") if broker.strip()]
    if not brokers:
        raise InvalidConfig(f"{where} is missing", hint="host:port, several separated by commas")
    for broker in brokers:
        if not _BROKER.match(broker) or not 0 < int(broker.rpartition(":")[2]) <= _PORT_MAX:
            raise InvalidConfig(f"{where}: expected host:port, found {broker!r}")
    return ",".join(brokers)


def _client_properties(properties: dict[str, str], prefix: str) -> dict[str, str]:
    """What the client is told: the plain keys, and those behind `consumer.prop.`, which count before them."""
    found = {key: value for key, value in properties.items() if not _NOT_FOR_CLIENTS.match(key)}
    found |= _behind(properties, f"{prefix}.consumer.prop.")
    isolation = properties.get(f"{prefix}.isolation.level") or properties.get(f"{prefix}.kafka.isolation.level")
    if isolation:
        found["isolation.level"] = isolation
    found.pop("auto.offset.reset", None)
    return found


def _behind(properties: dict[str, str], prefix: str) -> dict[str, str]:
    return {key.removeprefix(prefix): value for key, value in properties.items() if key.startswith(prefix)}


def _decoder(properties: dict[str, str], prefix: str, where: str) -> tuple[str, dict[str, str]]:
    key = f"{prefix}.decoder.class.name"
    name = properties.get(key, "").strip()
    given = _behind(properties, f"{prefix}.decoder.prop.")
    decoder = next((kind for end, kind in _DECODERS.items() if f".{name}".endswith(end)), "")
    if not name:
        decoder = "json"
    if not decoder:
        raise InvalidConfig(
            f"{where}/{key}: decoder {name!r} is not supported by this version",
            hint="JSONMessageDecoder, CSVMessageDecoder, SimpleAvroMessageDecoder or "
            "KafkaConfluentSchemaRegistryAvroMessageDecoder (with Pinot's packages); left out it is JSON",
        )
    needed = _DECODER_NEEDS.get(decoder)
    if needed and not given.get(needed, "").strip():
        hint = _AVRO_SCHEMA_HINT if decoder == "avro" else "the address of the registry, http://host:port"
        raise InvalidConfig(f"{where}: {prefix}.decoder.prop.{needed} is missing for decoder {name!r}", hint=hint)
    return decoder, given


def _start_from(properties: dict[str, str], prefix: str, where: str) -> StartFrom:
    key = f"{prefix}.consumer.prop.auto.offset.reset"
    text = properties.get(key, "largest").strip().lower()
    if text in _EARLIEST:
        return StartFrom.EARLIEST
    if text in _LATEST:
        return StartFrom.LATEST
    raise InvalidConfig(
        f"{where}/{key}: {text!r} is not supported by this version",
        hint=f"one of {', '.join(_EARLIEST + _LATEST)}",
    )


def parse_flush(properties: dict[str, str], where: str) -> FlushConfig:
    """Thresholds in all of Pinot's spellings; the first positive one of each kind counts. 0 rows = by size."""
    given_rows = [_count(properties[key], f"{where}/{key}") for key in _ROWS if key in properties]
    given_bytes = [parse_size_bytes(properties[key], f"{where}/{key}") for key in _BYTES if key in properties]
    unset = FlushConfig()
    rows = next((count for count in given_rows if count > 0), ROWS_UNBOUNDED if given_rows else unset.rows)
    size = next((size for size in given_bytes if size > 0), unset.bytes)
    time_ms = parse_period_ms(properties[_TIME], f"{where}/{_TIME}") if _TIME in properties else unset.time_ms
    if time_ms <= 0:
        raise InvalidConfig(f"{where}/{_TIME}: must be positive, found {properties[_TIME]!r}")
    return FlushConfig(rows=min(rows, ROWS_UNBOUNDED), bytes=size, time_ms=time_ms)


def _count(text: str, where: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise InvalidConfig(f"{where}: expected a number of rows, found {text!r}") from None
