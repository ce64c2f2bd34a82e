# SPDX-License-Identifier: Apache-2.0
"""What Tab offers."""

from __future__ import annotations

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from cremant.cli.words import Catalog, Words

COLUMNS = {"readings": ["sensor", "celsius", "ts"], "shop": ["event", "sessions"]}


def offered(text: str) -> list[str]:
    catalog = Catalog(lambda: COLUMNS)
    catalog.columns = COLUMNS
    catalog.functions = ["SUM", "SQRT"]
    words = Words(catalog, ["\\d", "\\q"])
    return [found.text for found in words.get_completions(Document(text), CompleteEvent(completion_requested=True))]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("SEL", "SELECT"),
        ("SELECT * FROM re", "readings"),
        ("SELECT * FROM ", "readings"),
        ("SELECT 1 FROM shop WHERE ev", "event"),
        ("SELECT cel", "celsius"),
        ("SELECT * FROM readings WHERE c", "celsius"),
        ("select s", "sensor"),
        ("SELECT sq", "SQRT"),
        ("\\", "\\d"),
        ("\\d sh", "shop"),
    ],
)
def test_the_first_offer_fits_the_place(text: str, first: str) -> None:
    assert offered(text)[0] == first


def test_columns_are_those_of_the_tables_that_are_named() -> None:
    assert "sessions" not in offered("SELECT 1 FROM readings WHERE se")
    assert {"sensor", "sessions"} <= set(offered("SELECT se"))
