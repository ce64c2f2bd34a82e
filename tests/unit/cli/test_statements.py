# SPDX-License-Identifier: Apache-2.0
"""Statements of a conversation: where they end, and where an error is."""

from __future__ import annotations

import io
import sys

import pytest

from cremant.cli.find import Target
from cremant.cli.options import Format
from cremant.cli.repl import Repl, run_script
from cremant.cli.statements import caret, is_complete, split_statements


@pytest.mark.parametrize(
    ("text", "statements", "rest"),
    [
        ("SELECT 1;", ["SELECT 1"], ""),
        ("SELECT 1; SELECT 2;\n", ["SELECT 1", "SELECT 2"], "\n"),
        ("SELECT ';' FROM t;", ["SELECT ';' FROM t"], ""),
        ("SELECT 'it''s;' ;x", ["SELECT 'it''s;'"], "x"),
        ('SELECT ";" FROM `a;b`;', ['SELECT ";" FROM `a;b`'], ""),
        ("SELECT 1 -- one; two\n;", ["SELECT 1 -- one; two"], ""),
        ("SELECT /* ; */ 1;", ["SELECT /* ; */ 1"], ""),
        ("SELECT 'open;", [], "SELECT 'open;"),
        ("SELECT /* open;", [], "SELECT /* open;"),
        (";;SELECT 1;;", ["SELECT 1"], ""),
        ("SET a = 1; SELECT 1; SELECT 2;", ["SET a = 1; SELECT 1", "SELECT 2"], ""),
        ("SET a = 1;", [], "SET a = 1;"),
        ("\\d\nSELECT 1;\n", ["\\d", "SELECT 1"], "\n"),
        ("SELECT 1;\n  \\d it's\r\nSELECT 2", ["SELECT 1", "\\d it's"], "\nSELECT 2"),
        ("-- all\n\\d\n", ["\\d"], "\n"),
        ("SELECT 1; \\x\nSELECT 2;", ["SELECT 1", "\\x", "SELECT 2"], ""),
        ("SET a = 1;\n\\d\nSELECT 1;", ["\\d", "SET a = 1;\nSELECT 1"], ""),
        ("SELECT 'a\n\\d\n';", ["SELECT 'a\n\\d\n'"], ""),
        ("SELECT 1\n\\d\n;", ["SELECT 1\n\\d"], ""),
        ("\\d", ["\\d"], ""),
    ],
)
def test_statements_end_at_semicolons_that_are_not_quoted(text: str, statements: list[str], rest: str) -> None:
    assert split_statements(text) == (statements, rest)


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("SELECT 1;", True),
        ("SELECT 1", False),
        ("SELECT 1; -- done", True),
        ("SELECT ';", False),
        ("SET a = 1;", False),
        ("", True),
    ],
)
def test_enter_sends_what_is_complete(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


@pytest.mark.parametrize(
    ("sql", "message", "drawn"),
    [
        ("SELECT a FROM t WHERE (", "Something is missing near '(' at line 1, column 23", "^"),
        ("SELECT a\nFROM t GROUPBY a", "Expected x near 'GROUPBY' at line 2, column 14", "^^^^^^^"),
        ("SELECT sensr FROM readings", "Unknown columnName 'sensr' found in the query", "^^^^^"),
    ],
)
def test_an_error_is_shown_below_the_text_it_is_about(sql: str, message: str, drawn: str) -> None:
    line, marks = caret(sql, message).split("\n")
    assert line in sql.splitlines()
    at = marks.index("^")
    assert marks.strip() == drawn
    assert f"'{line[at : at + len(drawn)]}'" in message


@pytest.mark.parametrize("text", ["", " ;\n", "-- done", "/* a\nb */ ;", "-- a\n-- b\n"])
def test_comments_alone_are_asked_of_nobody(text: str) -> None:
    nobody = Repl(Target(controller="http://127.0.0.1:9", broker="http://127.0.0.1:9", log_dir=None), Format.CSV, "")
    assert nobody.run(text)
    assert not nobody.run(f"{text}\nSELECT 1")
    nobody.close()


def test_a_script_ends_with_the_status_of_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(controller="http://127.0.0.1:9", broker="http://127.0.0.1:9", log_dir=None)
    for script, status in (("SELECT 1; SELECT 2;", 1), ("\\nothing\n", 2)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(script))
        with pytest.raises(SystemExit) as ended:
            run_script(target, Format.CSV, "")
        assert ended.value.code == status


def test_a_line_that_begins_with_a_backslash_is_a_command_of_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = Target(controller="http://127.0.0.1:9", broker="http://127.0.0.1:9", log_dir=None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\\format json\n\\timing\n-- and out\n\\q\nSELECT 1;"))
    run_script(nobody, Format.TABLE, "")
    assert "timing: off" in capsys.readouterr().err


def test_an_error_without_a_place_has_no_caret() -> None:
    assert caret("SELECT 1", "no broker is alive") == ""
    assert caret("SELECT 1", "near 'x' at line 7, column 1") == ""


def test_a_long_line_is_cut_around_the_place() -> None:
    sql = "SELECT " + "a, " * 100 + "wrong FROM t"
    line, marks = caret(sql, "Unknown columnName 'wrong'").split("\n")
    assert len(line) <= 100
    assert line[marks.index("^") :].startswith("wrong")
