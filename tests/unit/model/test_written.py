# SPDX-License-Identifier: Apache-2.0
"""Tokens of writes: there and back, joined, built from delivery reports; what is none is refused in words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cremant.model.errors import UserError
from cremant.model.written import parse_write_token, write_token
from cremant.read_your_writes import Writes

writes = st.dictionaries(st.integers(0, 1_023), st.integers(0, 2**62))


@given(writes)
def test_a_token_says_what_was_written(written: dict[int, int]) -> None:
    token = write_token(written)
    assert parse_write_token(token) == written
    assert not set("';=") & set(token)  # within SET and queryOptions as it is


@given(st.lists(writes, max_size=5))
def test_joined_tokens_ask_for_the_last_row_of_each_partition(written: list[dict[int, int]]) -> None:
    joined = parse_write_token(Writes(*(write_token(one) for one in written)).token)
    assert joined == {p: max(one[p] for one in written if p in one) for p in {p for one in written for p in one}}


@pytest.mark.parametrize(
    "text",
    ["", "41", "[41]", '{"a": 1}', '{"0": "x"}', '{"0": -1}', '{"-1": 3}', '{"99999999": 3}', '{"0": 1.5}',
     '{"0": 99999999999999999999}', '{"0": null}', "\udc00", "[" * 5_000],
)  # fmt: skip
def test_what_is_no_token_is_refused_in_words(text: str) -> None:
    with pytest.raises(UserError, match="not a token of writes"):
        parse_write_token(text)


@dataclass
class Report:
    at: tuple[int | None, int | None]

    def partition(self) -> int | None:
        return self.at[0]

    def offset(self) -> int | None:
        return self.at[1]


def test_a_token_is_built_from_delivery_reports() -> None:
    written = Writes('{"0": 7}')
    for at in ((0, 5), (1, 9), (1, 8), (None, None), (2, -1001)):  # -1001: Kafka's "no offset"
        written.delivered(None, Report(at))
    written.delivered("timed out", Report((3, 4)))
    assert written.token == '{"0":7,"1":9}'
