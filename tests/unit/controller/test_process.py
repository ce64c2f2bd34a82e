# SPDX-License-Identifier: Apache-2.0
"""The real controller process on real files: kill -9 in the middle of work, restart, nothing lost, nothing doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from control import schema, table

from cremant.controller.main import run_controller
from cremant.log.embedded import EmbeddedLog
from cremant.model.cluster import ClusterView, InstanceReport, Role
from cremant.model.errors import CremantError, InvalidConfig
from cremant.model.names import epoch_topic
from cremant.model.offsets import Position
from cremant.model.segments import SegmentStatus
from cremant.model.settings import Settings
from cremant.shell.member import Member
from cremant.wire.messages import CommitEnd, CommitEndReply, CompletionStatus, SegmentConsumed, SegmentConsumedReply

_PROGRAM = """
import sys
from cremant.controller.main import run_controller
from cremant.model.settings import Settings
base, port = sys.argv[1], int(sys.argv[2])
layer = {"data_dir": base + "/controller", "log_dir": base + "/log", "store_uri": base + "/store"}
layer |= dict(setting.split("=", 1) for setting in sys.argv[3:])
run_controller(Settings(("test", layer)), port=port, insecure=False)
"""


class Process:
    """A controller that is started again on the same files and the same port."""

    def __init__(self, base: Path, *settings: str) -> None:
        self.base = base
        self.settings = settings
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        address = self.base / "controller" / "address.json"
        address.unlink(missing_ok=True)
        log = (self.base / "stderr.log").open("ab")
        arguments = [sys.executable, "-c", _PROGRAM, str(self.base), str(self.port), *self.settings]
        self.process = subprocess.Popen(arguments, stderr=log)
        log.close()
        _until(address.exists)
        self.port = int(json.loads(address.read_bytes())["url"].rpartition(":")[2])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def call(self, method: str, path: str, document: Any = None) -> httpx.Response:
        content = b"" if document is None else json.dumps(document).encode()
        return httpx.request(method, self.url + path, content=content, timeout=10, trust_env=False)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    made.start()
    yield made
    made.kill()


def _until(condition: Any, timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _member(controller: Process, name: str, port: int) -> Member:
    member = Member(Role.SERVER, controller.base / name, "127.0.0.1", port, controller.url, lambda: InstanceReport())
    member.start()
    return member


def test_kill_9_while_tables_are_created_and_dropped_leaves_whole_tables_and_no_orphans(controller: Process) -> None:
    """A client creates and drops tables in a row, retrying; the controller is killed at ten random moments. In the end
    there is exactly what the client was told, and exactly the topics of those tables."""
    dice = random.Random(7)
    member = _member(controller, "server", 8098)
    try:
        _until(lambda: member.last_heard_s is not None)
        assert controller.call("POST", "/topics", {"name": "events", "partitions": 3}).status_code == 200
        expected: set[str] = set()
        done = threading.Event()

        def client() -> None:
            number = 0
            while not done.is_set():
                name = f"t{number % 6}"
                _insist(controller, "POST", "/schemas", schema(name), {200})
                _insist(controller, "POST", "/tables", table(name), {200, 409})
                expected.add(name)
                if number % 2:
                    _insist(controller, "DELETE", f"/tables/{name}", None, {200, 404})
                    expected.discard(name)
                number += 1

        thread = threading.Thread(target=client)
        thread.start()
        for _ in range(10):
            time.sleep(dice.uniform(0.05, 0.5))
            controller.kill()
            controller.start()
        done.set()
        thread.join(timeout=60)
        assert not thread.is_alive()
        _until(lambda: _settled(controller))
        assert set(controller.call("GET", "/tables").json()["tables"]) == expected
        view = member.wait_for_view(lambda view: set(view.tables) == expected, 10_000)
        assert view is not None
        _check_whole(controller, view)
    finally:
        member.stop()


def _insist(controller: Process, method: str, path: str, document: Any, wanted: set[int]) -> None:
    """Retries while the controller is away or just starting (too few live servers known)."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            answer = controller.call(method, path, document)
            if answer.status_code in wanted:
                return
            assert "live servers" in answer.text or answer.status_code >= 500, answer.text
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _settled(controller: Process) -> bool:
    metrics = controller.call("GET", "/metrics").text
    return "cremant_tables_being_removed 0.0" in metrics


def _check_whole(controller: Process, view: ClusterView) -> None:
    controller.kill()
    controller.start()  # its start sweeps what a killed creation left
    known = {epoch_topic(name, found.record.incarnation) for name, found in view.tables.items()}

    def epoch_topics() -> set[str]:
        log = EmbeddedLog(controller.base / "log")
        try:
            return {info.name for info in log.topics() if info.name.startswith("epochs.")}
        finally:
            log.close()

    _until(lambda: epoch_topics() == known)
    for found in view.tables.values():
        assert [p.record.partition for p in found.partitions] == [0, 1, 2]
        assert all(p.consuming.status is SegmentStatus.IN_PROGRESS for p in found.partitions)


def test_kill_9_while_segments_are_committed_keeps_the_chain_whole(controller: Process) -> None:
    """Two replicas cut and commit as fast as they can, repeating every message until it is answered, while the
    controller is killed ten times: ends are unique, neighbours join exactly, every acknowledged commit is there."""
    dice = random.Random(11)
    members = [_member(controller, f"server{n}", 8098 - n) for n in range(2)]
    try:
        _until(lambda: all(member.last_heard_s is not None for member in members))
        controller.call("POST", "/topics", {"name": "events", "partitions": 1})
        controller.call("POST", "/schemas", schema())
        assert controller.call("POST", "/tables", table(replication=2)).status_code == 200
        done = threading.Event()
        acknowledged: dict[str, Position] = {}
        threads = [
            threading.Thread(target=_commit_forever, args=(member, done, acknowledged, n), daemon=True)
            for n, member in enumerate(members)
        ]
        for thread in threads:
            thread.start()
        for _ in range(10):
            time.sleep(dice.uniform(0.1, 0.5))
            controller.kill()
            controller.start()
        time.sleep(1)
        done.set()
        for thread in threads:
            thread.join(timeout=30)
        view = members[0].wait_for_view(lambda view: len(view.tables["gold"].segments) >= len(acknowledged), 15_000)
        assert view is not None
        found = view.tables["gold"]
        chain = sorted(found.segments, key=lambda segment: segment.sequence)
        assert len(chain) > 10
        assert [segment.sequence for segment in chain] == list(range(len(chain)))
        for before, after in zip(chain, [*chain[1:], found.partitions[0].consuming], strict=True):
            assert before.end == after.start
            assert before.end_offset == after.start_offset
        for name, end in acknowledged.items():
            assert next(segment.end for segment in chain if segment.name == name) == end
    finally:
        for member in members:
            member.stop()


def _commit_forever(member: Member, done: threading.Event, acknowledged: dict[str, Position], salt: int) -> None:
    """A replica that is always past its row limit. Each replica would cut elsewhere: the first report decides."""
    while not done.is_set():
        view = member.wait_for_view(lambda view: "gold" in view.tables, 1_000)
        if view is None:
            continue
        found = view.tables["gold"]
        segment, incarnation = found.partitions[0].consuming, found.record.incarnation
        offset = segment.start_offset + 10 + salt
        at = Position(log_offset=offset, epoch=offset, generation=1, next_offset=offset)
        try:
            consumed = SegmentConsumed(
                instance=member.id,
                table="gold",
                incarnation=incarnation,
                segment=segment.name,
                at=at,
                reason="rowLimit",
            )
            reply = member.call("/internal/v1/segmentConsumed", consumed, SegmentConsumedReply)
            if reply.status is CompletionStatus.CATCH_UP and reply.end is not None:
                again = SegmentConsumed(
                    instance=member.id, table="gold", incarnation=incarnation, segment=segment.name, at=reply.end,
                    reason="rowLimit",
                )  # fmt: skip
                reply = member.call("/internal/v1/segmentConsumed", again, SegmentConsumedReply)
            if reply.status is not CompletionStatus.COMMIT or reply.end is None:
                time.sleep(0.02)
                continue
            ended = CommitEnd(
                instance=member.id, table="gold", incarnation=incarnation, segment=segment.name, token=reply.token,
                end=reply.end, rows=1, size_bytes=1, checksum="c", file_checksum="f", store_url=None,
            )  # fmt: skip
            if member.call("/internal/v1/commitEnd", ended, CommitEndReply).status is CompletionStatus.COMMIT_SUCCESS:
                acknowledged[segment.name] = reply.end
        except CremantError:
            time.sleep(0.02)


def test_a_stopped_controller_ends_cleanly_and_its_successor_has_the_next_term(controller: Process) -> None:
    assert controller.call("GET", "/status").json()["leaderTerm"] == 1
    assert controller.process is not None
    controller.process.send_signal(signal.SIGTERM)
    assert controller.process.wait(timeout=5) == 0
    controller.start()
    assert controller.call("GET", "/status").json()["leaderTerm"] == 2


def test_a_second_controller_on_the_same_directory_is_refused(controller: Process) -> None:
    arguments = [sys.executable, "-c", _PROGRAM, str(controller.base), "0"]
    second = subprocess.run(arguments, capture_output=True, timeout=60, env=os.environ, check=False)
    assert second.returncode != 0
    assert b"another controller runs on" in second.stderr


def test_members_keep_their_view_while_the_controller_is_away(controller: Process) -> None:
    member = _member(controller, "server", 8098)
    try:
        assert member.wait_for_view(lambda view: bool(view.instances), 10_000) is not None
        before = member.view
        controller.kill()
        time.sleep(0.5)
        assert member.view is before
        controller.start()
        assert before is not None
        nonce = before.controller_nonce
        view = member.wait_for_view(lambda view: view.controller_nonce != nonce, 10_000)
        assert view is not None
        assert [instance.live for instance in view.instances] == [True]
    finally:
        member.stop()


def test_a_controller_whose_logs_are_all_in_kafka_makes_no_directory_for_the_embedded_one(tmp_path: Path) -> None:
    process = Process(tmp_path, "epoch_log=kafka", "kafka_brokers=127.0.0.1:9")
    process.start()
    try:
        _until(lambda: process.call("GET", "/health").status_code == 200)
        assert process.call("GET", "/tables").json() == {"tables": []}
        assert not (tmp_path / "log").exists()
        assert process.call("POST", "/topics", {"name": "first", "partitions": 1}).status_code == 200
        assert (tmp_path / "log").is_dir()
    finally:
        process.kill()


def test_a_controller_with_an_epoch_log_that_cannot_be_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="setting kafka_brokers"):
        run_controller(Settings(("test", {"data_dir": str(tmp_path), "epoch_log": "kafka"})), port=0, insecure=False)
