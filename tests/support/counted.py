# SPDX-License-Identifier: Apache-2.0
"""What a query that counts rows was answered: how many, or why it was not."""

from __future__ import annotations

from typing import Any


def rows(answer: dict[str, Any]) -> int:
    """Of an answer that is complete."""
    assert not answer["exceptions"], answer["exceptions"]
    found: int = answer["resultTable"]["rows"][0][0]
    return found


def message(answer: dict[str, Any]) -> str:
    """Why its demand is not met."""
    assert [one["errorCode"] for one in answer["exceptions"]] == [305], answer["exceptions"]
    text: str = answer["exceptions"][0]["message"]
    return text
