# SPDX-License-Identifier: Apache-2.0
"""What the memory log can show beyond the contract: holes, exact expiry, the same names in every run."""

from __future__ import annotations

import pytest

from cremant.log.api import Message, OffsetExpired
from cremant.log.memory import MemoryLog


def test_a_hole_is_read_over() -> None:
    log = MemoryLog(lambda: 1)
    log.create_topic("t", 1)
    log.append("t", 0, [Message(b"a")])
    log.skip("t", 0, 5)
    assert log.append("t", 0, [Message(b"b")]).first_offset == 6
    log.skip("t", 0, 1)
    batch = log.reader("t", 0, 0).read(max_messages=1, max_bytes=10)
    assert batch is not None
    assert (batch.offsets.tolist(), batch.next_offset) == ([0], 6)
    batch = log.reader("t", 0, 3).read(max_messages=10, max_bytes=10)
    assert batch is not None
    assert (batch.offsets.tolist(), batch.next_offset) == ([6], 8)
    assert log.latest("t", 0) == 8


def test_trim_expires_exactly_what_it_is_told() -> None:
    log = MemoryLog(lambda: 1)
    log.create_topic("t", 1)
    log.append("t", 0, [Message(b"a")] * 10)
    log.trim("t", 0, 7)
    assert log.earliest("t", 0) == 7
    with pytest.raises(OffsetExpired):
        log.reader("t", 0, 6).read(max_messages=1, max_bytes=1)


def test_two_runs_have_the_same_incarnations() -> None:
    logs = [MemoryLog(lambda: 1) for _ in range(2)]
    names = [[log.create_topic(name, 1).incarnation for name in ("a", "b")] for log in logs]
    assert names[0] == names[1]
    assert len(set(names[0])) == 2
