# SPDX-License-Identifier: Apache-2.0
"""REST of schemas, as Pinot's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import answering, changed, flag, raw_name, with_document
from cremant.model.errors import NotFound
from cremant.model.schema_json import parse_schema, schema_to_json


def schema_routes(controller: Controller) -> list[BaseRoute]:
    schemas = controller.schemas

    def listed(request: Request) -> list[str]:
        return schemas.names()

    def added(request: Request, document: Any) -> dict[str, Any]:
        schema, unrecognized = schemas.add(
            document, override=flag(request, "override", default=True), force=flag(request, "force", default=False)
        )
        return changed(f"{schema.name} successfully added", unrecognized)

    def validated(request: Request, document: Any) -> dict[str, Any]:
        schema, unrecognized = parse_schema(document)
        return {**schema_to_json(schema), "unrecognizedProperties": unrecognized}

    def shown(request: Request) -> dict[str, Any]:
        return schema_to_json(schemas.get(request.path_params["schema"]))

    def replaced(request: Request, document: Any) -> dict[str, Any]:
        force = flag(request, "force", default=False)
        schema, unrecognized = schemas.change(request.path_params["schema"], document, force=force)
        return changed(f"{schema.name} successfully added", unrecognized)

    def deleted(request: Request) -> dict[str, str]:
        name = request.path_params["schema"]
        schemas.delete(name)
        return {"status": f"Schema {name} deleted"}

    def of_table(request: Request) -> dict[str, Any]:
        name = raw_name(request.path_params["table"])
        record = controller.catalog.tables.get(name)
        if record is None:
            raise NotFound(f"Schema not found for table: {name}")
        return schema_to_json(record.table_schema)

    return [
        Route("/schemas", answering(listed), methods=["GET"]),
        Route("/schemas", with_document(added), methods=["POST"]),
        Route("/schemas/validate", with_document(validated), methods=["POST"]),
        Route("/schemas/{schema}", answering(shown), methods=["GET"]),
        Route("/schemas/{schema}", with_document(replaced), methods=["PUT"]),
        Route("/schemas/{schema}", answering(deleted), methods=["DELETE"]),
        Route("/tables/{table}/schema", answering(of_table), methods=["GET"]),
    ]
