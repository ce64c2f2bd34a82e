# SPDX-License-Identifier: Apache-2.0
"""Packs hold every candidate once, in the partition of its key, whichever batch it came in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.ingest.candidates import CANDIDATE_SCHEMA
from cremant.ingest.packs import CANDIDATES, packs, partitions_of

KEYS = st.lists(st.binary(min_size=1, max_size=600), max_size=30, unique=True)


def unpacked(pack: bytes) -> list[tuple[bytes, bytes]]:
    """As `keys/Decisions.java` reads it."""
    assert pack[0] == CANDIDATES
    count = int.from_bytes(pack[1:5], "little")
    bounds = np.frombuffer(pack, "<i4", 2 * (count + 1), 5).reshape(2, count + 1)
    keys = 5 + 8 * (count + 1)
    starts = (keys, keys + int(bounds[0, -1]))
    assert len(pack) == starts[1] + int(bounds[1, -1])
    columns = [
        [pack[start + first : start + end] for first, end in pairwise(line)]
        for start, line in zip(starts, bounds.tolist(), strict=True)
    ]
    return list(zip(*columns, strict=True))


@settings(deadline=None)
@given(KEYS, st.integers(1, 5))
def test_every_candidate_is_in_the_partition_of_its_key(keys: list[bytes], partitions: int) -> None:
    ranks = [bytes([len(key) % 256]) * (len(key) % 5 + 24) for key in keys]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(ranks, pa.binary()), pa.array(keys, pa.binary())], schema=CANDIDATE_SCHEMA
    )
    made = [(partition, unpacked(pack)) for partition, pack in packs(batch.slice(1), partitions)]
    assert all(rows == sorted(rows) for _, rows in made), "in the order of keys"
    found = {(partition, key, rank) for partition, rows in made for key, rank in rows}
    alone = [int(partitions_of(pa.array([key], pa.binary()), partitions)[0]) for key in keys]
    assert found == set(list(zip(alone, keys, ranks, strict=True))[1:])


def test_many_candidates_are_several_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cremant.ingest.packs.PACK_CANDIDATES_MAX", 7)
    keys = [number.to_bytes(8, "little") for number in range(40)]
    batch = pa.RecordBatch.from_arrays([pa.array(keys, pa.binary())] * 2, schema=CANDIDATE_SCHEMA)
    made = [len(unpacked(pack)) for _, pack in packs(batch, 1)]
    assert made == [7, 7, 7, 7, 7, 5]


@pytest.mark.parametrize(
    "template", ["%d", "user-%08d", "a long name in common, then %d", "%d then a long name in common"]
)
def test_partitions_get_equally_many_keys(template: str) -> None:
    keys = pa.array([(template % number).encode() for number in range(20_000)], pa.binary())
    for partitions in (2, 3, 8):
        counts = np.bincount(partitions_of(keys, partitions), minlength=partitions)
        assert counts.max() < 1.1 * counts.min()


def test_the_partition_of_a_key_never_changes() -> None:
    """States are made with it (`coordinator.VERSION`)."""
    keys = pa.array([b"a", b"b", b"key", b"another key", bytes(300)], pa.binary())
    assert partitions_of(keys, 1_000_000).tolist() == [929686, 771606, 845438, 585033, 382966]
