# SPDX-License-Identifier: Apache-2.0
"""`python -m bench all`: one benchmark that fails or hangs costs its own figures, not those of the others. And the
arithmetic of gaps in what is visible."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from bench import commit, everything, upsert
from bench.context import Context, Driven
from bench.soak import RESTING_LOG_BYTES, wait_for_rest
from bench.watch import Series, first_seen, gaps_ms

ARGUMENTS = argparse.Namespace(quick=True, json=None, log="embedded", controller=None, broker=None, kafka=None)


def test_what_hangs_or_fails_is_named_and_the_table_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(**{**vars(ARGUMENTS), "json": str(tmp_path / "all.json")})
    assert everything.run_all(arguments, ("sim", "no-such-benchmark"), deadline_s=0.001) == 1
    printed = capfd.readouterr()
    assert "| Benchmark |" in printed.out
    assert "sim (not done after 0 s), no-such-benchmark (" in printed.err
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8")) == []


def test_what_does_not_end_is_interrupted_and_may_clean_up(tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    program = f"""
import pathlib, time
pathlib.Path({str(tmp_path / "begun")!r}).touch()
try:
    time.sleep(600)
finally:
    pathlib.Path({str(clean)!r}).touch()
"""
    assert everything._run([sys.executable, "-c", program], 5.0) == "not done after 5 s"
    assert clean.exists()
    assert everything._run([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == "exit status 3"
    assert everything._run([sys.executable, "-c", ""], 60.0) == ""


def test_a_table_has_pinots_figures_beside_ours() -> None:
    report = {
        "name": "query",
        "parameters": {"log": "kafka"},
        "metrics": {"point": 1.234, "qps4_point": 1_234.5},
    }
    lines = everything.table([report]).splitlines()
    assert lines[2:] == [
        "| query, kafka log | `point` | 1.2 ms | 11.6 / 5.3 ms |",
        "|  | `qps4_point` | 1,234 1/s | 101 / 450 |",
    ]


def test_a_gap_belongs_to_the_span_that_it_ends_in_and_one_that_goes_on_counts() -> None:
    times = [1.0, 1.1, 1.6, 3.0]
    assert gaps_ms(times, 1.05, 1.7) == pytest.approx([100, 500, 100])
    assert gaps_ms(times, 2.0, 2.5) == pytest.approx([900])
    assert gaps_ms([], 1.0, 3.0) == pytest.approx([2_000])


def test_of_two_replicas_the_one_that_is_further_shows_a_row_first() -> None:
    one, other = Series(), Series()
    for end, at_s in ((10, 1.0), (20, 2.0), (20, 2.5), (30, 4.0)):
        one.saw(end, at_s)
    for end, at_s in ((10, 1.5), (30, 3.0)):
        other.saw(end, at_s)
    assert one.times == [1.0, 2.0, 4.0]
    assert first_seen([one, other]) == [1.0, 2.0, 3.0]


def test_gaps_with_commits_stand_beside_those_without() -> None:
    case = commit.Case({True: [10.0, 30.0], False: [10.0, 20.0]}, {True: [30.0], False: [20.0]}, [1], [1], [1_500.0])
    found = commit.figures(case)
    assert (found["gap_p99"], found["gap_p99_without"], found["longest_ratio"]) == (30.0, 20.0, 1.5)
    metrics = {f"small_{state}_{name}": value for state in commit.STORES for name, value in found.items()}
    row = commit.table(metrics, ["small"]).splitlines()[2]
    assert row.startswith("| small, healthy | 1.5 s | 1 | ")
    assert row.endswith("| 30 / 20 ms | 1.50, 1.50 |")


def test_files_are_judged_when_the_load_has_ended_and_what_is_due_is_gone() -> None:
    looks = iter([(10 * RESTING_LOG_BYTES, 0), (RESTING_LOG_BYTES, 9), (RESTING_LOG_BYTES, 0)])
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    rest = wait_for_rest(lambda: next(looks), 60.0, clock=lambda: now[0], sleep=sleep)
    assert rest.is_small
    assert rest.after_s == now[0] > 0
    leak = wait_for_rest(lambda: (RESTING_LOG_BYTES + 1, 0), 60.0, clock=lambda: now[0], sleep=sleep)
    assert not leak.is_small
    assert leak.after_s >= 60


class Kept:
    """A stream that keeps what is appended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []

    def create(self, topic: str, partitions: int) -> None:
        pass

    def append(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        self.rows += [json.loads(value) for value in values]

    def flush(self) -> None:
        pass

    def properties(self, topic: str) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("chunks", [upsert.versions_of(25_000, 900), upsert.mostly_in_force(25_000)])
def test_the_answer_of_a_feed_is_that_of_its_newest_rows(chunks: Iterator[np.ndarray]) -> None:
    stream = Kept()
    feed = upsert.Feed(Driven(None, stream, None))  # type: ignore[arg-type]  # no cluster
    feed.fill(Context(quick=True), chunks)
    newest = {row["id"]: row for row in sorted(stream.rows, key=lambda row: row["ts"])}
    assert feed.rows == len(stream.rows) == 25_000
    assert feed.keys == len(newest) in (900, 22_500)
    assert feed.answer == [[len(newest), sum(row["quantity"] for row in newest.values())]]
