# SPDX-License-Identifier: Apache-2.0
"""The HTTP shell of a role: health, metrics, error shape, cause ids, listening."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cremant.model.errors import Fenced, InvalidConfig, NoResource, NotFound
from cremant.shell.app import check_host, json_response, listen, make_app, read_body, url_of
from cremant.shell.logs import current_cause


async def _missing(request: Request) -> Response:
    raise NotFound("Schema not found")


async def _fenced(request: Request) -> Response:
    raise Fenced("generation 3 is over", hint="stop")


async def _bug(request: Request) -> Response:
    raise ZeroDivisionError("secret detail")


async def _cause(request: Request) -> Response:
    return json_response({"cause": current_cause()})


async def _body(request: Request) -> Response:
    return json_response(len(await read_body(request, 10)))


def _get(path: str, *, ready: tuple[bool, str] = (True, ""), **request: object) -> httpx.Response:
    app = make_app(
        "broker",
        [
            Route("/missing", _missing), Route("/fenced", _fenced), Route("/bug", _bug), Route("/cause", _cause),
            Route("/body", _body, methods=["POST"]),
        ],
        ready=lambda: ready,
    )  # fmt: skip

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(**{"method": "GET", "url": path, **request})  # type: ignore[arg-type]

    return asyncio.run(run())


def test_health_is_ok_in_plain_text_when_the_role_is_ready() -> None:
    answer = _get("/health")
    assert (answer.status_code, answer.text) == (200, "OK")
    assert answer.headers["content-type"].startswith("text/plain")


def test_health_says_why_a_role_is_not_ready() -> None:
    answer = _get("/health", ready=(False, "no view of the cluster yet"))
    assert (answer.status_code, answer.text) == (503, "no view of the cluster yet")


def test_metrics_are_prometheus_text() -> None:
    assert _get("/metrics").headers["content-type"].startswith("text/plain")


def test_errors_have_pinots_shape_and_name_their_class_for_peers() -> None:
    answer = _get("/missing")
    assert answer.status_code == 404
    assert answer.json() == {"code": 404, "error": "Schema not found"}
    fenced = _get("/fenced")
    assert (fenced.status_code, fenced.headers["x-cremant-error"]) == (409, "Fenced")
    assert fenced.json()["error"] == "generation 3 is over (stop)"


def test_an_unknown_path_has_the_error_shape_too() -> None:
    assert _get("/nowhere").json()["code"] == 404


def test_a_bug_shows_no_stack_trace_to_the_caller() -> None:
    answer = _get("/bug")
    assert answer.status_code == 500
    assert "secret detail" not in answer.text


def test_a_given_cause_id_is_in_force_and_echoed() -> None:
    answer = _get("/cause", headers={"X-Cremant-Cause": "abc"})
    assert answer.json() == {"cause": "abc"}
    assert answer.headers["x-cremant-cause"] == "abc"


def test_a_request_without_a_cause_id_gets_a_fresh_one() -> None:
    assert len(_get("/cause").json()["cause"]) == 16


def test_a_body_over_its_bound_is_refused_with_413() -> None:
    assert _get("/body", method="POST", content=b"x" * 10).json() == 10
    assert _get("/body", method="POST", content=b"x" * 11).status_code == 413


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_addresses_are_accepted(host: str) -> None:
    check_host(host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::", "example.org"])
def test_other_addresses_need_the_insecure_flag(host: str) -> None:
    with pytest.raises(InvalidConfig, match="--insecure"):
        check_host(host, insecure=False)
    check_host(host, insecure=True)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(NoResource, match=f"port {port} .* in use"):
            listen("127.0.0.1", port)


def test_port_zero_picks_a_free_port_and_the_url_names_it() -> None:
    bound = listen("127.0.0.1", 0)
    try:
        assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        bound.close()


_PROGRAM = """
import asyncio, sys
from starlette.routing import Route
from cremant.shell.app import json_response, make_app, serve, sleep_or_stop
from cremant.shell.logs import setup_logging
setup_logging("broker", "Broker_x")
async def forever(request):
    await sleep_or_stop(request.app, asyncio.sleep(60), 60)
    return json_response("stopped")
serve(make_app("broker", [Route("/forever", forever)], ready=lambda: (True, "")), "127.0.0.1", 0,
      insecure=False, data_dir=sys.argv[1])
"""


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_process_cleanly_within_five_seconds(tmp_path: Path, stop_signal: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(tmp_path)], stderr=subprocess.PIPE)
    try:
        address = tmp_path / "address.json"
        deadline = time.monotonic() + 30
        while not address.exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        written = json.loads(address.read_bytes())
        assert written["pid"] == process.pid
        assert written["role"] == "broker"
        assert httpx.get(written["url"] + "/health", trust_env=False).text == "OK"
        began = time.monotonic()
        os.kill(process.pid, stop_signal)
        _, stderr = process.communicate(timeout=5)
        assert process.returncode == 0, stderr
        assert time.monotonic() - began < 5
        events = [json.loads(line) for line in stderr.splitlines()]
        assert [line["event"] for line in events] == ["listening", "stopped"]
        assert all(line["instance"] == "Broker_x" for line in events)
    finally:
        process.kill()
        process.wait()
