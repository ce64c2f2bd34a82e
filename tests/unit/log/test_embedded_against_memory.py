# SPDX-License-Identifier: Apache-2.0
"""The embedded log behaves as the memory log whatever is done to both, also when processes come, go and die."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cremant.log.api import LogReader, Message, OffsetExpired
from cremant.log.embedded import EmbeddedLog
from cremant.log.memory import MemoryLog
from cremant.model.errors import NotFound

PARTITIONS = 2
partitions = st.integers(0, PARTITIONS - 1)
maybe_bytes = st.none() | st.binary(max_size=400)
plain = st.builds(Message, st.binary(max_size=400))
rich = st.builds(Message, maybe_bytes, maybe_bytes, st.just((("name", b"value"),)) | st.just(()))
appends = st.lists(plain | rich, min_size=1, max_size=8) | st.lists(plain, min_size=1, max_size=1)


class SameAsMemory(RuleBasedStateMachine):
    """Two log objects on one directory stand for two processes."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000_000
        self.path = Path(tempfile.mkdtemp(prefix="cremant-log-"))
        self.memory = MemoryLog(lambda: self.now_ms)
        self.logs = [self.open(), self.open()]
        self.readers: list[tuple[int, LogReader, LogReader]] = []

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    def open(self) -> EmbeddedLog:
        return EmbeddedLog(self.path, segment_bytes=4096, clock=lambda: self.now_ms)

    def directory(self, partition: int) -> Path:
        return self.path / "topics" / "t" / self.logs[0].topic("t").incarnation / str(partition)

    @initialize()
    def create(self) -> None:
        self.memory.create_topic("t", PARTITIONS)
        self.logs[0].create_topic("t", PARTITIONS)

    @rule(who=st.integers(0, 1), partition=partitions, messages=appends, again=st.integers(1, 12))
    def append(self, who: int, partition: int, messages: list[Message], again: int) -> None:
        for _ in range(again):
            expected = self.memory.append("t", partition, messages)
            assert self.logs[who].append("t", partition, messages) == expected

    @rule(step_ms=st.integers(-50, 100))
    def clock_moves(self, step_ms: int) -> None:
        self.now_ms += step_ms

    @rule(who=st.integers(0, 1), partition=partitions, where=st.floats(0, 1.1))
    def open_reader(self, who: int, partition: int, where: float) -> None:
        offset = int(where * self.memory.latest("t", partition))
        readers = self.memory.reader("t", partition, offset), self.logs[who].reader("t", partition, offset)
        self.readers = [*self.readers[-3:], (partition, *readers)]

    @rule(index=st.integers(0, 3), max_messages=st.integers(1, 40), max_bytes=st.integers(1, 5000))
    def read(self, index: int, max_messages: int, max_bytes: int) -> None:
        if index >= len(self.readers):
            return
        partition, memory, embedded = self.readers[index]
        try:
            expected = memory.read(max_messages=max_messages, max_bytes=max_bytes)
        except OffsetExpired:
            memory.seek(self.memory.latest("t", partition))
            embedded.seek(self.memory.latest("t", partition))
            return
        except NotFound:
            try:
                embedded.read(max_messages=max_messages, max_bytes=max_bytes)
            except NotFound:
                del self.readers[index]
                return
            raise AssertionError("the embedded log reads a deleted topic") from None
        found = embedded.read(max_messages=max_messages, max_bytes=max_bytes)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert found.offsets.tolist() == expected.offsets.tolist()
            assert found.timestamps_ms.tolist() == expected.timestamps_ms.tolist()
            assert found.values.to_pylist() == expected.values.to_pylist()
            assert found.keys.to_pylist() == expected.keys.to_pylist()
            assert found.headers == expected.headers
            assert found.next_offset == expected.next_offset == embedded.position

    @rule(who=st.integers(0, 1), partition=partitions, where=st.floats(0, 1))
    def trim(self, who: int, partition: int, where: float) -> None:
        before = int(where * self.memory.latest("t", partition))
        self.memory.trim("t", partition, before)
        self.logs[who].trim("t", partition, before)
        assert self.logs[who].earliest("t", partition) <= self.memory.earliest("t", partition)

    @rule(who=st.integers(0, 1), partition=partitions, ago_ms=st.integers(-10, 300))
    def offset_at(self, who: int, partition: int, ago_ms: int) -> None:
        expected = self.memory.offset_at("t", partition, self.now_ms - ago_ms)
        found = self.logs[who].offset_at("t", partition, self.now_ms - ago_ms)
        if found >= self.memory.earliest("t", partition):
            assert found == expected

    @rule(who=st.integers(0, 1))
    def process_restarts(self, who: int) -> None:
        self.logs[who].close()
        self.logs[who] = self.open()

    @rule(partition=partitions, garbage=st.binary(min_size=1, max_size=300))
    def writer_dies_in_an_append(self, partition: int, garbage: bytes) -> None:
        files = sorted(self.directory(partition).glob("*.log"))
        if files:
            with files[-1].open("ab") as file:
                file.write(garbage)

    @rule(partition=partitions, garbage=st.binary(min_size=0, max_size=300))
    def power_is_cut(self, partition: int, garbage: bytes) -> None:
        """The state record is not to be believed any more: all processes are gone, it is made anew."""
        self.writer_dies_in_an_append(partition, garbage)
        for who in range(2):
            self.process_restarts(who)
        (self.directory(partition) / "state").unlink()
        self.readers = []

    @rule(partition=partitions, damage=st.sampled_from(["gone", "torn", "flipped"]))
    def index_is_damaged(self, partition: int, damage: str) -> None:
        for path in self.directory(partition).glob("*.idx"):
            data = bytearray(path.read_bytes())
            if damage == "gone":
                path.unlink()
            elif damage == "torn":
                path.write_bytes(data[:-5])
            elif data:
                data[len(data) // 2] ^= 0x10
                path.write_bytes(data)

    @precondition(lambda self: self.memory.latest("t", 0) > 50)
    @rule(who=st.integers(0, 1))
    def create_again(self, who: int) -> None:
        self.memory.delete_topic("t")
        self.logs[who].delete_topic("t")
        self.memory.create_topic("t", PARTITIONS)
        self.logs[1 - who].create_topic("t", PARTITIONS)

    @invariant()
    def ends_are_the_same_in_every_process(self) -> None:
        if not self.memory.topics():
            return
        for partition in range(PARTITIONS):
            for log in self.logs:
                assert log.latest("t", partition) == self.memory.latest("t", partition)


TestSameAsMemory = SameAsMemory.TestCase
TestSameAsMemory.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
