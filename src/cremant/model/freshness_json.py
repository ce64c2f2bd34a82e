# SPDX-License-Identifier: Apache-2.0
"""What a table promises of its freshness, out of its config: `metadata.customConfigs["freshness.sla.ms"]`, which
survives Pinot's own tools, and the block `freshnessSla`, which says more."""

from __future__ import annotations

from typing import Any

import msgspec

from cremant.model.errors import InvalidConfig
from cremant.model.table import FreshnessSla

CUSTOM_KEY = "freshness.sla.ms"
_PLACE = f"/metadata/customConfigs/{CUSTOM_KEY}"


def parse_freshness_sla(document: dict[str, Any]) -> FreshnessSla:
    """Raises InvalidConfig where both say something, and not the same."""
    try:
        promised = msgspec.convert(document.get("freshnessSla") or {}, FreshnessSla)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"table config, block 'freshnessSla': {error}") from error
    for name, value in (("maxLagMs", promised.max_lag_ms), ("maxEventAgeMs", promised.max_event_age_ms)):
        if value is not None and value < 1:
            raise InvalidConfig(f"/freshnessSla/{name}: expected a number of ms of 1 or more, found {value}")
    custom_ms = _custom_ms(document)
    if custom_ms is None:
        return promised
    if promised.max_lag_ms not in (None, custom_ms):
        raise InvalidConfig(
            f"/freshnessSla/maxLagMs is {promised.max_lag_ms}, {_PLACE} is {custom_ms}", hint="leave one of them away"
        )
    return msgspec.structs.replace(promised, max_lag_ms=custom_ms)


def _custom_ms(document: dict[str, Any]) -> int | None:
    custom = (document.get("metadata") or {}).get("customConfigs") or {}
    if not isinstance(custom, dict):
        raise InvalidConfig(f"/metadata/customConfigs must be an object, found {type(custom).__name__}")
    text = custom.get(CUSTOM_KEY)
    if text is None:
        return None
    if not str(text).isdecimal() or len(str(text)) > 18 or int(text) < 1:
        raise InvalidConfig(f"{_PLACE}: expected a number of ms of 1 or more, found {text!r}")
    return int(text)
