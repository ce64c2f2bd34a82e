# SPDX-License-Identifier: Apache-2.0
"""JSON_MATCH by evaluation: conditions on one array speak of one element, exclusive ones of the whole document."""

from __future__ import annotations

import pytest

from cremant.exec.json_match import JsonFilter

DOCUMENT = {
    "name": "a", "n": {"x": 3.5}, "none": None,
    "items": [{"id": 1, "ok": True, "tags": ["p", "q"]}, {"id": 7, "ok": False}],
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [
    ("\"$.name\" = 'a'", True), ("\"$.name\" = 'b'", False), ("\"$.n.x\" > 3", True), ("\"$.n.x\" >= 4", False),
    ("\"$.items[*].id\" = 7", True), ("\"$.items[*].id\" = 7 AND \"$.items[*].ok\" = 'true'", False),
    ("\"$.items[*].id\" = 7 AND \"$.items[*].ok\" = 'false'", True), ("\"$.items[0].id\" = 1", True),
    ("\"$.items[0].id\" = 7", False), ("\"$.items[*].tags[*]\" = 'q' AND \"$.items[*].id\" = 1", True),
    ("\"$.items[*].tags[*]\" = 'q' AND \"$.items[*].id\" = 7", False), ("\"$.zzz\" IS NULL", True),
    ("\"$.none\" IS NULL", True), ("\"$.name\" IS NOT NULL", True), ("\"$.name\" != 'b'", True),
    ("\"$.items[*].id\" NOT IN (1, 2)", False), ("\"$.items[*].id\" NOT IN (3, 2)", True),
    ("\"$.name\" IN ('x', 'a') OR \"$.n.x\" BETWEEN 9 AND 10", True), ("REGEXP_LIKE(\"$.name\", '^A')", False),
    ("NOT \"$.name\" = 'a'", False), ("'$.name' = 'a'", True), ("\"$.n.x\" = 3.5", True), ("\"$.n.x\" = '3.5'", True),
])  # fmt: skip
def test_a_document_matches_if_one_of_its_records_does(text: str, expected: bool) -> None:
    assert JsonFilter(text).holds(DOCUMENT) is expected


@pytest.mark.parametrize(("text", "message"), [
    ("\"$.a\" = 1 AND \"$.b\" != 2", "must stand alone"), ("bogus(", "cannot read the filter"),
    ("\"$.a\"", "supported are"),
    ("\"$.a\" = 1 LIMIT 3", r"near 'LIMIT' at line 1, column \d+"), ("\"$.a\" = 1 GROUP BY x", "near 'GROUP BY'"),
    ("\"$.a\" = 1; SET x = 1", "cannot read the filter"), ("\"$.a\" = 1 OPTION(x=1)", "near 'OPTION'"),
    ("\"$.a\" = 1 \"$.b\" = 2", "cannot read the filter"), ("\"$.a\" = 1) OR (\"$.b\" = 2", r"near '\)'"),
    ("", "there is no condition"), ("-- nothing", "there is no condition"),
    ("(" * 5_000 + "\"$.a\" = 1" + ")" * 5_000, "nested too deeply"),
    ("\"$.a\" = 1" + " OR \"$.a\" = 1" * 2_500, "at most"),
    ("\"$..a\" = 1", r"keys, \[n\] and \[\*\] only"), ("1 = 1", "begins with a path"),
])  # fmt: skip
def test_what_is_not_supported_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonFilter(text)


def test_arrays_that_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match="combinations"):
        JsonFilter('"$.a[*]" = 1 AND "$.b[*]" = 2').holds({"a": list(range(200)), "b": list(range(200))})
