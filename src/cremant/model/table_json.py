# SPDX-License-Identifier: Apache-2.0
"""Pinot's table config JSON, read and written. Unknown keys are kept and listed; what would change answers is refused."""

from __future__ import annotations

from typing import Any

from cremant.model.schema import Schema
from cremant.model.table import TableConfig


def parse_table(document: Any) -> TableConfig:
    """The typed config; `unrecognized` lists by JSON pointer what Pinot does not know. Raises InvalidConfig."""
    raise NotImplementedError


def table_to_json(config: TableConfig) -> dict[str, Any]:
    """As Pinot echoes it: the user's keys in Pinot's order, with the defaults Pinot adds, without unrecognized ones."""
    raise NotImplementedError


def validate_table(config: TableConfig, schema: Schema) -> None:
    """Checks the config against its schema (time column, index and transform columns). Raises InvalidConfig. Whether
    transform and filter expressions can run is checked by `cremant.ingest.plan.compile_ingest`."""
    raise NotImplementedError


def check_update(old: TableConfig, new: TableConfig) -> None:
    """What may change on a live table. Raises Conflict (the stream and its topic may not) or InvalidConfig."""
    raise NotImplementedError
