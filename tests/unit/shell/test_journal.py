# SPDX-License-Identifier: Apache-2.0
"""Journals: what names a segment is kept, bounded, and told again, whatever happened to the file."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cremant.shell.journal import Journal
from cremant.shell.logs import cause, log_event

_log = logging.getLogger("test_journal")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal", "server", "Server_a_1", bytes_max=4_000)
    _log.setLevel(logging.INFO)
    _log.addHandler(made)
    yield made
    _log.removeHandler(made)


def test_events_that_name_a_segment_are_told_in_order_with_who_and_why(journal: Journal) -> None:
    with cause("c1"):
        log_event(_log, "segment built", segment="t__0__1__x", rows=7)
    log_event(_log, "something else", rows=1)
    log_event(_log, "segment built", segment="t__0__2__x", rows=8)
    log_event(_log, "segments deleted", segments=["t__0__1__x", "t__0__3__x"])
    first, second = journal.story("t__0__1__x")
    assert (first["event"], first["rows"], first["cause"], first["instance"]) == (
        "segment built",
        7,
        "c1",
        "Server_a_1",
    )
    assert first["at"] <= second["at"]
    assert second["event"] == "segments deleted"
    assert journal.story("t__0__1") == []


def test_repetitions_are_left_out_until_something_else_happens(journal: Journal) -> None:
    for _ in range(5):
        log_event(_log, "segment consumed", segment="s", status="HOLD", elapsed_ms=3)
    log_event(_log, "segment consumed", segment="another", status="HOLD")
    log_event(_log, "segment consumed", segment="s", status="HOLD", elapsed_ms=4)
    log_event(_log, "segment consumed", segment="s", status="KEEP")
    log_event(_log, "segment consumed", segment="s", status="HOLD")
    assert [event["status"] for event in journal.story("s")] == ["HOLD", "KEEP", "HOLD"]


def test_damaged_and_torn_lines_cost_only_themselves(journal: Journal, tmp_path: Path) -> None:
    for number in range(3):
        log_event(_log, "event", segment="s", number=number)
    path = tmp_path / "journal" / "events.jsonl"
    data = bytearray(path.read_bytes())
    data[data.index(b'"number":1') + 9] = ord("7")
    path.write_bytes(bytes(data) + b"0badf00d {torn")
    _log.removeHandler(journal)
    again = Journal(tmp_path / "journal", "server", "Server_a_1")
    _log.addHandler(again)
    log_event(_log, "event", segment="s", number=9)
    _log.removeHandler(again)
    assert [event["number"] for event in again.story("s")] == [0, 2, 9]


def test_two_files_of_bounded_size_are_kept(journal: Journal, tmp_path: Path) -> None:
    for number in range(200):
        log_event(_log, "event", segment="s", number=number)
    files = sorted((tmp_path / "journal").iterdir())
    assert [file.name for file in files] == ["events.1.jsonl", "events.jsonl"]
    assert all(file.stat().st_size < 5_000 for file in files)
    numbers = [event["number"] for event in journal.story("s")]
    assert numbers == list(range(numbers[0], 200))
    assert 10 < len(numbers) < 100


def test_an_event_that_could_not_be_written_is_no_repetition(journal: Journal, tmp_path: Path) -> None:
    directory, away = tmp_path / "journal", tmp_path / "away"
    log_event(_log, "event", segment="s", number=1)
    directory.rename(away)
    log_event(_log, "event", segment="s", number=2)
    with (away / "events.jsonl").open("ab") as file:
        file.write(b"0badf00d {half a line of the write that failed")
    away.rename(directory)
    log_event(_log, "event", segment="s", number=2)
    assert journal.dropped == 1
    assert [event["number"] for event in journal.story("s")] == [1, 2]


def test_a_journal_that_cannot_be_written_is_in_nobodys_way(journal: Journal, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "journal")
    log_event(_log, "event", segment="s", number=1)
    assert journal.dropped == 1
    assert journal.story("s") == []
