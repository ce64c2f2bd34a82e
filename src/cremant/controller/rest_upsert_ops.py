# SPDX-License-Identifier: Apache-2.0
"""REST of what an operator does to a table's epochs and keys: going back to an epoch, making the key coordinator's
state anew."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import answering, flag, table_record
from cremant.model.cluster import as_json
from cremant.model.errors import UserError

#: Of the greatest epoch, 2^63 - 1.
_EPOCH_DIGITS = 19


class UpsertOpsRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/tables/{table}/rewind", answering(self.rewind), methods=["POST"]),
            Route("/tables/{table}/rebuildKeys", answering(self.rebuild_keys), methods=["POST"]),
        ]

    def rewind(self, request: Request) -> dict[str, Any]:
        """`?toEpoch=N[&dryRun=true]`."""
        record = table_record(request, self._controller.catalog)
        told = self._controller.rewinds.rewind(
            record.config.name, _epoch(request), dry_run=flag(request, "dryRun", default=False)
        )
        answer: dict[str, Any] = as_json(told)
        return answer

    def rebuild_keys(self, request: Request) -> dict[str, Any]:
        record = table_record(request, self._controller.catalog)
        name = record.config.name
        return {"table": name, "rebuild": self._controller.pipelines.ask_rebuild(name)}


def _epoch(request: Request) -> int:
    text = request.query_params.get("toEpoch", "")
    if not text.isdecimal() or len(text) > _EPOCH_DIGITS:
        raise UserError(f"query parameter toEpoch: expected the number of a closed epoch, found {text[:40]!r}")
    return int(text)
