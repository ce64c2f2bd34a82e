# SPDX-License-Identifier: Apache-2.0
"""Known rows all the time, and questions beside them: what a test does to the roles of a `server_kit.Cluster`, it does
under load. Row i of a partition has fare i, so the offsets that an answer names say what must be in it."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any, Self

import httpx
from server_kit import Cluster

SQL = "SELECT count(*), sum(fare) FROM trips"


class Feed:
    """A writer of epochs and a checker of answers, in threads of their own, while it is entered."""

    def __init__(self, cluster: Cluster, broker_url: str, *, rows: int = 100, every_s: float = 0.1) -> None:
        """`rows`: per partition and epoch."""
        self.complete = 0
        self.flagged = 0
        self.unanswered = 0
        self.wrong: list[str] = []
        self.last_flag = ""
        self._cluster = cluster
        self._url = f"{broker_url}/query/sql"
        self._rows, self._every_s = rows, every_s
        self._stopping = threading.Event()
        self._writing = threading.Event()
        #: Held while an epoch is written.
        self._turn = threading.Lock()
        self._failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._write), threading.Thread(target=self._check)]

    def __enter__(self) -> Self:
        self._cluster.epochs.start()
        self._writing.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def pause(self) -> None:
        """No more rows for now; returns when the last epoch is closed."""
        self._writing.clear()
        with self._turn:
            pass

    def go_on(self) -> None:
        self._writing.set()

    def ask(self, sql: str = SQL) -> dict[str, Any]:
        answer = httpx.post(self._url, json={"sql": sql}, timeout=30, trust_env=False)
        found: dict[str, Any] = answer.json()
        return found

    def is_exact(self) -> bool:
        """The broker's answer is complete and has every row that was written; ask while the feed pauses."""
        count, total, _ = self._cluster.expected()
        answer = self.ask()
        return _is_complete(answer) and answer["resultTable"]["rows"] == [[count, total]]

    def checked(self) -> str:
        """What was seen, in words. No complete answer was ever wrong."""
        assert not self._failed, self._failed
        assert self.wrong[:3] == []
        assert self.complete > 20, "too few answers for this test to mean anything"
        return (
            f"{sum(self._cluster.epochs.ends)} rows, {self.complete} complete answers, {self.flagged} flagged, "
            f"{self.unanswered} unanswered"
        )

    def _write(self) -> None:
        try:
            while not self._stopping.wait(self._every_s):
                with self._turn:
                    if self._writing.is_set():
                        self._cluster.epochs.write(self._rows)
        except BaseException as error:
            self._failed.append(error)
            raise

    def _check(self) -> None:
        while not self._stopping.wait(0.05):
            try:
                answer = self.ask()
            except (httpx.HTTPError, ValueError):
                self.unanswered += 1
                continue
            if not _is_complete(answer):
                self.flagged += 1
                self.last_flag = str(answer.get("exceptions"))
                continue
            self.complete += 1
            offsets = _offsets(answer)
            [found] = answer["resultTable"]["rows"]
            expected = [sum(offsets), sum(offset * (offset - 1) // 2 for offset in offsets)]
            if [found[0], found[1] or 0] != expected:
                self.wrong.append(f"{found} instead of {expected} at {offsets}")


def _is_complete(answer: dict[str, Any]) -> bool:
    return not answer.get("exceptions") and not answer.get("partialResult") and answer.get("resultTable") is not None


def _offsets(answer: dict[str, Any]) -> list[int]:
    """The next visible offset of each partition, as the answer's readToken names them."""
    token = answer["readToken"]
    return [int(o) for o in json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))["o"].values()]
