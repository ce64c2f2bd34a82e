# SPDX-License-Identifier: Apache-2.0
"""Schemas: add, change, delete. A schema belongs to the table of its name, if there is one, and changes with it.

Rule: table record and schema record change in one compare-and-set, and every change of a table's schema raises its
config version (E-2: the version is pinned per batch).
"""

from __future__ import annotations

from typing import Any

import msgspec

from cremant.controller.catalog import Catalog, Record
from cremant.ingest.plan import compile_ingest
from cremant.model.cluster import schema_key, table_key
from cremant.model.errors import AlreadyExists, Conflict, InvalidConfig, NotFound
from cremant.model.schema import Schema
from cremant.model.schema_json import check_compatible, parse_schema
from cremant.model.table_json import validate_table
from cremant.model.upsert_json import check_upsert_change, completed_by


class Schemas:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def names(self) -> list[str]:
        with self._catalog.lock:
            return sorted(self._catalog.schemas)

    def get(self, name: str) -> Schema:
        found = self._catalog.schemas.get(name)
        if found is None:
            raise NotFound("Schema not found")
        return found

    def add(self, document: Any, *, override: bool, force: bool) -> tuple[Schema, dict[str, Any]]:
        """Adds or, with `override`, changes. Returns the schema and the keys Pinot does not know."""
        schema, unrecognized = parse_schema(document)
        with self._catalog.lock:
            if schema.name in self._catalog.schemas and not override:
                raise AlreadyExists(f"Schema: {schema.name} already exists")
            self._write(schema, force=force)
        return schema, unrecognized

    def change(self, name: str, document: Any, *, force: bool) -> tuple[Schema, dict[str, Any]]:
        schema, unrecognized = parse_schema(document)
        if schema.name != name:
            raise InvalidConfig(
                f"Schema name mismatch for uploaded schema, tried to add schema with name {schema.name} as {name}"
            )
        with self._catalog.lock:
            if name not in self._catalog.schemas:
                raise NotFound(f"Schema: {name} does not exist")
            self._write(schema, force=force)
        return schema, unrecognized

    def delete(self, name: str) -> None:
        with self._catalog.lock:
            if name not in self._catalog.schemas:
                raise NotFound(f"Schema {name} not found")
            if name in self._catalog.tables:
                raise Conflict(f"Cannot delete schema {name}, as it is associated with table {name}_REALTIME")
            self._catalog.commit({schema_key(name): None})

    def _write(self, schema: Schema, *, force: bool) -> None:
        name = schema.name
        old, table = self._catalog.schemas.get(name), self._catalog.tables.get(name)
        if old == schema and (table is None or table.table_schema == schema):
            return
        if old is not None:
            check_compatible(old, schema, force=force)
        changes: dict[str, Record | None] = {schema_key(name): schema}
        if table is not None:
            check_compatible(table.table_schema, schema)
            config = table.config if table.config.upsert is None else completed_by(schema, table.config)
            check_upsert_change(table.config, table.table_schema, config, schema)
            validate_table(config, schema)
            compile_ingest(schema, config)
            changes[table_key(name)] = msgspec.structs.replace(
                table, config=config, table_schema=schema, config_version=table.config_version + 1
            )
        self._catalog.commit(changes)
