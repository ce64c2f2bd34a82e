# SPDX-License-Identifier: Apache-2.0
"""The quickstart's events look like a shop, and are the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest

from cremant.cli.shop import EVENTS_PER_SESSION, SCHEMA, Shop, day_and_night

START_MS = 1_770_000_000_000


def rows_of(seed: int = 1, minutes: int = 5, **arguments: Any) -> list[dict[str, Any]]:
    shop = Shop(seed=seed, start_ms=START_MS, rate_per_s=200, **arguments)
    return [json.loads(event.value) for event in shop.events(START_MS + minutes * 60_000)]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return rows_of()


def test_one_seed_is_one_story_however_it_is_read() -> None:
    whole = Shop(seed=3, start_ms=START_MS, rate_per_s=100).events(START_MS + 20_000)
    again = Shop(seed=3, start_ms=START_MS, rate_per_s=100)
    pieces = [event for step in range(40) for event in again.events(START_MS + (step + 1) * 500)]
    assert pieces == whole
    assert Shop(seed=4, start_ms=START_MS, rate_per_s=100).events(START_MS + 20_000) != whole


def test_rows_have_exactly_the_columns_of_the_schema(rows: list[dict[str, Any]]) -> None:
    columns = {
        spec["name"]
        for kind in ("dimensionFieldSpecs", "metricFieldSpecs", "dateTimeFieldSpecs")
        for spec in SCHEMA[kind]
    }
    assert all(set(row) == columns for row in rows)


def test_a_session_views_before_it_buys_and_belongs_to_one_user(rows: list[dict[str, Any]]) -> None:
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        sessions[row["session"]].append(row)
    bought = 0
    for events in sessions.values():
        assert len({(row["userId"], row["country"], row["device"]) for row in events}) == 1
        purchased = {row["product"] for row in events if row["event"] == "purchase"}
        bought += bool(purchased)
    assert 0.02 < bought / len(sessions) < 0.3


def test_few_products_and_countries_make_most_of_the_traffic(rows: list[dict[str, Any]]) -> None:
    products = Counter(row["product"] for row in rows)
    assert len(products) > 300
    assert sum(count for _, count in products.most_common(80)) > 0.4 * len(rows)
    kinds = Counter(row["event"] for row in rows)
    assert kinds["view"] > 3 * kinds["cart"] > 3 * kinds["purchase"] > 0


def test_some_events_arrive_late_most_do_not() -> None:
    shop = Shop(seed=1, start_ms=START_MS, rate_per_s=200)
    delays = [event.due_ms - json.loads(event.value)["ts"] for event in shop.events(START_MS + 300_000)]
    late = sum(delay > 1_000 for delay in delays)
    assert 0.005 < late / len(delays) < 0.03
    assert max(delays) < 130_000


def test_the_rate_is_about_what_was_asked_for_over_a_day() -> None:
    sessions = 0
    events = 0
    for hour in range(0, 24, 3):
        start = START_MS + hour * 3_600_000
        shop = Shop(seed=1, start_ms=start, rate_per_s=20)
        arrived = [json.loads(event.value) for event in shop.events(start + 900_000)]
        settled = [row for row in arrived if row["ts"] < start + 600_000]
        sessions += len({row["session"] for row in settled})
        events += len(settled)
    assert events / (8 * 600) == pytest.approx(20, rel=0.15)
    assert events / sessions == pytest.approx(EVENTS_PER_SESSION, rel=0.15)


def test_days_have_nights() -> None:
    import numpy as np

    day = [float(day_and_night(hour * 3_600_000, np.array([0.0]))[0]) for hour in range(24)]
    assert sum(day) / 24 == pytest.approx(1.0)
    assert max(day) > 4 * min(day)


def test_malformed_records_come_only_when_asked_for() -> None:
    shop = Shop(seed=1, start_ms=START_MS, rate_per_s=200, malformed=True)
    broken = 0
    for event in shop.events(START_MS + 120_000):
        try:
            json.loads(event.value)
        except ValueError:
            broken += 1
    assert broken > 0
