# SPDX-License-Identifier: Apache-2.0
"""Membership of a role, against a small real HTTP server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cremant.model.cluster import ClusterView, InstanceReport, Role, SegmentReport
from cremant.model.errors import Corrupt, DeadlineExceeded, Fenced, InvalidConfig, NotFound, Unavailable
from cremant.model.segments import ReplicaState
from cremant.shell.app import RunningServer, listen, make_app, serve, url_of
from cremant.shell.member import Member, own_identity
from cremant.wire.codec import decode, encode
from cremant.wire.messages import Heartbeat, HeartbeatReply
from cremant.wire.view import DELTAS, VIEW_HEADER, TableDelta, ViewDelta


class Controller:
    """Takes heartbeats in and hands out whatever view it is given."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.version = 1
        self.fence = False
        #: Does not remember segments that are left out.
        self.forgetful = False
        #: Answers changes from that version on instead of whole views.
        self.deltas_from: int | None = None
        self.changed_tables: dict[str, TableDelta] = {}
        self._handles: list[RunningServer] = []
        self._bound = listen("127.0.0.1", 0)
        self.url = url_of(self._bound)
        routes = [
            Route("/internal/v1/heartbeat", self._heartbeat, methods=["POST"]),
            Route("/internal/v1/view", self._view),
            Route("/refuse", self._refuse, methods=["POST"]),
            Route("/slow", self._slow, methods=["POST"]),
        ]
        app = make_app("controller", routes, ready=lambda: (True, ""))
        arguments = {"insecure": False, "bound": self._bound, "on_handle": self._handles.append}
        self._thread = threading.Thread(target=serve, args=(app, "", 0), kwargs=arguments, daemon=True)
        self._thread.start()

    async def _heartbeat(self, request: Request) -> Response:
        if self.fence:
            raise Fenced("a newer process runs under this id")
        beat = decode(await request.body(), Heartbeat)
        self.beats.append(beat)
        say_all = self.forgetful and beat.segments_kept
        return Response(encode(HeartbeatReply(controller_nonce="c", view_version=self.version, say_all=say_all)))

    async def _view(self, request: Request) -> Response:
        if int(request.query_params["since"]) == self.version:
            await asyncio.sleep(0.05)
        if int(request.query_params["since"]) == self.version:
            return Response(status_code=304)
        if request.query_params["since"] != "-1" and self.deltas_from is not None:
            delta = ViewDelta(
                since=self.deltas_from, version=self.version, controller_nonce="c", tables=self.changed_tables
            )
            return Response(encode([delta]), headers={VIEW_HEADER: DELTAS})
        return Response(encode(ClusterView(version=self.version, controller_nonce="c")))

    async def _refuse(self, request: Request) -> Response:
        raise NotFound("no such thing", hint="look elsewhere")

    async def _slow(self, request: Request) -> Response:
        await asyncio.sleep(2)
        return Response(b"{}")

    def stop(self) -> None:
        for handle in self._handles:
            handle.stop()
        self._thread.join(timeout=10)


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.stop()


@pytest.fixture
def member(controller: Controller, tmp_path: Path) -> Iterator[Member]:
    made = Member(Role.SERVER, tmp_path, "127.0.0.1", 8098, controller.url, InstanceReport)
    yield made
    made.stop()


def _until(condition: object, timeout_s: float = 10) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_identity_is_drawn_once_and_kept_when_the_port_changes(tmp_path: Path) -> None:
    assert own_identity(tmp_path, Role.SERVER, "127.0.0.1", 8098).id == "Server_127.0.0.1_8098"
    assert own_identity(tmp_path, Role.SERVER, "127.0.0.1", 9999).id == "Server_127.0.0.1_8098"


def test_a_directory_of_another_role_or_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    own_identity(tmp_path, Role.SERVER, "127.0.0.1", 8098)
    with pytest.raises(InvalidConfig, match="belongs to a server"):
        own_identity(tmp_path, Role.BROKER, "127.0.0.1", 8099)
    (tmp_path / "instance.json").write_bytes(b"{")
    with pytest.raises(Corrupt, match=r"instance\.json"):
        own_identity(tmp_path, Role.SERVER, "127.0.0.1", 8098)


def test_two_processes_of_one_identity_have_different_nonces(controller: Controller, tmp_path: Path) -> None:
    one = Member(Role.SERVER, tmp_path, "127.0.0.1", 8098, controller.url)
    two = Member(Role.SERVER, tmp_path, "127.0.0.1", 8098, controller.url)
    assert one.id == two.id
    assert one.nonce != two.nonce
    one.stop()
    two.stop()


def test_heartbeats_carry_record_nonce_and_report(controller: Controller, member: Member) -> None:
    member.start()
    _until(lambda: len(controller.beats) >= 2)
    beat = controller.beats[0]
    assert (beat.instance.id, beat.instance.port, beat.nonce) == (member.id, 8098, member.nonce)


def test_segments_are_said_when_they_changed_and_when_the_controller_asks(
    controller: Controller, tmp_path: Path
) -> None:
    reports = [
        InstanceReport(segments=(SegmentReport(table="t", segment="s", state=ReplicaState.ONLINE, rows=rows),))
        for rows in (1, 2)
    ]
    said = [reports[0]]
    member = Member(Role.SERVER, tmp_path, "127.0.0.1", 8098, controller.url, lambda: said[0])
    member.start()
    try:
        _until(lambda: len(controller.beats) >= 3)
        assert [beat.segments_kept for beat in controller.beats[:3]] == [False, True, True]
        assert [beat.report.segments for beat in controller.beats[:3]] == [reports[0].segments, (), ()]
        said[0] = reports[1]
        _until(lambda: any(beat.report.segments == reports[1].segments for beat in controller.beats))
        before = len(controller.beats)
        controller.forgetful = True
        _until(lambda: any(not beat.segments_kept for beat in controller.beats[before:]))
        assert controller.beats[-1].report.segments in ((), reports[1].segments)
    finally:
        member.stop()


def test_a_poke_sends_a_heartbeat_now(controller: Controller, member: Member) -> None:
    member.start()
    _until(lambda: controller.beats)
    time.sleep(0.05)
    before, began = len(controller.beats), time.monotonic()
    member.poke()
    _until(lambda: len(controller.beats) > before)
    assert time.monotonic() - began < 0.4


def test_callbacks_see_each_newer_view_once_and_late_ones_the_present(controller: Controller, member: Member) -> None:
    seen: list[int] = []
    member.on_view(lambda view: seen.append(view.version))
    member.start()
    _until(lambda: seen == [1])
    controller.version = 2
    _until(lambda: seen == [1, 2])
    late: list[int] = []
    member.on_view(lambda view: late.append(view.version))
    assert late == [2]


def test_changes_make_the_next_view_and_changes_that_do_not_fit_are_answered_by_asking_for_all(
    controller: Controller, member: Member
) -> None:
    member.start()
    _until(lambda: member.view is not None and member.view.version == 1)
    controller.deltas_from = 1
    controller.version = 2
    _until(lambda: member.view is not None and member.view.version == 2)
    controller.version = 7  # still "from 1", which this member no longer has
    _until(lambda: member.view is not None and member.view.version == 7)


def test_a_change_of_a_table_that_is_not_there_is_answered_by_asking_for_all(
    controller: Controller, member: Member
) -> None:
    member.start()
    _until(lambda: member.view is not None and member.view.version == 1)
    controller.deltas_from, controller.changed_tables = 1, {"stranger": TableDelta(segments_gone=("s",))}
    controller.version = 2
    _until(lambda: member.view is not None and member.view.version == 2, 3)


def test_a_failing_callback_stops_neither_others_nor_the_next_view(controller: Controller, member: Member) -> None:
    seen: list[int] = []

    def fail(view: ClusterView) -> None:
        raise ZeroDivisionError

    member.on_view(fail)
    member.on_view(lambda view: seen.append(view.version))
    member.start()
    _until(lambda: seen == [1])
    controller.version = 2
    _until(lambda: seen == [1, 2])


def test_waiting_for_a_view_ends_with_it_or_with_the_timeout(controller: Controller, member: Member) -> None:
    member.start()
    assert member.wait_for_view(lambda view: view.version >= 1, 5_000) is not None
    assert member.wait_for_view(lambda view: view.version >= 2, 50) is None


def test_a_fenced_member_says_so_and_beats_no_more(controller: Controller, member: Member) -> None:
    member.start()
    _until(lambda: controller.beats)
    controller.fence = True
    _until(lambda: member.fenced)


def test_calls_raise_what_the_controller_raised(controller: Controller, member: Member) -> None:
    with pytest.raises(NotFound, match=r"no such thing \(look elsewhere\)"):
        member.call("/refuse", {}, dict)
    with pytest.raises(DeadlineExceeded, match="100 ms"):
        member.call("/slow", {}, dict, timeout_ms=100)


def test_an_unreachable_controller_is_unavailable_and_the_last_view_stays(
    controller: Controller, member: Member
) -> None:
    member.start()
    _until(lambda: member.view is not None)
    view = member.view
    controller.stop()
    with pytest.raises(Unavailable):
        member.call("/refuse", {}, dict)
    assert member.view is view


def test_the_identity_file_names_id_and_role(tmp_path: Path) -> None:
    own_identity(tmp_path, Role.BROKER, "127.0.0.1", 8099)
    assert json.loads((tmp_path / "instance.json").read_bytes()) == {"id": "Broker_127.0.0.1_8099", "role": "broker"}
