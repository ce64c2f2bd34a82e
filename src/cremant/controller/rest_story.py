# SPDX-License-Identifier: Apache-2.0
"""REST of a segment's story: what the controller and every live server did to it, in order of time."""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Thread
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import answering, raw_name
from cremant.model.cluster import Role
from cremant.model.limits import STORY_DEADLINE_MS


class _Told(msgspec.Struct):
    """A server's answer."""

    events: list[dict[str, Any]]


class StoryRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def routes(self) -> list[BaseRoute]:
        return [Route("/segments/{table}/{segment}/story", answering(self.story), methods=["GET"])]

    def story(self, request: Request) -> dict[str, Any]:
        """Also of a segment that is gone. `silent`: servers that told nothing in time, and why; all of them together
        have STORY_DEADLINE_MS."""
        table, segment = raw_name(request.path_params["table"]), request.path_params["segment"]
        path = f"/segments/{quote(table)}_REALTIME/{quote(segment)}/story"
        instances = self._controller.instances.described()
        until_s = time.monotonic() + STORY_DEADLINE_MS / 1000
        asked = {one.id: _ask(one.url + path) for one in instances if one.live and one.role is Role.SERVER}
        journal = self._controller.journal
        events = journal.story(segment) if journal is not None else []
        silent: dict[str, str] = {}
        for server, answer in asked.items():
            try:
                events += answer.result(max(0.0, until_s - time.monotonic()))
            except (httpx.HTTPError, msgspec.MsgspecError, ValueError, RuntimeError, TimeoutError) as error:
                silent[server] = f"{type(error).__name__} {error}".strip()
        return {"segment": segment, "events": sorted(events, key=lambda event: str(event.get("at"))), "silent": silent}


def _ask(url: str) -> Future[list[dict[str, Any]]]:
    """On a thread of its own, all servers at once."""
    future: Future[list[dict[str, Any]]] = Future()

    def run() -> None:
        try:
            response = httpx.get(url, timeout=STORY_DEADLINE_MS / 1000, trust_env=False)
            response.raise_for_status()
            future.set_result(msgspec.json.decode(response.content, type=_Told).events)
        except Exception as error:
            future.set_exception(error)

    try:
        Thread(target=run, name="story", daemon=True).start()
    except RuntimeError as error:  # no more threads
        future.set_exception(error)
    return future
