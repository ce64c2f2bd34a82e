# SPDX-License-Identifier: Apache-2.0
"""REST of upsert tables: what is known of their keys, versions and low-water marks."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import answering, table_record
from cremant.controller.upsert_state import upsert_state
from cremant.model.errors import NotFound, UserError


class UpsertRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def routes(self) -> list[BaseRoute]:
        return [Route("/tables/{table}/upsert", answering(self.shown), methods=["GET"])]

    def shown(self, request: Request) -> dict[str, Any]:
        record = table_record(request, self._controller.catalog)
        name = record.config.name
        if record.config.upsert is None:
            raise UserError(
                f"table {name} is an append table: it has no keys",
                hint="docs/upsert.md says how to make one of keys",
            )
        table = self._controller.view.table(name)
        if table is None:
            raise NotFound(f"Table {record.config.name_with_type} not found")
        return upsert_state(table)
