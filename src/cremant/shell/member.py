# SPDX-License-Identifier: Apache-2.0
"""A role's membership in the cluster: heartbeats out, the cluster view in, calls to the controller.

Rules: the id is drawn once and kept in `<data_dir>/instance.json` (the address may change, the id does not); the nonce
is drawn at each process start. While the controller is away, the last view stays in force. Two daemon threads: one
beats, one long-polls the view (the whole one first, then what changes); callbacks run on the second, one view at a
time, and only ever see newer views.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from cremant.cluster.view_delta import apply
from cremant.model import errors
from cremant.model.cluster import ClusterView, InstanceRecord, InstanceReport, Role, SegmentReport
from cremant.model.errors import (
    Conflict,
    Corrupt,
    CremantError,
    DeadlineExceeded,
    Fenced,
    PeerError,
    Unavailable,
    UserError,
)
from cremant.model.limits import HEARTBEAT_MS, INTERNAL_REQUEST_TIMEOUT_MS, VIEW_POLL_MS
from cremant.model.names import instance_id
from cremant.shell.app import ERROR_HEADER
from cremant.shell.backoff import Backoff
from cremant.shell.logs import CAUSE_HEADER, current_cause, log_event, log_failure
from cremant.wire.codec import decode, encode
from cremant.wire.messages import Heartbeat, HeartbeatReply
from cremant.wire.view import DELTAS, VIEW_HEADER, ViewDelta

_log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_PATH = "/internal/v1/heartbeat"
VIEW_PATH = "/internal/v1/view"


class Identity(msgspec.Struct, frozen=True):
    id: str
    role: Role


def own_identity(data_dir: str | Path, role: Role, host: str, port: int) -> Identity:
    """Reads `<data_dir>/instance.json`, or draws the identity and writes it (durably, once)."""
    path = Path(data_dir) / "instance.json"
    if path.exists():
        try:
            known = msgspec.json.decode(path.read_bytes(), type=Identity)
        except msgspec.MsgspecError as error:
            raise Corrupt(
                f"{path} is damaged: {error}", hint="restore it, or remove it to join as a new one"
            ) from error
        if known.role != role:
            raise errors.InvalidConfig(f"{data_dir} belongs to a {known.role}, not to a {role}")
        return known
    fresh = Identity(instance_id(role, host, port), role)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(fresh))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return fresh


def raise_for(response: httpx.Response, what: str) -> None:
    """An error answer of a Cremant role as the error its sender raised."""
    if response.status_code < 400:
        return
    try:
        message = str(msgspec.json.decode(response.content)["error"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = response.text[:500] or f"status {response.status_code}"
    kind = getattr(errors, response.headers.get(ERROR_HEADER, ""), None)
    if isinstance(kind, type) and issubclass(kind, CremantError):
        try:
            raise kind(message)
        except TypeError:  # a class with further arguments: its family will do
            pass
    if response.status_code < 500:
        raise UserError(f"{what}: {message}")
    raise PeerError(f"{what}: {message}")


class Member:
    """This process in the cluster. Thread-safe. `host` and `port` are those it really listens on."""

    def __init__(
        self,
        role: Role,
        data_dir: str | Path,
        host: str,
        port: int,
        controller_url: str,
        report: Callable[[], InstanceReport] = InstanceReport,
        *,
        tls_port: int = 0,
        tags: tuple[str, ...] = (),
    ) -> None:
        self.role = role
        self.id = own_identity(data_dir, role, host, port).id
        self.nonce = secrets.token_hex(8)
        #: The newest view, None before the first; replaced as a whole.
        self.view: ClusterView | None = None
        #: Another process took this id over: this one must stop serving.
        self.fenced = False
        #: Controller's clock minus our monotonic one, as of the last heartbeat.
        self._cluster_offset_ms: int | None = None
        #: Monotonic seconds of the last answered heartbeat; None before the first.
        self.last_heard_s: float | None = None
        self._record = InstanceRecord(id=self.id, role=role, host=host, port=port, tls_port=tls_port, tags=tags)
        self._url = controller_url.rstrip("/")
        self._report = report
        self._callbacks: list[Callable[[ClusterView], None]] = []
        self._resync = False
        #: Segments of the last heartbeat that was answered.
        self._said: tuple[SegmentReport, ...] | None = None
        self._beats = 0
        self._stopping = threading.Event()
        self._poked = threading.Event()
        self._seen = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._client = httpx.Client(
            base_url=self._url, timeout=INTERNAL_REQUEST_TIMEOUT_MS / 1000, trust_env=False,
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=8),
        )  # fmt: skip

    def on_view(self, callback: Callable[[ClusterView], None]) -> None:
        """`callback(view)` for each new view, and at once if there is one. It must not block for long."""
        self._callbacks.append(callback)
        if self.view is not None:
            self._run_callback(callback, self.view)

    def start(self) -> None:
        for name, body in (("heartbeat", self._beat_forever), ("view", self._watch_forever)):
            thread = threading.Thread(target=body, name=f"{self.role}-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stops both threads; a long poll in flight is abandoned (its thread is a daemon)."""
        self._stopping.set()
        self._poked.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=0.3)
        self._client.close()

    def poke(self) -> None:
        """Sends a heartbeat now: the report has changed in a way that others wait for."""
        self._poked.set()

    def cluster_now_ms(self) -> int:
        """The controller's clock, so that ages of its records do not depend on our wall clock."""
        if self._cluster_offset_ms is None:
            return int(time.time() * 1000)
        return int(time.monotonic() * 1000) + self._cluster_offset_ms

    def wait_for_view(self, condition: Callable[[ClusterView], bool], timeout_ms: int) -> ClusterView | None:
        """The first view for which `condition` holds, or None at the timeout."""

        def holds() -> bool:
            return self.view is not None and condition(self.view)

        with self._seen:
            return self.view if self._seen.wait_for(holds, timeout_ms / 1000) else None

    def call(self, path: str, message: object, reply_type: type[T], timeout_ms: int = INTERNAL_REQUEST_TIMEOUT_MS) -> T:
        """POSTs `message` to the controller. Raises Unavailable, DeadlineExceeded, or what the controller raised."""
        content = self._request("POST", path, encode(message), timeout_ms).content
        return decode(content, reply_type)

    def _request(self, method: str, path: str, body: bytes | None, timeout_ms: int) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        if cause_id := current_cause():
            headers[CAUSE_HEADER] = cause_id
        try:
            response = self._client.request(method, path, content=body, headers=headers, timeout=timeout_ms / 1000)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"controller {self._url} did not answer {path} in {timeout_ms} ms") from error
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed by stop()
            raise Unavailable(f"controller {self._url} is not reachable: {error}") from error
        raise_for(response, f"controller refused {path}")
        return response

    def _beat_forever(self) -> None:
        connected = False
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self._beat()
                if not connected:
                    log_event(_log, "joined the cluster", instance_id=self.id, controller_url=self._url)
                connected = True
            except Fenced as error:
                self.fenced = True
                log_failure(_log, "another process runs under this id: this one steps back", error)
                return
            except CremantError as error:
                if connected or self.last_heard_s is None:
                    log_failure(_log, "heartbeat failed", error)
                connected = False
            except Exception:
                _log.exception("the report for the heartbeat failed")
            self._poked.wait(max(0.0, HEARTBEAT_MS / 1000 - (time.monotonic() - began_s)))
            self._poked.clear()

    def _beat(self) -> None:
        reply = self._say(self._report())
        self.last_heard_s = time.monotonic()
        if reply.now_ms:
            self._cluster_offset_ms = reply.now_ms - int(self.last_heard_s * 1000)

    def _say(self, report: InstanceReport) -> HeartbeatReply:
        """Segments are said when they changed: there may be many, and mostly nothing happens to them."""
        kept = bool(report.segments) and report.segments == self._said
        said = msgspec.structs.replace(report, segments=()) if kept else report
        self._said = None
        reply = self._send_beat(said, segments_kept=kept)
        if reply.say_all:
            reply = self._send_beat(report, segments_kept=False)
        self._said = report.segments
        return reply

    def _send_beat(self, report: InstanceReport, *, segments_kept: bool) -> HeartbeatReply:
        self._beats += 1
        beat = Heartbeat(
            instance=self._record, nonce=self.nonce, report=report, segments_kept=segments_kept, number=self._beats
        )
        return self.call(HEARTBEAT_PATH, beat, HeartbeatReply)

    def _watch_forever(self) -> None:
        backoff = Backoff(first_ms=100, max_ms=2_000)
        failing = False
        while not self._stopping.is_set():
            try:
                self._watch_once()
                backoff.reset()
                failing = False
            except CremantError as error:
                if not failing:
                    log_failure(_log, "view poll failed, the last view stays in force", error)
                failing = True
                self._stopping.wait(backoff.next_ms() / 1000)
            except Exception:
                _log.exception("a view could not be taken in, the whole one is asked for")
                self._resync = True
                self._stopping.wait(backoff.next_ms() / 1000)

    def _watch_once(self) -> None:
        known = None if self._resync else self.view
        self._resync = False
        since = f"since={known.version}&nonce={known.controller_nonce}" if known else "since=-1&nonce="
        path = f"{VIEW_PATH}?{since}&timeoutMs={VIEW_POLL_MS}&deltas=true"
        response = self._request("GET", path, None, VIEW_POLL_MS + INTERNAL_REQUEST_TIMEOUT_MS)
        if response.status_code == 304:
            return
        if response.headers.get(VIEW_HEADER) == DELTAS:
            view = self._changed(known, decode(response.content, tuple[ViewDelta, ...]))
        else:
            view = decode(response.content, ClusterView)
        with self._seen:
            self.view = view
            self._seen.notify_all()
        for callback in tuple(self._callbacks):
            self._run_callback(callback, view)

    def _changed(self, known: ClusterView | None, deltas: tuple[ViewDelta, ...]) -> ClusterView:
        """Raises Conflict for changes of another view; then the whole view is asked for."""
        if known is None:
            raise Conflict("changes without a view to change")
        try:
            return functools.reduce(apply, deltas, known)
        except Conflict:
            self._resync = True
            raise

    def _run_callback(self, callback: Callable[[ClusterView], None], view: ClusterView) -> None:
        try:
            callback(view)
        except Exception:
            _log.exception("a callback for the view failed", extra={"fields": {"view_version": view.version}})
