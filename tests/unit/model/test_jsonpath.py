# SPDX-License-Identifier: Apache-2.0
"""JSON paths: what each form finds, and what is no path."""

from __future__ import annotations

from typing import Any

import pytest

from cremant.model.jsonpath import MISSING, canonical, parse_path

DOCUMENT = {"a": {"b": [{"c": 1}, {"c": 2}], "x y": 3}, "k1": 5, "d-e": 7, "it's": 8}


@pytest.mark.parametrize(("path", "expected"), [
    ("$", DOCUMENT), ("$.a.b[0].c", 1), ("$.a.b[*].c", [1, 2]), ("$['a']['x y']", 3), ("$..c", [1, 2]),
    ("$.a.b[-1].c", 2), ("$.a.b[0:1].c", [1]), ("$.a.b[0,1].c", [1, 2]), ("$.d-e", 7), ("$['k1','d-e']", [5, 7]),
    ("$.nope", MISSING), ("$.a.b[7]", MISSING), ("$.k1.x", MISSING), ("$.a['b'][1]", {"c": 2}), ("$[\"k1\"]", 5),
    ("$['it\\'s']", 8), ("$.*", list(DOCUMENT.values())), (" $.k1 ", 5),
])  # fmt: skip
def test_a_path_finds_what_it_names(path: str, expected: Any) -> None:
    found = parse_path(path).find(DOCUMENT)
    assert found is MISSING if expected is MISSING else found == expected


@pytest.mark.parametrize(
    "path", ["", "a", "$a", "$.", "$..", "$.a[", "$.a[?(@.b)]", "$.a.length()", "$[a]", "$.a b[", "$'a'"]
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="JSON path"):
        parse_path(path)


def test_ways_are_written_in_brackets() -> None:
    ways = [canonical(way) for way, _ in parse_path("$.a.b[*].c").walk(DOCUMENT)]
    assert ways == ["$['a']['b'][0]['c']", "$['a']['b'][1]['c']"]
