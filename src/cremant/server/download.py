# SPDX-License-Identifier: Apache-2.0
"""Downloading one archive over HTTP, from a server or any other URL, with resume; every failure has a cause."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec

from cremant.completion.fetch import Cause
from cremant.model.errors import NoResource
from cremant.model.limits import FETCH_WAIT_MAX_MS, FETCHES_RUNNING_MAX, PEER_CONNECT_MS, PEER_SILENCE_MS
from cremant.server.peers import CALLER_HEADER
from cremant.shell.tls import failure_of_tls

#: An error answer is a sentence.
_REFUSAL_BYTES_MAX = 64 * 1024
_CAUSES = {404: Cause.NOT_HELD, 409: Cause.OTHER_CONTENT, 412: Cause.OTHER_CONTENT, 429: Cause.BUSY, 503: Cause.BUSY}


class SourceFailed(Exception):
    """One source did not give the segment; another one, or the same later, may."""

    def __init__(self, cause: Cause, detail: str, retry_after_ms: int = 0) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.retry_after_ms = retry_after_ms


@dataclass(slots=True)
class Partial:
    """What has arrived of an archive: to be continued by whoever has the same one (`etag`)."""

    path: Path
    etag: str = ""

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def forget(self) -> None:
        self.etag = ""
        self.path.unlink(missing_ok=True)


class Downloader:
    """Thread-safe. `instance`: who asks; peers bound what each of us gets at once. `authorities`: who vouches for those
    that are asked by HTTPS; those of the system if None."""

    def __init__(
        self, instance: str, *, authorities: ssl.SSLContext | None = None, silence_ms: int = PEER_SILENCE_MS
    ) -> None:
        silence_s, connect_s = silence_ms / 1000, PEER_CONNECT_MS / 1000
        self._silence_ms = silence_ms
        self._client = httpx.Client(
            timeout=httpx.Timeout(silence_s, connect=connect_s), trust_env=False, follow_redirects=False,
            limits=httpx.Limits(max_connections=2 * FETCHES_RUNNING_MAX, max_keepalive_connections=FETCHES_RUNNING_MAX),
            headers={CALLER_HEADER: instance, "Accept-Encoding": "identity"},
            verify=authorities or ssl.create_default_context(),
        )  # fmt: skip

    def close(self) -> None:
        self._client.close()

    def archive(
        self, url: str, partial: Partial, *, expected: str, bytes_max: int, ends_s: float,
        on_bytes: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Brings `partial` to the whole archive of the content `expected`. What came before a failure stays, to be
        continued. Raises SourceFailed; NoResource when our disk is full."""
        have = partial.bytes if partial.etag else 0
        headers = {"Range": f"bytes={have}-", "If-Range": partial.etag} if have else {}
        total = None
        try:
            with self._client.stream("GET", url, params={"checksum": expected}, headers=headers) as response:
                total = _expect(response, partial, have, bytes_max)
                self._receive(response, partial, total, ends_s, on_bytes)
        except httpx.TimeoutException as error:
            raise SourceFailed(Cause.TIMEOUT, f"nothing came for {self._silence_ms} ms: {_name(error)}") from error
        except (httpx.ReadError, httpx.RemoteProtocolError) as error:
            cause = Cause.TRUNCATED if total is not None else Cause.UNREACHABLE
            raise SourceFailed(cause, f"the connection broke after {partial.bytes} bytes: {_name(error)}") from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: the client was closed
            raise _unreached(error) from error
        if partial.bytes != total:
            found = partial.bytes
            partial.forget()
            raise SourceFailed(Cause.TRUNCATED, f"expected {total} bytes, {found} came")

    def _receive(
        self, response: httpx.Response, partial: Partial, total: int, ends_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        left = total - partial.bytes
        with _writable(partial.path) as file:
            for chunk in response.iter_raw():  # as it comes: what waits to fill a chunk is lost when the peer dies
                left -= len(chunk)
                if left < 0:
                    partial.forget()
                    raise SourceFailed(Cause.REFUSED, f"sends more than the {total} bytes that it told of")
                try:
                    file.write(chunk)
                except OSError as error:
                    raise _full(partial.path, error) from error
                on_bytes(len(chunk))
                if time.monotonic() > ends_s:
                    raise SourceFailed(Cause.TIMEOUT, "the fetch is out of time")


def _expect(response: httpx.Response, partial: Partial, have: int, bytes_max: int) -> int:
    """The archive's whole length. Raises SourceFailed for anything but the bytes that were asked for."""
    if response.status_code not in (200, 206):
        raise _refusal(response, partial)
    first, total = 0, response.headers.get("Content-Length", "")
    if response.status_code == 206:
        words = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        start = words[0].partition("-")[0]
        first, total = int(start) if start.isdigit() else -1, words[2]
    if not total.isdigit() or int(total) > bytes_max:
        shown = total or "an unknown number of"
        raise SourceFailed(Cause.REFUSED, f"answers {shown} bytes, expected {bytes_max} at most")
    if first == 0:
        partial.forget()  # another file, or nothing was there
    elif first != have:
        partial.forget()
        raise SourceFailed(Cause.REFUSED, f"answers from byte {first}, asked from {have}")
    partial.etag = response.headers.get("ETag", "")
    return int(total)


def _refusal(response: httpx.Response, partial: Partial) -> SourceFailed:
    if response.status_code == 416:
        partial.forget()
    try:
        text = str(msgspec.json.decode(_beginning(response))["error"])
    except (msgspec.MsgspecError, KeyError, TypeError, httpx.HTTPError):
        text = "no reason given"
    after = response.headers.get("Retry-After", "")
    retry_ms = min(int(after) * 1000, FETCH_WAIT_MAX_MS) if after.isdigit() else 0
    cause = _CAUSES.get(response.status_code, Cause.REFUSED)
    return SourceFailed(cause, f"status {response.status_code}, {text[:300]}", retry_ms)


def _beginning(response: httpx.Response) -> bytes:
    """What a refusal says; one that does not end is left."""
    said = b""
    for chunk in response.iter_raw():
        said += chunk
        if len(said) > _REFUSAL_BYTES_MAX:
            break
    return said


def _unreached(error: Exception) -> SourceFailed:
    said = failure_of_tls(error)
    if said is None:
        return SourceFailed(Cause.UNREACHABLE, _name(error))
    return SourceFailed(Cause.TLS, f"TLS failed: {said}")


def _writable(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise _full(path, error) from error


def _full(path: Path, error: OSError) -> NoResource:
    return NoResource(f"cannot write {path}: {error}", hint="free disk space; it is retried")


def _name(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
