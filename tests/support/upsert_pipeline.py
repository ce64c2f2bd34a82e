# SPDX-License-Identifier: Apache-2.0
"""Upsert tables whose update blocks a real Spark writes, judged against the reference model.

A message holds its key, a comparison value, whether it deletes, and the number of the message. Keys have nothing to do
with partitions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pipelines import World
from upsert_model import History, UpsertModel

from cremant.epoch.format import decode
from cremant.epoch.reader import EpochClosed, PartitionReader, Stopped, TakeRows, TakeUpdates
from cremant.epoch.records import EpochMark, Record, UpdateBlock
from cremant.log.api import Message
from cremant.model.cluster import TableView
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position

SCHEMA: dict[str, Any] = {
    "schemaName": "events",
    "primaryKeyColumns": ["id"],
    "dimensionFieldSpecs": [
        {"name": "id", "dataType": "LONG"},
        {"name": "gone", "dataType": "BOOLEAN"},
    ],
    "metricFieldSpecs": [{"name": "v", "dataType": "LONG"}],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "LONG", "format": "1:MILLISECONDS:EPOCH", "granularity": "1:MILLISECONDS"}
    ],
}
UPSERT: dict[str, Any] = {"mode": "FULL", "deleteRecordColumn": "gone"}


def add_upsert_table(
    world: World, pipeline: dict[str, Any] | None = None, *, partitions: int = 4, name: str = "events",
    schema: dict[str, Any] | None = None, upsert: dict[str, Any] | None = None, **config: Any,
) -> TableView:  # fmt: skip
    return world.add_table(
        pipeline, partitions=partitions, name=name, schema=schema or SCHEMA,
        config={"upsertConfig": upsert or UPSERT, "routing": {"instanceSelectorType": "strictReplicaGroup"}, **config},
    )  # fmt: skip


#: Keys of two columns, longer than 16 bytes: the coordinator knows them by their hashes.
LONG_KEYS: dict[str, Any] = {
    **SCHEMA,
    "primaryKeyColumns": ["tenant", "id"],
    "dimensionFieldSpecs": [*SCHEMA["dimensionFieldSpecs"], {"name": "tenant", "dataType": "STRING"}],
}


class Feed:
    """Produces rows in seeded disorder and tells the model of them. A row's key in the model is (tenant, id)."""

    def __init__(self, world: World, *, keys: int, partitions: int = 4, seed: int = 1, name: str = "events") -> None:
        self.model = UpsertModel()
        self._world = world
        self._name = name
        self._keys = keys
        self._partitions = partitions
        self._random = random.Random(seed)
        self._next = [0] * partitions
        self._rows = 0

    @property
    def rows(self) -> int:
        return self._rows

    def produce(self, count: int) -> None:
        """`count` rows over all partitions: late and equal comparison values and deletes among them."""
        dice = self._random
        waiting: list[list[Message]] = [[] for _ in range(self._partitions)]
        for _ in range(count):
            partition = dice.randrange(self._partitions)
            key, deleted = dice.randrange(self._keys), dice.random() < 0.05
            stamp = 1_700_000_000_000 + (self._rows - dice.choice((0, 0, 0, 10, 5_000))) // 8
            tenant = f"tenant-{key % 7}"
            text = {"tenant": tenant, "id": key, "gone": deleted, "v": self._rows, "ts": stamp}
            waiting[partition].append(Message(msgspec.json.encode(text)))
            self.model.apply(partition, self._next[partition], 0, key, stamp, deleted, self._rows)
            self._next[partition] += 1
            self._rows += 1
        for partition, messages in enumerate(waiting):
            for first in range(0, len(messages), 5_000):
                self._world.stream.append(self._world.topic(self._name), partition, messages[first : first + 5_000])


@dataclass
class UpsertContent:
    """What a server's reader takes from one partition of an epoch log: per closed epoch its updates."""

    rows: int = 0
    updates: dict[int, set[tuple[int, int, int]]] = field(default_factory=dict)
    closed: list[EpochClosed] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    stopped: Stopped | None = None

    @property
    def marks(self) -> list[EpochMark]:
        return [record for record in self.records if isinstance(record, EpochMark)]

    @property
    def blocks(self) -> list[UpdateBlock]:
        return [record for record in self.records if isinstance(record, UpdateBlock)]


def read_upserts(world: World, name: str = "events") -> list[UpsertContent]:
    record = world.view(name).record
    topic = epoch_topic(name, record.incarnation)
    return [
        _read(world, topic, record.incarnation, view.record.partition) for view in world.view(name).partitions
    ]  # fmt: skip


def _read(world: World, topic: str, incarnation: str, partition: int) -> UpsertContent:
    content = UpsertContent()
    start = Position(log_offset=0, epoch=0, generation=0, next_offset=0)
    machine = PartitionReader(partition, start, upsert=True)
    reader = world.log.reader(topic, partition, world.log.earliest(topic, partition))
    while (batch := reader.read(max_messages=1_000, max_bytes=64 * 1024 * 1024)) is not None:
        for index, offset in enumerate(batch.offsets.tolist()):
            record = decode(batch.values[index].as_buffer(), incarnation)
            content.records.append(record)
            for effect in machine.step(record, offset):
                match effect:
                    case TakeRows():
                        content.rows += effect.batch.num_rows
                    case TakeUpdates():
                        content.updates[effect.epoch] = set(
                            zip(*(column.to_pylist() for column in effect.batch.columns), strict=True)
                        )
                    case EpochClosed():
                        content.closed.append(effect)
                    case Stopped():
                        content.stopped = effect
    reader.close()
    return content


def history_of(
    contents: list[UpsertContent], model: UpsertModel, *, up_to: int | None = None,
    expired: Mapping[int, float] | None = None,
) -> Iterator[tuple[int, dict[int, set[tuple[int, int, int]]], History]]:  # fmt: skip
    """(epoch, its updates by partition, the history so far) of every closed epoch, as the model has it. `expired`:
    epochs of seeds that left out keys, and below which comparison value."""
    history = History(model, len(contents))
    marks: dict[int, EpochMark] = {}
    for mark in contents[0].marks:
        marks.setdefault(mark.epoch, mark)
    for epoch, mark in sorted(marks.items()):
        if up_to is not None and epoch > up_to:
            return
        below = (expired or {}).get(epoch)
        if below is not None:
            yield epoch, history.expire(epoch, below), history
        else:
            yield epoch, history.close(epoch, [line.end for line in mark.partitions]), history


def check_upserts(
    contents: list[UpsertContent], model: UpsertModel, rows: int, expired: Mapping[int, float] | None = None
) -> History:
    """Every epoch's updates in every partition are those of the model, no more and no fewer; all rows are in."""
    for content in contents:
        assert content.stopped is None, content.stopped
    assert sum(content.rows for content in contents) == rows
    history = History(model, len(contents))
    for epoch, expected, so_far in history_of(contents, model, expired=expired):
        history = so_far
        for partition, content in enumerate(contents):
            found = content.updates.get(epoch, set())
            wanted = expected.get(partition, set())
            assert found == wanted, (
                f"epoch {epoch}, partition {partition}: {len(found - wanted)} updates too many, "
                f"{len(wanted - found)} missing"
            )
    if not expired:
        assert history.at(history.epochs[-1]) == model.at(history.ends[-1])
    return history
