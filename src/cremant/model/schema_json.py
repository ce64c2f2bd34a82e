# SPDX-License-Identifier: Apache-2.0
"""Pinot's schema JSON, read and written. Unknown keys are kept and listed; what cannot be stored is refused."""

from __future__ import annotations

from typing import Any

from cremant.model.schema import Schema


def parse_schema(document: Any) -> tuple[Schema, dict[str, Any]]:
    """The schema, validated, and the keys Pinot does not know by JSON pointer. Raises InvalidConfig naming the place."""
    raise NotImplementedError


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """As Pinot answers it: `fieldType` included, defaults left out, order of columns kept."""
    raise NotImplementedError


def check_compatible(old: Schema, new: Schema, *, force: bool = False) -> None:
    """A schema may gain columns; raises InvalidConfig if one is removed or changes its type (unless `force`)."""
    raise NotImplementedError
