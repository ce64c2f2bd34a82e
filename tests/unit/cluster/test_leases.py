# SPDX-License-Identifier: Apache-2.0
"""Pipeline leases, generations, bases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.cluster.leases import (
    holder_name,
    instance_of,
    is_held,
    next_generation,
    nonce_of,
    release,
    set_base,
    take,
)
from cremant.model.cluster import PipelineRecord, Rewind
from cremant.model.errors import Conflict, Fenced

FREE = PipelineRecord()


def _held(holder: str = "a", until_ms: int = 100) -> PipelineRecord:
    return PipelineRecord(holder=holder, lease_until_ms=until_ms)


def test_a_free_lease_is_taken_and_renewed_by_its_holder() -> None:
    taken = take(FREE, "a", 0, 100)
    assert taken == _held("a", 100)
    assert take(_held(), "a", 50, 100) == _held("a", 150)


def test_a_running_lease_is_refused_to_others_and_a_lapsed_one_is_not() -> None:
    assert take(_held(), "b", 99, 100) is None
    assert take(_held(), "b", 100, 100) == _held("b", 200)


def test_a_holder_known_to_be_replaced_loses_the_lease_at_once() -> None:
    assert take(_held(), "b", 1, 100, replaced=True) == _held("b", 101)


def test_a_released_lease_is_free_and_only_its_holder_releases_it() -> None:
    assert release(_held(), "b") == _held()
    assert not is_held(release(_held(), "a"), 0)


def test_only_the_holder_of_a_running_lease_gets_a_generation() -> None:
    assert next_generation(_held(), "a", 50).generation == 1
    for record, holder, now_ms in ((_held(), "b", 50), (_held(), "a", 100), (FREE, "a", 0)):
        with pytest.raises(Fenced):
            next_generation(record, holder, now_ms)


def test_the_base_is_set_only_under_the_generation_in_force_and_never_shrinks() -> None:
    record = PipelineRecord(generation=3, base=10)
    assert set_base(record, 3, 12, "c3").base == 12
    with pytest.raises(Fenced):
        set_base(record, 2, 12, "c2")
    with pytest.raises(Conflict, match="E-5"):
        set_base(record, 3, 9, "c3")


def test_a_holder_names_instance_and_process() -> None:
    holder = holder_name("Pipeline_::1_8100", "abcd")
    assert (instance_of(holder), nonce_of(holder)) == ("Pipeline_::1_8100", "abcd")
    assert (instance_of("plain"), nonce_of("plain")) == ("plain", "")


_steps = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["take", "release", "generation"]), st.integers(0, 80)),
    max_size=60,
)


@given(_steps)
def test_no_two_holders_share_a_generation_and_none_gets_one_without_the_lease(
    steps: list[tuple[str, str, int]],
) -> None:
    record, now_ms, granted = FREE, 0, {}  # type: PipelineRecord, int, dict[int, str]
    for holder, what, wait_ms in steps:
        now_ms += wait_ms
        match what:
            case "take":
                record = take(record, holder, now_ms, 100) or record
            case "release":
                record = release(record, holder)
            case _:
                holds = record.holder == holder and is_held(record, now_ms)
                try:
                    record = next_generation(record, holder, now_ms)
                except Fenced:
                    assert not holds
                    continue
                assert holds
                assert record.generation not in granted
                granted[record.generation] = holder
    assert sorted(granted) == list(range(1, len(granted) + 1))


def test_a_rewind_is_done_once_by_the_start_that_was_told_of_it() -> None:
    asked = Rewind(to_epoch=4, asked_ms=1)
    record = PipelineRecord(generation=3, rewinds=(asked,))
    assert record.rewind == asked
    done = set_base(record, 3, 8, "c", first_epoch=9, rewound=asked)
    assert done.rewind is None
    assert done.rewinds == (Rewind(to_epoch=4, asked_ms=1, next_epoch=9, generation=3),)
    newer = PipelineRecord(generation=3, rewinds=(Rewind(to_epoch=2, asked_ms=5),))
    assert set_base(newer, 3, 8, "c", first_epoch=9, rewound=asked).rewind is not None, "another one was asked since"


def test_a_table_has_its_keys_from_the_first_epoch_that_is_closed_with_them() -> None:
    """A seed that was not closed gave none: the next one begins as the first did."""
    fresh = set_base(PipelineRecord(generation=1), 1, 5, "c", first_epoch=5, previous=4, keyed=True)
    assert fresh.keyed_from == 5
    again = set_base(fresh, 1, 6, "c", first_epoch=6, previous=4, keyed=True)
    assert again.keyed_from == 6
    later = set_base(again, 1, 9, "c", first_epoch=9, previous=8, keyed=True)
    assert later.keyed_from == 6
    rewound = set_base(later, 1, 12, "c", first_epoch=12, previous=3, keyed=True)
    assert rewound.keyed_from == 12, "taken back to before it had keys"
    assert set_base(PipelineRecord(generation=1), 1, 5, "c", first_epoch=5).keyed_from is None
