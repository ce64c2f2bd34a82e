# SPDX-License-Identifier: Apache-2.0
"""Tables as the planner needs them, out of the newest view."""

from __future__ import annotations

from cremant.model.cluster import ClusterView, TableView
from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.sql.binder import TableInfo
from cremant.sql.planner import find_table


def stores_nulls(table: TableView) -> bool:
    return table.record.config.null_handling or table.record.table_schema.enable_column_based_null_handling


def table_info(view: ClusterView | None, name: str) -> TableInfo:
    """What the planner needs of the table that `name` means. Raises QueryError 190, 191, 1000."""
    if view is None:
        raise QueryError(
            QueryCode.UNKNOWN, "this broker has not heard from the controller yet", hint="try again in a moment"
        )
    table = view.tables[find_table(name, list(view.tables))]
    record = table.record
    if not record.enabled:
        raise QueryError(QueryCode.TABLE_IS_DISABLED, "TableIsDisabledError")
    return TableInfo(
        table.name, record.table_schema, stores_nulls(table), record.incarnation, record.config_version,
        upsert=record.config.upsert is not None,
    )  # fmt: skip
