# SPDX-License-Identifier: Apache-2.0
"""Ideal state, external view, copies, retention, trimming."""

from __future__ import annotations

from typing import Any

import msgspec

from cremant.cluster.partitions import open_partition
from cremant.cluster.retention import expired, hidden
from cremant.cluster.states import external_view, ideal_state, new_copies
from cremant.model.cluster import Expiry, InstanceReport, SegmentReport, TailReport
from cremant.model.offsets import Position, Watermark
from cremant.model.segments import Copy, ReplicaState, SegmentMetadata, SegmentStatus

RECORD, OPEN = open_partition("t", 0, 0, ("s1", "s2"), 0)


def _done(sequence: int, **fields: Any) -> SegmentMetadata:
    changes: dict[str, Any] = {
        "name": f"t__0__{sequence}__x", "sequence": sequence, "status": SegmentStatus.DONE, "checksum": "c1", **fields,
    }  # fmt: skip
    return msgspec.structs.replace(OPEN, **changes)


def _tail(partition: int = 0, incarnation: str = "i1", error: str | None = None) -> TailReport:
    return TailReport(
        table="t", incarnation=incarnation, partition=partition, first_offset=0, rows=0, error=error,
        watermark=Watermark(next_offset=0, epoch=0),
    )  # fmt: skip


def _view(*segments: SegmentMetadata, **reports: InstanceReport) -> Any:
    return external_view("t", "i1", [RECORD], {s.name: s for s in (OPEN, *segments)}, reports)


def test_the_ideal_state_wants_sealed_segments_online_and_open_ones_consuming() -> None:
    done = _done(7, replicas=("s2",))
    assert ideal_state([RECORD], [OPEN, done]) == {
        OPEN.name: {"s1": "CONSUMING", "s2": "CONSUMING"},
        done.name: {"s2": "ONLINE"},
    }


def test_the_external_view_has_what_live_servers_report() -> None:
    online = SegmentReport(table="t", segment=_done(7).name, state=ReplicaState.ONLINE, checksum="c1")
    seen = _view(_done(7), s1=InstanceReport(segments=(online,), tails=(_tail(),)), s2=InstanceReport())
    assert seen == {OPEN.name: {"s1": "CONSUMING"}, _done(7).name: {"s1": "ONLINE"}}


def test_a_replica_with_other_content_is_in_error() -> None:
    other = SegmentReport(table="t", segment=_done(7).name, state=ReplicaState.ONLINE, checksum="c2")
    assert _view(_done(7), s1=InstanceReport(segments=(other,)))[_done(7).name] == {"s1": "ERROR"}


def test_a_segment_sealed_before_its_commit_counts_as_consuming() -> None:
    committing = msgspec.structs.replace(OPEN, status=SegmentStatus.COMMITTING)
    said = SegmentReport(table="t", segment=OPEN.name, state=ReplicaState.ONLINE, checksum="c9")
    seen = external_view("t", "i1", [RECORD], {OPEN.name: committing}, {"s1": InstanceReport(segments=(said,))})
    assert seen == {OPEN.name: {"s1": "CONSUMING"}}


def test_reports_of_other_incarnations_tables_and_unknown_segments_do_not_count() -> None:
    strange = SegmentReport(table="t", segment="t__0__99__x", state=ReplicaState.ONLINE)
    foreign = SegmentReport(table="u", segment=OPEN.name, state=ReplicaState.ONLINE)
    report = InstanceReport(segments=(strange, foreign), tails=(_tail(incarnation="old"), _tail(partition=5)))
    assert _view(s1=report) == {}


def test_a_tail_that_stopped_is_in_error() -> None:
    assert _view(s1=InstanceReport(tails=(_tail(error="E-4"),))) == {OPEN.name: {"s1": "ERROR"}}


def test_a_holder_of_the_committed_content_registers_once() -> None:
    said = SegmentReport(table="t", segment="x", state=ReplicaState.ONLINE, checksum="c1")
    copies = new_copies(_done(1), "s2", said, 5)
    assert copies == {"s2": Copy(checksum="c1", verified_at_ms=5)}
    assert new_copies(_done(1, copies=copies), "s2", said, 9) is None


def test_other_content_and_uncommitted_segments_register_no_copy() -> None:
    other = SegmentReport(table="t", segment="x", state=ReplicaState.ONLINE, checksum="c2")
    assert new_copies(_done(1), "s2", other, 5) is None
    assert new_copies(OPEN, "s2", msgspec.structs.replace(other, checksum="c1"), 5) is None
    assert new_copies(_done(1), "another", msgspec.structs.replace(other, checksum="c1"), 5) is None, "no replica"


def test_a_holder_that_reports_an_error_is_no_copy_any_more() -> None:
    broken = SegmentReport(table="t", segment="x", state=ReplicaState.ERROR)
    held = {"s1": Copy(checksum="c1", verified_at_ms=0), "s2": Copy(checksum="c1", verified_at_ms=0)}
    assert list(new_copies(_done(1, copies=held), "s2", broken, 5) or {}) == ["s1"]


def test_a_holder_that_waits_for_versions_stays_one() -> None:
    held = {"s1": Copy(checksum="c1", verified_at_ms=0)}
    waits = SegmentReport(table="t", segment="x", state=ReplicaState.OFFLINE, checksum="c1")
    assert new_copies(_done(1, copies=held), "s1", waits, 5) is None
    assert new_copies(_done(1), "s2", waits, 5) is None, "it becomes one once it serves them"


def test_retention_takes_sealed_segments_whose_newest_row_is_too_old() -> None:
    old, young, timeless = _done(1, max_time_ms=99), _done(2, max_time_ms=100), _done(3, created_ms=50)
    assert [s.sequence for s in expired([timeless, young, old, OPEN], 900, 1000)] == [1, 3]
    assert expired([old], None, 10**9) == []


def test_where_keys_expire_a_segment_is_hidden_once_all_of_its_rows_were_there_to_expire() -> None:
    end = Position(log_offset=9, epoch=7, generation=1, next_offset=9)
    old, young = _done(1, max_time_ms=99, end=end), _done(2, max_time_ms=100, end=end)
    assert [s.sequence for s in hidden([young, old], Expiry(epoch=8, before_ms=100))] == [1]
    assert hidden([old], Expiry(epoch=7, before_ms=100)) == [], "it holds rows of the seed's own epoch or later"
    assert hidden([old], None) == []
