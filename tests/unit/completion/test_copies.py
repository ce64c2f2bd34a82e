# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of sealed segments are: safe, single copies, lost; and what of the epoch log stays because of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.cluster.partitions import open_partition
from cremant.completion.copies import (
    Safety,
    Totals,
    holders_of,
    is_safe,
    misses_store,
    replay_floor,
    safety_of,
    totals,
    trim_floor,
)
from cremant.model.completion import StorePolicy
from cremant.model.offsets import Position
from cremant.model.segments import Copy, Loss, SegmentMetadata, SegmentStatus, StoredVersions, StoreState

RECORD, OPEN = open_partition("t", 0, 0, ("s1", "s2"), 0)
COPY = Copy(checksum="c1", verified_at_ms=0)
LOSS = Loss(at_ms=1, rows=10, start_offset=0, end_offset=10, cause="no disk has it")


def _done(sequence: int, **fields: Any) -> SegmentMetadata:
    changes: dict[str, Any] = {
        "name": f"t__0__{sequence}__x", "sequence": sequence, "status": SegmentStatus.DONE, "checksum": "c1", **fields,
    }  # fmt: skip
    return msgspec.structs.replace(OPEN, **changes)


def test_a_segment_is_safe_with_a_stored_or_two_verified_copies() -> None:
    assert not is_safe(_done(1, copies={"s1": COPY}))
    assert is_safe(_done(1, copies={"s1": COPY, "s2": COPY}))
    assert is_safe(_done(1, store_state=StoreState.STORED))
    assert not is_safe(OPEN)


def _at(segment: SegmentMetadata, log_offset: int) -> SegmentMetadata:
    start = Position(log_offset=log_offset, epoch=1, generation=1, next_offset=0)
    return msgspec.structs.replace(segment, start=start)


def test_the_epoch_log_is_kept_from_the_newest_sealed_segment_on() -> None:
    safe = [_at(_done(n, store_state=StoreState.STORED), n * 100) for n in range(3)]
    following = _at(msgspec.structs.replace(OPEN, sequence=3), 300)
    assert trim_floor([*safe, following]) == 200


def test_the_epoch_log_is_kept_for_every_segment_that_is_not_safe() -> None:
    segments = [_at(_done(n, store_state=StoreState.STORED), n * 100) for n in range(5)]
    segments[1] = _at(_done(1), 100)
    following = _at(msgspec.structs.replace(OPEN, sequence=5), 500)
    assert trim_floor([*segments, following]) == 100


def test_the_epoch_log_is_kept_for_a_live_replica_that_still_reads_it() -> None:
    segments = [
        msgspec.structs.replace(_at(_done(n, store_state=StoreState.STORED), n * 100), start_offset=n * 10)
        for n in range(5)
    ]
    following = msgspec.structs.replace(_at(OPEN, 500), sequence=5, start_offset=50)
    assert trim_floor([*segments, following], [55, 25]) == 200
    assert trim_floor([*segments, following], [55, 51]) == 400


def test_nothing_is_trimmed_before_the_first_segment_is_sealed() -> None:
    assert trim_floor([_at(OPEN, 0)]) == 0
    assert trim_floor([]) == 0


def test_without_sealed_segments_the_log_is_kept_from_the_mark_before_the_open_one() -> None:
    alone = msgspec.structs.replace(_at(OPEN, 500), start_offset=50)
    assert trim_floor([alone]) == 499
    assert trim_floor([alone], [70]) == 499
    assert trim_floor([alone], [49]) == 0, "a live replica still reads what was before"


@pytest.mark.parametrize(
    ("fields", "safety"),
    [
        ({"store_state": StoreState.STORED}, Safety.SAFE),
        ({"copies": {"s1": COPY, "s2": COPY}}, Safety.SAFE),
        ({"copies": {"s1": COPY}}, Safety.SINGLE_COPY),
        ({"copies": {"s1": COPY}, "store_state": StoreState.PENDING}, Safety.SINGLE_COPY),
        ({"copies": {"s1": COPY, "s2": Copy(checksum="c2", verified_at_ms=0)}}, Safety.SINGLE_COPY),
        ({}, Safety.NO_COPY),
        ({"lost": LOSS}, Safety.LOST),
        ({"lost": LOSS, "copies": {"s1": COPY}}, Safety.SINGLE_COPY),
    ],
)
def test_the_safety_of_a_segment_follows_from_its_copies(fields: dict[str, Any], safety: Safety) -> None:
    assert safety_of(_done(1, **fields)) is safety


def test_only_verified_committed_content_makes_a_holder() -> None:
    other = Copy(checksum="c2", verified_at_ms=0)
    assert holders_of(_done(1, copies={"s2": COPY, "s1": COPY, "s3": other})) == ("s1", "s2")


def test_an_upload_is_missing_until_it_is_stored_unless_the_policy_wants_none() -> None:
    for state in (StoreState.NONE, StoreState.PENDING, StoreState.FAILED):
        assert misses_store(_done(1, store_state=state), StorePolicy.STORE_BEST_EFFORT)
        assert not misses_store(_done(1, store_state=state), StorePolicy.PEERS_ONLY)
    assert not misses_store(_done(1, store_state=StoreState.STORED), StorePolicy.STORE_REQUIRED)
    assert not misses_store(OPEN, StorePolicy.STORE_REQUIRED), "not sealed yet"


def test_totals_count_sealed_segments_by_where_they_are() -> None:
    segments = [
        OPEN, _done(1, store_state=StoreState.STORED), _done(2, copies={"s1": COPY}, store_state=StoreState.FAILED),
        _done(3, store_state=StoreState.PENDING), _done(4, lost=LOSS, store_state=StoreState.NONE),
    ]  # fmt: skip
    found = Totals(safe=1, single_copy=1, no_copy=1, lost=1, upload_backlog=3, upload_failed=1)
    assert totals(segments, StorePolicy.STORE_BEST_EFFORT) == found
    assert totals(segments, StorePolicy.PEERS_ONLY).upload_backlog == 0


def test_a_lost_segment_keeps_nothing_of_the_epoch_log() -> None:
    segments = [_at(_done(n, store_state=StoreState.STORED), n * 100) for n in range(5)]
    segments[1] = _at(_done(1, lost=LOSS), 100)
    following = _at(msgspec.structs.replace(OPEN, sequence=5), 500)
    assert trim_floor([*segments, following]) == 400


# --- upsert tables: versions ------------------------------------------------------------------------------------------


def _versions(log_offset: int) -> StoredVersions:
    position = Position(log_offset=log_offset, epoch=1, generation=1, next_offset=0)
    return StoredVersions(url="file:///v", position=position, size_bytes=1, file_checksum="sha256:0")


def _two_copies(sequence: int, **fields: Any) -> SegmentMetadata:
    return _at(_done(sequence, copies={"s1": COPY, "s2": COPY}, **fields), sequence * 100)


@pytest.mark.parametrize(
    ("snapshots", "floor"),
    [
        ({}, 100),
        ({"s1": 900}, 100),
        ({"s1": 900, "s2": 800}, 800),
        ({"s1": 900, "s2": 800, "s3": 950}, 800),
        ({"s1": 900, "s2": 800, "s3": 50}, 50),
    ],
    ids=[
        "no snapshot",
        "one could be lost",
        "the older of two",
        "no holder, no copy",
        "a live replica reads from there",
    ],
)
def test_the_log_is_kept_from_the_newest_snapshot_that_survives_any_one_server(
    snapshots: dict[str, int], floor: int
) -> None:
    assert replay_floor(_two_copies(1), snapshots) == floor


def test_a_stored_snapshot_survives_every_server() -> None:
    stored = _two_copies(1, store_state=StoreState.STORED, versions=_versions(700))
    assert replay_floor(stored, {}) == 700
    assert replay_floor(stored, {"s1": 900, "s2": 800}) == 800, "two newer ones do, too"
    assert replay_floor(stored, {"s1": 900, "s2": 600}) == 600, "a live replica goes on from its own"
    gone = msgspec.structs.replace(stored, store_state=StoreState.FAILED)
    assert replay_floor(gone, {}) == 100, "a snapshot without its rows is no copy"


def test_one_cold_segment_keeps_the_log_that_its_versions_need() -> None:
    segments = [_two_copies(n) for n in range(4)]
    following = _at(msgspec.structs.replace(OPEN, sequence=4), 400)
    fresh = {segment.name: {"s1": 950, "s2": 950} for segment in segments}
    assert trim_floor([*segments, following], snapshots=fresh) == 300
    assert trim_floor([*segments, following], snapshots={**fresh, segments[1].name: {"s1": 950, "s2": 150}}) == 150
    assert trim_floor([*segments, following], snapshots={**fresh, segments[1].name: {"s1": 950}}) == 100
    assert trim_floor([*segments, following]) == 300, "append tables need no versions"


def test_a_lost_segment_of_an_upsert_table_keeps_nothing() -> None:
    segments = [_two_copies(n) for n in range(4)]
    segments[1] = msgspec.structs.replace(segments[1], lost=LOSS, copies={})
    following = _at(msgspec.structs.replace(OPEN, sequence=4), 400)
    fresh = {segment.name: {"s1": 950, "s2": 950} for segment in segments if segment.lost is None}
    assert trim_floor([*segments, following], snapshots=fresh) == 300


@given(
    snapshots=st.lists(
        st.dictionaries(st.sampled_from(["s1", "s2", "s3"]), st.integers(0, 900)), min_size=3, max_size=3
    ),
    copies=st.lists(st.sets(st.sampled_from(["s1", "s2", "s3"])), min_size=3, max_size=3),
    stored=st.lists(st.none() | st.integers(0, 900), min_size=3, max_size=3),
    lost=st.sampled_from(["s1", "s2", "s3"]),
)
def test_whoever_is_lost_versions_can_be_brought_up_to_date(
    snapshots: list[dict[str, int]], copies: list[set[str]], stored: list[int | None], lost: str
) -> None:
    segments = []
    for number in range(3):
        at = stored[number]
        segment = _at(_done(number, copies=dict.fromkeys(copies[number], COPY)), number * 100)
        if at is not None:
            segment = msgspec.structs.replace(segment, store_state=StoreState.STORED, versions=_versions(at))
        segments.append(segment)
    following = _at(msgspec.structs.replace(OPEN, sequence=3), 300)
    said = {segment.name: positions for segment, positions in zip(segments, snapshots, strict=True)}
    floor = trim_floor([*segments, following], snapshots=said)
    for segment in segments:
        # What is left of it when a server is lost: its snapshots, and the beginning of its range.
        sources = [segment.start.log_offset]
        sources += [segment.versions.position.log_offset] if segment.versions is not None else []
        sources += [at for name, at in said[segment.name].items() if name in segment.copies and name != lost]
        assert any(at >= floor for at in sources)
        assert all(at >= floor for at in said[segment.name].values()), "no live replica falls off the log"
