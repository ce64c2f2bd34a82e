# SPDX-License-Identifier: Apache-2.0
"""REST of tables: configs, state, pause and resume; also Pinot's combined `tableConfigs`."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import (
    answering,
    changed,
    raw_name,
    table_record,
    table_type,
    typed,
    utc_text,
    with_document,
)
from cremant.model.cluster import TableRecord
from cremant.model.completion import StorePolicy
from cremant.model.errors import CremantError, InvalidConfig, NotFound, UserError
from cremant.model.schema import Schema
from cremant.model.schema_json import parse_schema, schema_to_json
from cremant.model.secrets import redact_document
from cremant.model.table import TableConfig
from cremant.model.table_json import parse_table, table_to_json
from cremant.shell.deepstore import probe
from cremant.shell.logs import log_event

_log = logging.getLogger(__name__)


class TableRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._catalog = controller.catalog
        self._tables = controller.tables

    def routes(self) -> list[BaseRoute]:
        get, post, put, delete = ["GET"], ["POST"], ["PUT"], ["DELETE"]
        return [
            Route("/tables", answering(self.listed), methods=get),
            Route("/tables", with_document(self.created), methods=post),
            Route("/tables/validate", with_document(self.validated), methods=post),
            Route("/tables/{table}", answering(self.shown), methods=get),
            Route("/tables/{table}", with_document(self.replaced), methods=put),
            Route("/tables/{table}", answering(self.deleted), methods=delete),
            Route("/tables/{table}/state", answering(self.state), methods=get),
            Route("/tables/{table}/state", answering(self.set_state), methods=put),
            Route("/tables/{table}/stats", answering(self.stats), methods=get),
            Route("/tables/{table}/pauseConsumption", answering(self.pause), methods=post),
            Route("/tables/{table}/resumeConsumption", answering(self.resume), methods=post),
            Route("/tables/{table}/pauseStatus", answering(self.pause_status), methods=get),
            Route("/tableConfigs", answering(self.configs_listed), methods=get),
            Route("/tableConfigs", with_document(self.configs_created), methods=post),
            Route("/tableConfigs/validate", with_document(self.configs_validated), methods=post),
            Route("/tableConfigs/{table}", answering(self.configs_shown), methods=get),
            Route("/tableConfigs/{table}", with_document(self.configs_replaced), methods=put),
            Route("/tableConfigs/{table}", answering(self.configs_deleted), methods=delete),
        ]

    # --- configs --------------------------------------------------------------------------------------------------

    def listed(self, request: Request) -> dict[str, list[str]]:
        kinds = [kind for kind in request.query_params.get("type", "").upper().split(",") if kind]
        with self._catalog.lock:
            names = sorted(self._catalog.tables)
        if not kinds and "taskType" not in request.query_params:
            return {"tables": names}
        unknown = set(kinds) - {"REALTIME", "OFFLINE", "DIMENSION"}
        if unknown:
            raise UserError(f"query parameter type: expected realtime or offline, found {', '.join(sorted(unknown))}")
        return {"tables": [typed(name) for name in names] if "REALTIME" in kinds else []}

    def created(self, request: Request, document: Any) -> dict[str, Any]:
        config = self._tables.create(document)
        answer = changed(f"Table {config.name_with_type} successfully added", config.unrecognized)
        return answer | self._store_warnings(config.name)

    def _store_warnings(self, name: str) -> dict[str, list[str]]:
        """Wrong settings of a store are noticed now, not when the first segment is sealed; but a store that is just
        down is no reason to refuse a table."""
        record = self._catalog.tables.get(name)
        if record is None or self._controller.policy(record) is StorePolicy.PEERS_ONLY:
            return {}
        try:
            self._controller.objects.claim()
            with tempfile.TemporaryDirectory() as scratch:
                trouble = probe(self._controller.deep_store, Path(scratch))
        except CremantError as error:
            trouble = str(error)
        if trouble is None:
            return {}
        log_event(_log, "a table's deep store fails", level=logging.WARNING, table=name, error=trouble)
        return {"warnings": [f"the table is accepted, but its deep store cannot be used now: {trouble}"]}

    def validated(self, request: Request, document: Any) -> dict[str, Any]:
        config, _ = self._tables.check(document)
        return {"REALTIME": _shown(config), "unrecognizedProperties": redact_document(config.unrecognized)}

    def shown(self, request: Request) -> dict[str, Any]:
        written, kind = request.path_params["table"], table_type(request)
        record = self._catalog.tables.get(raw_name(written))
        if kind == "OFFLINE" or record is None:
            raise NotFound(f"Table {raw_name(written)}{f'_{kind}' if kind else ''} does not exist")
        return {"REALTIME": _shown(record.config)}

    def replaced(self, request: Request, document: Any) -> dict[str, Any]:
        name = raw_name(request.path_params["table"])
        if name not in self._catalog.schemas:
            raise InvalidConfig(
                f"Invalid table config: {name} with error: Failed to find schema for table: {typed(name)}"
            )
        before = self._catalog.tables.get(name)
        config = self._tables.change(name, document)
        answer = changed(f"Table config updated for {config.name}", config.unrecognized)
        after = self._catalog.tables.get(name)
        if before is None or after is None or self._controller.policy(before) is self._controller.policy(after):
            return answer
        return answer | self._store_warnings(name)

    def deleted(self, request: Request) -> dict[str, str]:
        name, kind = raw_name(request.path_params["table"]), table_type(request)
        if kind == "OFFLINE" or name not in self._catalog.tables:
            with_type = f" with type {kind}" if kind else ""
            raise NotFound(f"Table '{name}'{with_type} does not exist")
        self._tables.drop(name)
        return {"status": f"Tables: [{typed(name)}] deleted"}

    # --- state ----------------------------------------------------------------------------------------------------

    def _record(self, request: Request) -> TableRecord:
        return table_record(request, self._catalog, "Table {0}_REALTIME not found!")

    def state(self, request: Request) -> dict[str, str]:
        return {"state": "enabled" if self._record(request).enabled else "disabled"}

    def set_state(self, request: Request) -> dict[str, str]:
        record, wanted = self._record(request), request.query_params.get("state", "").lower()
        if wanted not in ("enable", "disable"):
            raise UserError(f"query parameter state: expected enable or disable, found {wanted!r}")
        self._tables.set_enabled(record.config.name, enabled=wanted == "enable")
        return {"status": f"Request to {wanted} table '{record.config.name_with_type}' is successful"}

    def stats(self, request: Request) -> dict[str, Any]:
        return {"REALTIME": {"creationTime": utc_text(self._record(request).created_ms, "%Y%m%dT%H%M%SZ")}}

    def pause(self, request: Request) -> dict[str, Any]:
        name = self._record(request).config.name
        record = self._tables.set_paused(name, paused=True, comment=request.query_params.get("comment", ""))
        return self._pause_details(
            record,
            "Pause flag is set. Consumption stops within seconds. Use /pauseStatus endpoint in a few moments to double "
            "check.",
        )

    def resume(self, request: Request) -> dict[str, Any]:
        name = self._record(request).config.name
        consume_from = request.query_params.get("consumeFrom", "lastConsumed").lower()
        if consume_from != "lastconsumed":
            raise UserError(
                f"consumeFrom={consume_from} is not supported: consumption resumes where it stopped",
                hint="leave it out, or say lastConsumed",
            )
        record = self._tables.set_paused(name, paused=False, comment=request.query_params.get("comment", ""))
        return self._pause_details(
            record,
            "Pause flag is cleared. Consumption starts again within seconds. Use /pauseStatus endpoint in a few "
            "moments to double check.",
        )

    def pause_status(self, request: Request) -> dict[str, Any]:
        record = self._record(request)
        default = "Table is paused." if record.paused else "Table is unpaused."
        return self._pause_details(record, record.pause_comment or default)

    def _pause_details(self, record: TableRecord, comment: str) -> dict[str, Any]:
        details: dict[str, Any] = {"pauseFlag": record.paused, "consumingSegments": self._consuming(record)}
        if record.pause_changed_ms:
            at = record.pause_changed_ms
            details |= {
                "reasonCode": "ADMINISTRATIVE",
                "comment": comment,
                "timestamp": f"{utc_text(at, '%Y-%m-%d %H:%M:%S')}.{at % 1000:03d}",
            }
        return details

    def _consuming(self, record: TableRecord) -> list[str]:
        """Segments that still take rows in: none once the pipeline has really paused."""
        name = record.config.name
        with self._catalog.lock:
            pipeline = self._controller.instances.pipeline(name, record.incarnation, None)
            if record.paused and (pipeline is None or pipeline.state == "paused"):
                return []
            return sorted(partition.consuming for partition in self._catalog.partitions.get(name, {}).values())

    # --- tableConfigs ---------------------------------------------------------------------------------------------

    def configs_listed(self, request: Request) -> list[str]:
        with self._catalog.lock:
            return sorted(self._catalog.tables)

    def configs_shown(self, request: Request) -> dict[str, Any]:
        name = raw_name(request.path_params["table"])
        record = self._catalog.tables.get(name)
        if record is None:
            raise NotFound(f"Table configs for {name} not found")
        return {
            "tableName": name,
            "schema": schema_to_json(record.table_schema),
            "realtime": _shown(record.config),
        }

    def configs_created(self, request: Request, document: Any) -> dict[str, Any]:
        name, schema, realtime, unrecognized = _configs(document)
        config, _ = self._tables.check(realtime, schema)
        self._tables.refuse_existing(config)  # before its schema changes
        schema_is_new = schema.name not in self._catalog.schemas
        self._controller.schemas.add(document["schema"], override=True, force=False)
        try:
            self._tables.create(realtime)
        except Exception:
            if schema_is_new and schema.name not in self._catalog.tables:
                self._controller.schemas.delete(schema.name)
            raise
        return changed(f"TableConfigs {name} successfully added", unrecognized)

    def configs_replaced(self, request: Request, document: Any) -> dict[str, Any]:
        name, schema, realtime, unrecognized = _configs(document)
        if name != raw_name(request.path_params["table"]):
            raise InvalidConfig(f"tableName in the body is {name}, not {request.path_params['table']}")
        self._tables.change(name, realtime, schema)
        return changed(f"TableConfigs updated for {name}", unrecognized)

    def configs_validated(self, request: Request, document: Any) -> dict[str, Any]:
        name, schema, realtime, unrecognized = _configs(document)
        config, _ = self._tables.check(realtime, schema)
        return {
            "tableName": name,
            "schema": schema_to_json(schema),
            "realtime": _shown(config),
            "unrecognizedProperties": unrecognized,
        }

    def configs_deleted(self, request: Request) -> dict[str, str]:
        name = raw_name(request.path_params["table"])
        if name in self._catalog.tables:
            self._tables.drop(name)
        self._controller.schemas.delete(name)
        return {"status": f"Deleted table configs for {name}"}


def _shown(config: TableConfig) -> dict[str, Any]:
    """Without the values of secrets."""
    shown: dict[str, Any] = redact_document(table_to_json(config))
    return shown


def _configs(document: Any) -> tuple[str, Schema, dict[str, Any], dict[str, Any]]:
    """Name, schema and realtime config of a `tableConfigs` document, and what Pinot does not know of both."""
    if not isinstance(document, dict):
        raise InvalidConfig(f"tableConfigs is a JSON object, found {type(document).__name__}")
    if document.get("offline") is not None:
        raise InvalidConfig("offline tables are not supported by this version", hint="leave out 'offline'")
    name, realtime = document.get("tableName"), document.get("realtime")
    if not isinstance(name, str) or not isinstance(realtime, dict):
        raise InvalidConfig("tableConfigs needs 'tableName', 'schema' and 'realtime'")
    schema, of_schema = parse_schema(document.get("schema"))
    config = parse_table(realtime)
    if config.name != name or schema.name != name:
        raise InvalidConfig(f"names differ: tableName {name}, schema {schema.name}, realtime {config.name}")
    unrecognized = {f"/schema{pointer}": value for pointer, value in of_schema.items()}
    unrecognized |= {f"/realtime{pointer}": value for pointer, value in config.unrecognized.items()}
    return name, schema, realtime, unrecognized
