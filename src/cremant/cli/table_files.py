# SPDX-License-Identifier: Apache-2.0
"""What `cremant table create` reads: a schema and a table config, in one file or two, recognised by what they say.

a schema        {"schemaName": …}
a table config  {"tableName": …, "tableType": …}
both            {"tableName": …, "schema": {…}, "realtime": {…}}, Pinot's tableConfigs
                or {"schema": {…}, "table": {…}}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cremant.model.errors import InvalidConfig, NotFound

Document = dict[str, Any]


class TableFiles(NamedTuple):
    """Either may be missing: a schema alone, or a table whose schema the cluster has."""

    schema: Document | None
    table: Document | None


def read_table_files(paths: Sequence[str]) -> TableFiles:
    """`-` is stdin. Raises NotFound, InvalidConfig with file, line and what was expected."""
    schema: Document | None = None
    table: Document | None = None
    for path in paths:
        found = _recognise(_read(path), path)
        for kind, old, new in (("schema", schema, found.schema), ("table config", table, found.table)):
            if old is not None and new is not None:
                raise InvalidConfig(f"{path}: a second {kind}; one table is created at a time")
        schema, table = schema or found.schema, table or found.table
    return TableFiles(schema, table)


def _read(path: str) -> Document:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidConfig(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _recognise(document: Document, path: str) -> TableFiles:
    table = document.get("realtime") or document.get("table")
    if isinstance(document.get("schema"), dict) or isinstance(table, dict):
        if document.get("offline"):
            raise InvalidConfig(f"{path}: an offline table; only realtime ones are supported")
        schema = document.get("schema")
        for name, part in (("schema", schema), ("table config", table)):
            if part is not None and not isinstance(part, dict):
                raise InvalidConfig(f"{path}: the {name} must be a JSON object, found {type(part).__name__}")
        return TableFiles(schema, table)
    if "schemaName" in document and "tableType" not in document:
        return TableFiles(document, None)
    if "tableName" in document or "tableType" in document:
        return TableFiles(None, document)
    raise InvalidConfig(
        f"{path} is neither a schema nor a table config",
        hint='a schema has "schemaName", a table config "tableName", a file of both "schema" and "realtime"; '
        f"found: {', '.join(map(repr, list(document)[:6])) or 'nothing'}",
    )
