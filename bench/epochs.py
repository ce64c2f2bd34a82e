# SPDX-License-Identifier: Apache-2.0
"""Where the milliseconds of an epoch go: the epoch log of a table read as it grows, a server asked when rows become
visible, and what pipeline and server say of their phases.

All times are of one machine's clock. Per epoch, from the plan on:

    period    from one plan to the next: how long the oldest row of an epoch waited to be planned
    blocks    plan -> last row block in the log: Spark's job, reading, decoding, appending
    mark      last row block -> mark in partition 0, which closes the epoch
    rest      mark -> next plan: other partitions' marks, Spark's commit, the next trigger
    visible   row block in the log -> its rows are seen by queries of a server (partition 0)

A row of an append table waits `period` at worst, then `blocks`, then `visible`.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from bench.cluster import LocalCluster
from bench.context import percentile
from cremant.epoch.format import BlockHead, peek
from cremant.epoch.records import EpochMark
from cremant.log.embedded import EmbeddedLog
from cremant.model.names import epoch_topic
from cremant.wire.codec import decode, encode
from cremant.wire.watermarks import WantedMark, WatermarksReply, WatermarksRequest

_LONG_POLL_MS = 2_000
_SCRAPE_EVERY_S = 0.5
_PHASE = re.compile(r"^cremant_pipeline_phase_ms\{(.*)\} (\S+)$")
_COMMIT = re.compile(r"^pinot_server_segmentCommitPhaseTimeMs_(sum|count)\{(.*)\} (\S+)$")


class EpochTrace:
    """Threads that look, while it lasts: a context manager."""

    def __init__(self, cluster: LocalCluster, table: str, partitions: int) -> None:
        self._table, self._partitions = table, partitions
        self._roles = cluster.ready["roles"]
        view = cluster.rest.call("GET", "/internal/v1/view")["tables"][table]
        self._incarnation = str(view["record"]["incarnation"])
        self._topic = epoch_topic(table, self._incarnation)
        self._log = EmbeddedLog(Path(cluster.ready["logDir"]))
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._follow, self._watch_visible, self._scrape)
        ]
        #: By epoch: plan, last row block, mark (ms). Of partition 0: block's end -> when it was logged, was visible.
        self._planned: dict[int, float] = {}
        self._blocks: dict[int, float] = {}
        self._marked: dict[int, float] = {}
        self._logged: dict[int, float] = {}
        self._visible: dict[int, float] = {}
        self._phases: dict[str, list[float]] = defaultdict(list)
        self._commits: dict[str, dict[str, float]] = {}
        self._commits_before: dict[str, dict[str, float]] = {}
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self._log.close()

    def clear(self) -> None:
        """Figures are of what comes from now on."""
        for found in (self._planned, self._blocks, self._marked, self._logged, self._visible):
            found.clear()
        self._phases.clear()
        self._commits_before = self._server_phases()

    def figures(self) -> dict[str, Any]:
        """`epoch_…`: of epochs; `spark_…`: phases of Spark's trigger; `commit_…`: mean ms of a segment's phases."""
        epochs = sorted(set(self._planned) & set(self._blocks) & set(self._marked))
        stages = {
            "period": [self._planned[b] - self._planned[a] for a, b in pairwise(sorted(self._planned)) if b == a + 1],
            "blocks": [self._blocks[epoch] - self._planned[epoch] for epoch in epochs],
            "mark": [self._marked[epoch] - self._blocks[epoch] for epoch in epochs],
            "rest": [self._planned[e + 1] - self._marked[e] for e in epochs if e + 1 in self._planned],
            "visible": [self._visible[end] - at_ms for end, at_ms in self._logged.items() if end in self._visible],
        }
        found: dict[str, Any] = {"epochs": len(epochs)}
        for stage, values in stages.items():
            if values:
                found |= {f"epoch_{stage}_p50": percentile(values, 0.5), f"epoch_{stage}_p99": percentile(values, 0.99)}
        for phase, values in sorted(self._phases.items()):
            found[f"spark_{phase}_p50"] = percentile(values, 0.5)
        for phase, now in sorted(self._server_phases().items()):
            before = self._commits_before.get(phase, {})
            if count := now.get("count", 0) - before.get("count", 0):
                found[f"commit_{phase}_mean"] = (now["sum"] - before.get("sum", 0)) / count
        return found

    # --- threads ---

    def _follow(self) -> None:
        """The records of all partitions, from the log's present end on."""
        readers = [self._log.reader(self._topic, p, self._log.latest(self._topic, p)) for p in range(self._partitions)]
        while not self._stop.is_set():
            for partition, reader in enumerate(readers):
                while (batch := reader.read(max_messages=100, max_bytes=16 * 1024 * 1024)) is not None:
                    for value, at_ms in zip(batch.values, batch.timestamps_ms.tolist(), strict=True):
                        self._record(partition, value.as_buffer(), at_ms)
            self._log.wait({(self._topic, p): reader.position for p, reader in enumerate(readers)}, 0.5)
        for reader in readers:
            reader.close()

    def _record(self, partition: int, value: Any, at_ms: float) -> None:
        head = peek(value, self._incarnation)
        if isinstance(head, BlockHead):
            self._blocks[head.epoch] = max(at_ms, self._blocks.get(head.epoch, 0))
            if partition == 0:
                self._logged[head.range.next] = at_ms
        elif isinstance(head, EpochMark) and partition == 0:
            self._marked[head.epoch] = at_ms
            planned = [line.reached_at_ms for line in head.partitions if line.reached_at_ms is not None]
            if planned:
                self._planned[head.epoch] = min(planned)

    def _watch_visible(self) -> None:
        """Asks a server for more rows of partition 0 than it had, again and again; it answers when there are."""
        url = urlsplit(next(url for name, url in self._roles.items() if name.startswith("server")))
        assert url.hostname is not None
        connection, seen = http.client.HTTPConnection(url.hostname, url.port, timeout=10), 0
        while not self._stop.is_set():
            request = WatermarksRequest(
                table=self._table, incarnation=self._incarnation, wanted=(WantedMark(partition=0, offset=seen + 1),),
                timeout_ms=_LONG_POLL_MS,
            )  # fmt: skip
            try:
                connection.request("POST", "/internal/v1/watermarks", encode(request))
                reply = decode(connection.getresponse().read(), WatermarksReply)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(str(error))
                connection.close()
                self._stop.wait(0.1)
                continue
            for tail in reply.tails:
                seen = tail.watermark.next_offset
                self._visible[seen] = time.time() * 1000
        connection.close()

    def _scrape(self) -> None:
        while not self._stop.wait(_SCRAPE_EVERY_S):
            for line in self._metrics("pipeline"):
                if (found := _PHASE.match(line)) and _label(found[1], "table") == self._table:
                    self._phases[_label(found[1], "phase")].append(float(found[2]))

    def _server_phases(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for name in self._roles:
            if name.startswith("server"):
                for line in self._metrics(name):
                    if match := _COMMIT.match(line):
                        found[_label(match[2], "phase")][match[1]] = float(match[3])
        return found

    def _metrics(self, role: str) -> list[str]:
        try:
            return httpx.get(self._roles[role] + "/metrics", timeout=10, trust_env=False).text.splitlines()
        except httpx.HTTPError as error:
            self.failures.append(str(error))
            return []


def _label(labels: str, name: str) -> str:
    found = re.search(rf'{name}="([^"]*)"', labels)
    return found[1] if found else ""
