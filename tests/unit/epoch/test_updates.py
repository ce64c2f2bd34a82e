# SPDX-License-Identifier: Apache-2.0
"""Updates as blocks and as sets, against Python's own sets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cremant.epoch.format import UpdateHead
from cremant.epoch.records import DELETE, INSERT, EpochMark, Fence, PartitionMark, UpdateBlock
from cremant.epoch.scan import PartitionScan
from cremant.epoch.start import ReadTo
from cremant.epoch.updates import NO_UPDATES, UpdateSet, contradiction, update_block
from cremant.model.errors import InvariantViolation
from cremant.model.offsets import Position

#: Offsets near each other, and so far apart that they do not fit into one integer beside the sub-row.
OFFSETS = st.integers(0, 5) | st.integers(2**31, 2**31 + 3) | st.just(2**62)
ROWS = st.dictionaries(st.tuples(OFFSETS, st.integers(0, 2) | st.just(2**31 - 1)), st.sampled_from((INSERT, DELETE)))


def block_of(rows: dict[tuple[int, int], int]) -> UpdateBlock:
    return update_block(
        generation=1, epoch=1, offsets=[o for o, _ in rows], sub_rows=[s for _, s in rows], ops=list(rows.values())
    )


def listed(batch) -> list[tuple[int, int, int]]:  # type: ignore[no-untyped-def]
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


@settings(max_examples=200, deadline=None)
@given(blocks=st.lists(ROWS, max_size=6))
def test_a_set_of_blocks_has_each_update_once_in_order(blocks: list[dict[tuple[int, int], int]]) -> None:
    kept = UpdateSet()
    for rows in blocks:
        kept.add(block_of(rows))
    expected = sorted({(o, s, op) for rows in blocks for (o, s), op in rows.items()})
    found = kept.distinct()
    assert listed(found) == expected
    assert kept.written == sum(map(len, blocks))
    assert bool(contradiction(found)) == (len({(o, s) for o, s, _ in expected}) < len(expected))
    assert found.schema == NO_UPDATES.schema


def test_a_block_is_sorted_and_its_hash_does_not_depend_on_the_order_it_was_given() -> None:
    one = block_of({(5, 0): DELETE, (1, 1): INSERT, (1, 0): INSERT})
    other = block_of({(1, 0): INSERT, (1, 1): INSERT, (5, 0): DELETE})
    assert one == other
    assert listed(one.batch) == [(1, 0, INSERT), (1, 1, INSERT), (5, 0, DELETE)]
    assert one.content_hash != block_of({(1, 0): INSERT, (1, 1): INSERT, (5, 0): INSERT}).content_hash


@pytest.mark.parametrize(
    ("ops", "words"), [([INSERT, INSERT], "two updates of one row"), ([INSERT, DELETE], "two"), ([0, 2], "ops other")]
)
def test_a_block_says_one_thing_of_a_row(ops: list[int], words: str) -> None:
    with pytest.raises(InvariantViolation, match=words) as refused:
        update_block(generation=1, epoch=3, offsets=[7, 7], sub_rows=[0, 0], ops=ops)
    assert refused.value.rule == "E-4"


def test_the_scan_sees_the_epoch_of_update_blocks() -> None:
    """A fenced pipeline may have got as far as update blocks in partitions without rows: its epoch is used up (E-5)."""
    scan = PartitionScan(ReadTo(0, Position(log_offset=0, epoch=0, generation=0, next_offset=0), 2))
    mark = EpochMark(
        generation=1, epoch=1, previous=0, blocks_generation=1, config_version=1,
        partitions=(PartitionMark(end=3, rows=3),),
    )  # fmt: skip
    heads = [Fence(generation=1), mark, UpdateHead(generation=1, epoch=2, updates=1, content_hash=""),
             Fence(generation=2)]  # fmt: skip
    for offset, head in enumerate(heads):
        scan.add(offset, head)
    assert (scan.closed_epoch, scan.epoch_max, scan.done) == (1, 2, True)
