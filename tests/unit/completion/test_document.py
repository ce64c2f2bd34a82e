# SPDX-License-Identifier: Apache-2.0
"""docs/completion.md shows the machines' own tables; `python tests/unit/completion/test_document.py` writes them."""

from __future__ import annotations

from pathlib import Path

from cremant.completion import breaker, replica, segment
from cremant.model.completion import CompletionMode, StorePolicy
from cremant.model.limits import COMMIT_LEASE_MS, UPLOAD_WAIT_MS

DOCUMENT = Path(__file__).parents[3] / "docs" / "completion.md"
TABLES = {
    "transitions of the controller": segment.transition_table,
    "transitions of a replica": replica.transition_table,
    "transitions of the breaker": breaker.transition_table,
}


def with_tables(text: str) -> str:
    for section, table in TABLES.items():
        begin, end = f"<!-- {section} -->\n", f"<!-- end of {section} -->"
        head, rest = text.split(begin, 1)
        text = head + begin + table() + "\n" + end + rest.split(end, 1)[1]
    return text


def test_the_document_shows_the_tables_of_the_machines() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text) == text


def test_the_document_names_every_policy_and_mode_with_the_bounds_in_force() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for word in (*StorePolicy, *CompletionMode):
        assert str(word) in text
    assert f"0 to {COMMIT_LEASE_MS // 2 - 1:,}" in text
    assert f"| {UPLOAD_WAIT_MS:,} |" in text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
