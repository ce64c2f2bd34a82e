# SPDX-License-Identifier: Apache-2.0
"""REST of topics: Cremant's own, for streams of the embedded log."""

from __future__ import annotations

import threading
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cremant.controller.core import Controller
from cremant.controller.http import answering, flag, with_document
from cremant.controller.tables import is_internal_topic
from cremant.log.api import Log, TopicInfo
from cremant.log.partitioner import Turns
from cremant.log.produce import produce_lines
from cremant.model.errors import Conflict, InvalidConfig, UserError
from cremant.model.limits import PARTITIONS_MAX, PRODUCE_BODY_BYTES_MAX
from cremant.model.names import check_topic_name
from cremant.model.offsets import OffsetRange
from cremant.model.written import write_token
from cremant.shell.app import json_response, read_body


class TopicRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._turns: dict[str, Turns] = {}
        self._guard = threading.Lock()

    @property
    def _log(self) -> Log:
        return self._controller.streams.logs.embedded

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/topics", answering(self.listed), methods=["GET"]),
            Route("/topics", with_document(self.created), methods=["POST"]),
            Route("/topics/{topic}", answering(self.shown), methods=["GET"]),
            Route("/topics/{topic}", answering(self.put), methods=["PUT"]),
            Route("/topics/{topic}", self.produced, methods=["POST"]),
            Route("/topics/{topic}", answering(self.deleted), methods=["DELETE"]),
        ]

    def _describe(self, info: TopicInfo) -> dict[str, Any]:
        kept = sum(self._log.latest(info.name, p) - self._log.earliest(info.name, p) for p in range(info.partitions))
        return {
            "name": info.name, "partitions": info.partitions, "incarnation": info.incarnation, "messages": kept,
        }  # fmt: skip

    def listed(self, request: Request) -> dict[str, Any]:
        """Streams; with `internal=true` also the topics that tables keep for themselves."""
        with_internal = flag(request, "internal", default=False)
        topics = [info for info in sorted(self._log.topics()) if with_internal or not is_internal_topic(info.name)]
        return {"topics": [self._describe(info) for info in topics]}

    def shown(self, request: Request) -> dict[str, Any]:
        info = self._log.topic(request.path_params["topic"])
        offsets = {
            str(p): [self._log.earliest(info.name, p), self._log.latest(info.name, p)] for p in range(info.partitions)
        }
        return {**self._describe(info), "offsets": offsets}

    def created(self, request: Request, document: Any) -> dict[str, Any]:
        if not isinstance(document, dict) or not isinstance(document.get("name"), str):
            raise InvalidConfig('expected {"name": "...", "partitions": N}')
        return self._create(document["name"], document.get("partitions", 1))

    def put(self, request: Request) -> dict[str, Any]:
        """Creates the topic with `partitions`, or grows it to them with `grow=true`."""
        try:
            partitions = int(request.query_params.get("partitions", "1"))
        except ValueError as error:
            raise InvalidConfig(f"query parameter partitions: {error}") from error
        topic = request.path_params["topic"]
        if flag(request, "grow", default=False):
            _check_partitions(partitions)
            self._refuse_internal(topic)
            return self._describe(self._log.grow_topic(topic, partitions))
        return self._create(topic, partitions)

    def _create(self, topic: str, partitions: Any) -> dict[str, Any]:
        check_topic_name(topic)
        _check_partitions(partitions)
        self._refuse_internal(topic)
        return self._describe(self._log.create_topic(topic, partitions))

    def deleted(self, request: Request) -> dict[str, str]:
        topic = request.path_params["topic"]
        self._refuse_internal(topic)
        with self._controller.catalog.lock:
            users = [
                name
                for name, record in self._controller.catalog.tables.items()
                if (record.config.stream.stream_type, record.config.stream.topic) == ("embedded", topic)
            ]
        if users:
            raise Conflict(
                f"topic {topic} is the stream of table {', '.join(sorted(users))}", hint="drop the table first"
            )
        self._log.delete_topic(topic)
        return {"status": f"Topic {topic} deleted"}

    async def produced(self, request: Request) -> Response:
        """Body: JSON lines; with `keyed=true` each is {"key", "value"}. Answers the offsets each partition took,
        and `token`, for whoever wants to read them (`SET readYourWrites`)."""
        topic, keyed = request.path_params["topic"], flag(request, "keyed", default=False)
        self._refuse_internal(topic)
        body = await read_body(request, PRODUCE_BODY_BYTES_MAX)
        return json_response(await run_in_threadpool(self._produce, topic, body, keyed))

    def _produce(self, topic: str, body: bytes, keyed: bool) -> dict[str, Any]:
        with self._guard:
            turns = self._turns.setdefault(topic, Turns())
        done = produce_lines(self._log, topic, body, keyed=keyed, turns=turns)
        offsets = {str(partition): _joined(ranges) for partition, ranges in sorted(done.ranges.items())}
        token = write_token({partition: ranges[-1].next - 1 for partition, ranges in done.ranges.items()})
        return {"messages": done.messages, "offsets": offsets, "token": token}

    def _refuse_internal(self, topic: str) -> None:
        if is_internal_topic(topic):
            raise UserError(f"topic {topic} is internal to a table")


def _joined(ranges: list[OffsetRange]) -> list[list[int]]:
    joined: list[list[int]] = []
    for span in ranges:
        if joined and joined[-1][1] == span.first:
            joined[-1][1] = span.next
        else:
            joined.append([span.first, span.next])
    return joined


def _check_partitions(partitions: Any) -> None:
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidConfig(f"partitions: expected a number from 1 to {PARTITIONS_MAX}, found {partitions!r}")
