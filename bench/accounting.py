# SPDX-License-Identifier: Apache-2.0
"""CPU that a query spends on its freshness: what the broker makes of the watermarks that came with its servers'
answers, and what an answer's own fields add to encoding it. In one process, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from bench.context import table_config
from cremant.broker.freshness import freshness_of
from cremant.broker.response import BrokerResponse
from cremant.model.cluster import TableRecord
from cremant.model.offsets import OffsetRange, Watermark
from cremant.model.schema_json import parse_schema
from cremant.model.table_json import parse_table
from cremant.wire.messages import PartitionAnswer, ServerAnswer

PARTITIONS = (4, 64)
SERVERS = 2
_ROUNDS, _CALLS = 7, 500

_SCHEMA = {
    "schemaName": "cost",
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}
_STREAM = {"streamType": "embedded", "stream.embedded.topic.name": "cost"}


def freshness_cost_us() -> dict[str, float]:
    """Microseconds of CPU by number of partitions: the best of some rounds."""
    found = {}
    for partitions in PARTITIONS:
        record, answers = _record(), _answers(partitions)
        response = BrokerResponse(request_id="1", broker_id="Broker_1", answers=answers, now_ms=1_800_000_000_000)

        def account(record: TableRecord = record, answers: list[ServerAnswer] = answers, of: int = partitions) -> None:
            freshness_of(answers, record, of, {})

        def encode(response: BrokerResponse = response) -> None:
            msgspec.json.encode(response._own())

        response.freshness = freshness_of(answers, record, partitions, {})
        found[f"accounting_{partitions}_partitions_us"] = _cpu_us(account) + _cpu_us(encode)
    return found


def _cpu_us(call: Callable[[], None]) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        began_ns = time.process_time_ns()
        for _ in range(_CALLS):
            call()
        rounds.append((time.process_time_ns() - began_ns) / 1000 / _CALLS)
    return min(rounds)


def _record() -> TableRecord:
    config = parse_table(table_config("cost", _STREAM))
    return TableRecord(config=config, table_schema=parse_schema(_SCHEMA)[0], incarnation="0123456789abcdef")


def _answers(partitions: int) -> list[ServerAnswer]:
    """Of servers that share the partitions."""
    tails = [
        PartitionAnswer(
            partition=partition, covered=OffsetRange(0, 1_000_000 + partition),
            watermark=Watermark(
                next_offset=1_000_000 + partition, epoch=4_711, max_ingestion_ms=1_799_999_999_000 + partition,
                caught_up_at_ms=1_799_999_999_500, source="logAppend",
            ),
        )
        for partition in range(partitions)
    ]  # fmt: skip
    return [ServerAnswer(instance=f"Server_{n}", partitions=tuple(tails[n::SERVERS])) for n in range(SERVERS)]
