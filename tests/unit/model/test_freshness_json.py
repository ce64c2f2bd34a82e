# SPDX-License-Identifier: Apache-2.0
"""What a table promises of its freshness."""

from __future__ import annotations

from typing import Any

import pytest

from cremant.model.errors import InvalidConfig
from cremant.model.freshness_json import parse_freshness_sla
from cremant.model.table import FreshnessSla


def test_nothing_is_promised_by_default() -> None:
    assert parse_freshness_sla({}) == FreshnessSla()


def test_the_block_says_all_of_it() -> None:
    found = parse_freshness_sla({"freshnessSla": {"maxLagMs": 2000, "maxEventAgeMs": 60_000, "errorsHold": True}})
    assert found == FreshnessSla(max_lag_ms=2000, max_event_age_ms=60_000, errors_hold=True)


def test_custom_configs_survive_other_tools() -> None:
    custom = {"metadata": {"customConfigs": {"freshness.sla.ms": "1500"}}}
    assert parse_freshness_sla(custom).max_lag_ms == 1500
    assert parse_freshness_sla({**custom, "freshnessSla": {"maxEventAgeMs": 9}}).max_event_age_ms == 9


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"freshnessSla": {"maxLagMs": 0}}, "/freshnessSla/maxLagMs"),
        ({"freshnessSla": {"maxLag": 5}}, "maxLag"),
        ({"metadata": {"customConfigs": {"freshness.sla.ms": "2 s"}}}, "freshness.sla.ms"),
        (
            {"freshnessSla": {"maxLagMs": 5}, "metadata": {"customConfigs": {"freshness.sla.ms": "6"}}},
            "leave one of them away",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(document: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_freshness_sla(document)
    assert named in f"{caught.value} {caught.value.hint}"
