# SPDX-License-Identifier: Apache-2.0
"""How a run of acceptance suites is judged: strict all ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from acceptance import WHOLE, conclude, judge, read_expected, unknown_suites


def report(**problems: list[str]) -> dict[str, Any]:
    """Of a suite `s`: query id -> its problems."""
    queries = [{"id": name, "sql": "SELECT 1", "phase": "", "problems": found} for name, found in problems.items()]
    return {"suite": "s", "queries": queries, "load_seconds": 1.0}


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        ({"wrong": "not yet"}, ""),
        ({}, "failed: s/wrong"),
        ({"wrong": "not yet", "right": "not yet"}, "passes, although listed as failing (not yet): s/right"),
        ({"wrong": "not yet", "gone": "not yet"}, "listed, but the suite has no such query: s/gone"),
    ],
)
def test_a_list_that_does_not_fit_fails_the_run(
    expected: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = judge(report(right=[], wrong=["7 instead of 8"]), expected)
    status = conclude([verdict], {"s": expected}, ["s"], {}, [], 1.0)
    output = capsys.readouterr().out
    assert (status, told in output) == (bool(told), True), output


def test_what_is_listed_of_suites_that_are_not_there_or_refused_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suites" / "s").mkdir(parents=True)
    expected = {"s": {WHOLE: "refused", "q": "not yet"}, "t": {"q": "not yet"}}
    unknown = unknown_suites(tmp_path, expected)
    assert unknown == ["t"]
    assert conclude([], expected, [], {"s": []}, unknown, 1.0) == 1
    output = capsys.readouterr().out
    assert "no such suite: t" in output
    assert "s/q says nothing" in output
    assert conclude([], {"s": {WHOLE: "refused"}}, [], {"s": []}, [], 1.0) == 0


def test_a_line_without_a_reason_is_refused(tmp_path: Path) -> None:
    listed = tmp_path / "listed.txt"
    listed.write_text("# comment\n\ns/q  because\ns/*  as well\n", encoding="utf-8")
    assert read_expected(listed) == {"s": {"q": "because", WHOLE: "as well"}}
    listed.write_text("s/q\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"listed\.txt:1"):
        read_expected(listed)
