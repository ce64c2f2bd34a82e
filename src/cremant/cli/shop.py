# SPDX-License-Identifier: Apache-2.0
"""An online shop whose visitors make the quickstart's events: sessions of page views that lead to carts and purchases.

Deterministic: a function of the seed and the start time. What makes it look like life, and not like noise:

- products, users and countries are skewed (a few of them make most of the traffic), conversion depends on price,
  device and channel, baskets on category; one product at a time is on promotion;
- each country has its own day and night, so the rate breathes over 24 hours;
- a visitor's events come in order, seconds apart; some phones go offline and deliver a part of theirs up to two
  minutes late: an event's time `ts` is when it happened, not when it arrived.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

TICK_MS = 100
#: Events of a session on average, by the chances below; measured by the test of this module.
EVENTS_PER_SESSION = 6.5
MALFORMED_SHARE = 0.002
_LATE_SHARE = 0.02
_LATE_MS_MAX = 120_000
_USERS_PER_COUNTRY = 20_000

_COUNTRIES = np.array(["US", "DE", "GB", "FR", "IN", "BR", "JP", "ES", "NL", "PL", "CA", "AU"])
_COUNTRY_WEIGHTS = np.array([30, 14, 11, 9, 9, 7, 6, 4, 3, 3, 2, 2], dtype=float)
_COUNTRY_HOURS = np.array([-6, 1, 0, 1, 5.5, -3, 9, 1, 1, 1, -5, 10])
_DEVICES = np.array(["phone", "desktop", "tablet"])
_CHANNELS = np.array(["search", "direct", "social", "newsletter", "ad"])
_CHANNEL_WEIGHTS = np.array([0.38, 0.27, 0.18, 0.09, 0.08])
_CHANNEL_LIFT = np.array([1.0, 1.4, 0.6, 1.7, 0.8])
_CATEGORIES = np.array(["books", "electronics", "garden", "kitchen", "music", "outdoor", "toys", "fashion"])
_CATEGORY_PRICES = np.array([14.0, 190.0, 35.0, 48.0, 18.0, 75.0, 22.0, 42.0])
_PRODUCTS = 800
_PROMOTION_MS = 300_000
_LABELS = ("new", "sale", "gift", "member", "returning", "express")

VIEW, CART, PURCHASE = "view", "cart", "purchase"

SCHEMA: dict[str, Any] = {
    "schemaName": "shop",
    "dimensionFieldSpecs": [
        {"name": "session", "dataType": "STRING"},
        {"name": "userId", "dataType": "LONG"},
        {"name": "event", "dataType": "STRING"},
        {"name": "product", "dataType": "STRING"},
        {"name": "category", "dataType": "STRING"},
        {"name": "country", "dataType": "STRING"},
        {"name": "device", "dataType": "STRING"},
        {"name": "channel", "dataType": "STRING"},
        {"name": "labels", "dataType": "STRING", "singleValueField": False},
    ],
    "metricFieldSpecs": [
        {"name": "quantity", "dataType": "INT"},
        {"name": "amount", "dataType": "DOUBLE"},
    ],
    "dateTimeFieldSpecs": [
        {"name": "ts", "dataType": "TIMESTAMP", "format": "1:MILLISECONDS:TIMESTAMP", "granularity": "1:MILLISECONDS"}
    ],
}


def table_config(topic: str, replication: int) -> dict[str, Any]:
    return {
        "tableName": "shop",
        "tableType": "REALTIME",
        "segmentsConfig": {
            "timeColumnName": "ts",
            "schemaName": "shop",
            "replication": str(replication),
            "retentionTimeUnit": "DAYS",
            "retentionTimeValue": "7",
        },
        "tenants": {},
        "tableIndexConfig": {
            "loadMode": "MMAP",
            "streamConfigs": {
                "streamType": "embedded",
                "stream.embedded.topic.name": topic,
                "stream.embedded.consumer.prop.auto.offset.reset": "smallest",
                "realtime.segment.flush.threshold.rows": "100000",
                "realtime.segment.flush.threshold.time": "1h",
            },
        },
        "metadata": {},
    }


class Event(NamedTuple):
    """One message of the stream: keyed by session, so a visitor's events stay in order."""

    due_ms: int
    key: bytes
    value: bytes


class Shop:
    """`events(until_ms)` yields what arrives up to then, in order of arrival. Time is an argument."""

    def __init__(self, *, seed: int, start_ms: int, rate_per_s: float, malformed: bool = False) -> None:
        self._dice = np.random.default_rng(seed)
        self._seed = seed
        self._rate_per_s = rate_per_s
        self._malformed = malformed
        self._clock_ms = start_ms - start_ms % TICK_MS
        self._sessions = 0
        self._pending: list[Event] = []
        self._encode = msgspec.json.Encoder().encode
        catalogue = np.random.default_rng(20_260)  # the same shop whatever the seed
        self._product_category = catalogue.integers(0, len(_CATEGORIES), _PRODUCTS)
        self._product_price = np.round(
            _CATEGORY_PRICES[self._product_category] * catalogue.lognormal(0.0, 0.6, _PRODUCTS) + 0.99, 2
        )
        self._popularity = np.cumsum(_skewed(_PRODUCTS, 0.8))
        self._loyalty = np.cumsum(_skewed(_USERS_PER_COUNTRY, 0.7))

    def events(self, until_ms: int) -> list[Event]:
        """Arrivals in (last call, until_ms], in order. Call it with growing times."""
        while self._clock_ms < until_ms:
            self._visitors_of_tick()
            self._clock_ms += TICK_MS
        self._pending.sort(key=lambda event: event.due_ms)
        due = 0
        while due < len(self._pending) and self._pending[due].due_ms <= until_ms:
            due += 1
        arrived, self._pending = self._pending[:due], self._pending[due:]
        return arrived

    def _visitors_of_tick(self) -> None:
        activity = _COUNTRY_WEIGHTS * day_and_night(self._clock_ms, _COUNTRY_HOURS)
        busy = activity.sum() / _COUNTRY_WEIGHTS.sum()
        visitors = int(self._dice.poisson(self._rate_per_s * busy * TICK_MS / 1000 / EVENTS_PER_SESSION))
        if not visitors:
            return
        countries = self._dice.choice(len(_COUNTRIES), visitors, p=activity / activity.sum())
        users = np.searchsorted(self._loyalty, self._dice.random(visitors)) + countries * _USERS_PER_COUNTRY
        channels = self._dice.choice(len(_CHANNELS), visitors, p=_CHANNEL_WEIGHTS)
        for country, user, channel in zip(countries.tolist(), users.tolist(), channels.tolist(), strict=True):
            self._visit(country, user, channel)

    def _visit(self, country: int, user: int, channel: int) -> None:
        dice = self._dice
        self._sessions += 1
        session = f"{self._seed:x}-{self._clock_ms:x}-{self._sessions:x}"
        device = 2 if user % 10 == 9 else user % 10 // 6  # a user keeps a device: 60 % phone, 30 % desktop
        views = 1 + int(dice.geometric(0.22))
        products = self._looked_at(views)
        gaps_ms = dice.lognormal(8.6, 0.9, views * 2 + 1).astype(int) + 300
        at_ms = self._clock_ms + int(dice.integers(0, TICK_MS))
        base = {
            "session": session,
            "userId": user,
            "country": str(_COUNTRIES[country]),
            "device": str(_DEVICES[device]),
            "channel": str(_CHANNELS[channel]),
            "labels": [label for label, is_set in zip(_LABELS, dice.random(6) < 0.16, strict=True) if is_set],
        }
        lift = _CHANNEL_LIFT[channel] * (0.75 if device == 0 else 1.15)
        basket: list[tuple[int, int]] = []
        step = 0
        for product in products:
            self._happens(base, VIEW, product, 0, 0.0, at_ms)
            price = self._product_price[product]
            if dice.random() < min(0.6, 0.16 * lift * (40.0 / (price + 25.0)) ** 0.3):
                at_ms += int(gaps_ms[step])
                step += 1
                quantity = int(dice.geometric(0.9 if price > 60 else 0.6))
                basket.append((product, quantity))
                self._happens(base, CART, product, quantity, 0.0, at_ms)
            at_ms += int(gaps_ms[step])
            step += 1
        if basket and dice.random() < 0.52 * lift / 1.4:
            for product, quantity in basket:
                self._happens(base, PURCHASE, product, quantity, quantity * float(self._product_price[product]), at_ms)

    def _looked_at(self, views: int) -> list[int]:
        """Popular products, some of the same category as the first, now and then the one on promotion."""
        products = np.searchsorted(self._popularity, self._dice.random(views))
        promoted = (self._clock_ms // _PROMOTION_MS * 7919) % _PRODUCTS
        return [promoted if roll < 0.06 else int(p) for p, roll in zip(products, self._dice.random(views), strict=True)]

    def _happens(
        self, base: dict[str, Any], event: str, product: int, quantity: int, amount: float, at_ms: int
    ) -> None:
        row = {
            **base,
            "event": event,
            "product": f"product-{product:03d}",
            "category": str(_CATEGORIES[self._product_category[product]]),
            "quantity": quantity,
            "amount": round(amount, 2),
            "ts": at_ms,
        }
        delay = 20 + self._dice.exponential(60)
        if self._dice.random() < _LATE_SHARE:
            delay += self._dice.uniform(1_000, _LATE_MS_MAX)
        value = self._encode(row)
        if self._malformed and self._dice.random() < MALFORMED_SHARE:
            value = value[: len(value) // 2]
        self._pending.append(Event(at_ms + int(delay), base["session"].encode(), value))


def day_and_night(now_ms: int, hours_east: np.ndarray) -> np.ndarray:
    """Activity by local hour: 0.35 in the small hours, 1.65 in the evening, 1 on average."""
    local = (now_ms / 3_600_000 + hours_east) % 24
    activity: np.ndarray = 1 - 0.65 * np.cos((local - 3.5) / 24 * 2 * np.pi)
    return activity


def _skewed(count: int, exponent: float) -> np.ndarray:
    """Zipf's weights of `count` things, summing to 1."""
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    normalised: np.ndarray = weights / weights.sum()
    return normalised
