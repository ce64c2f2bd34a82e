# SPDX-License-Identifier: Apache-2.0
"""How far the rows of each partition are visible on each server, looked at many times a second.

A look is a query of that server's tails from where they were, without rows that match: it takes the way of every query
and costs a server next to nothing. A gap is the time between two looks that saw more rows than the one before.
"""

from __future__ import annotations

import http.client
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from cremant.wire.codec import decode, encode
from cremant.wire.messages import PruneTerm, ServerAnswer, ServerQuery, TailRequest

LOOK_EVERY_S = 0.02
_TIMEOUT_S = 10.0
_HEADER_LENGTH_BYTES = 4
_NOTHING = 'SELECT COUNT(*) AS "count" FROM t WHERE "ts" < 0'


class Series:
    """When a partition's visible end moved on one server (monotonic seconds), and where to."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ends: list[int] = [0]

    @property
    def end(self) -> int:
        return self.ends[-1]

    def saw(self, end: int, at_s: float) -> None:
        if end > self.end:
            self.ends.append(end)
            self.times.append(at_s)


class Watch:
    """Threads that look, one per server; a context manager. `servers`: URL by name."""

    def __init__(self, servers: Mapping[str, str], table: str, incarnation: str, partitions: int) -> None:
        self.series = {server: [Series() for _ in range(partitions)] for server in servers}
        #: What went wrong with a look, the last one by server.
        self.failures: dict[str, str] = {}
        self._table = table
        self._incarnation = incarnation
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._look_forever, args=(server, url), daemon=True)
            for server, url in servers.items()
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def replicas(self) -> list[list[float]]:
        """Per server and partition."""
        return [series.times for own in self.series.values() for series in own]

    def partitions(self) -> list[list[float]]:
        """Per partition, as somebody sees it who asks the server that is further."""
        return [first_seen(series) for series in zip(*self.series.values(), strict=True)]

    def _look_forever(self, server: str, url: str) -> None:
        own, connection, number = self.series[server], _connection(url), 0
        while not self._stop.is_set():
            began_s = time.monotonic()
            number += 1
            try:
                self._look(own, connection, f"watch-{server}-{number}")
            except (OSError, http.client.HTTPException) as error:
                self.failures[server] = str(error) or type(error).__name__
                connection.close()
                connection = _connection(url)
            self._stop.wait(max(0.0, began_s + LOOK_EVERY_S - time.monotonic()))
        connection.close()

    def _look(self, own: Sequence[Series], connection: http.client.HTTPConnection, request_id: str) -> None:
        query = ServerQuery(
            request_id=request_id, table=self._table, incarnation=self._incarnation, sql=_NOTHING, columns=("ts",),
            segments=(), tails=tuple(TailRequest(partition=n, from_offset=s.end) for n, s in enumerate(own)),
            prune=(PruneTerm(column="ts", op="<", values=(0,)),), budget_ms=int(_TIMEOUT_S * 1000),
        )  # fmt: skip
        connection.request("POST", "/internal/v1/query", encode(query), {"Content-Type": "application/json"})
        body = connection.getresponse().read()
        at_s = time.monotonic()
        length = int.from_bytes(body[:_HEADER_LENGTH_BYTES], "big")
        answer = decode(body[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + length], ServerAnswer)
        for partition in answer.partitions:
            own[partition.partition].saw(partition.covered.next, at_s)


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def first_seen(replicas: Iterable[Series]) -> list[float]:
    """When the furthest of several replicas moved."""
    moves = sorted(move for series in replicas for move in zip(series.times, series.ends[1:], strict=False))
    times, furthest = [], 0
    for at_s, end in moves:
        if end > furthest:
            furthest = end
            times.append(at_s)
    return times


def gaps_ms(times: Sequence[float], from_s: float, until_s: float) -> list[float]:
    """Between moves, of those that end in the span, and what has not moved by its end since the last one."""
    first, last = bisect_left(times, from_s), bisect_right(times, until_s)
    edges = [times[first - 1] if first else from_s, *times[first:last], until_s]
    return [(after_s - before_s) * 1000 for before_s, after_s in pairwise(edges)]


def wait_for_rows(watch: Watch, rows: Sequence[int], deadline_s: float) -> None:
    """Until every server shows that many rows of each partition."""
    until_s = time.monotonic() + deadline_s
    while any(series.end < rows[n] for own in watch.series.values() for n, series in enumerate(own)):
        if time.monotonic() > until_s:
            ends = {server: [series.end for series in own] for server, own in watch.series.items()}
            raise TimeoutError(f"expected {list(rows)} visible rows within {deadline_s:.0f} s, found {ends}")
        time.sleep(0.05)
