# SPDX-License-Identifier: Apache-2.0
"""REST of freshness: how fresh a table is and why it is not fresher, and what brokers ask to find that out."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import answering, table_record
from cremant.model.cluster import TableView, as_json
from cremant.model.errors import NotFound


class FreshnessRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/tables/{table}/freshness", answering(self.shown), methods=["GET"]),
            Route("/internal/v1/freshness/{table}", answering(self.upstream), methods=["GET"]),
        ]

    def shown(self, request: Request) -> Any:
        return as_json(self._controller.freshness.of(self._table(request)))

    def upstream(self, request: Request) -> Any:
        return as_json(self._controller.freshness.upstream(self._table(request)))

    def _table(self, request: Request) -> TableView:
        record = table_record(request, self._controller.catalog)
        table = self._controller.view.table(record.config.name)
        if table is None:
            raise NotFound(f"Table {record.config.name_with_type} not found")
        return table
