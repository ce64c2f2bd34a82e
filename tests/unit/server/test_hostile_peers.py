# SPDX-License-Identifier: Apache-2.0
"""Peers that send what they should not: each is refused, counted by cause, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peer_kit import Follower, PeerServer, Script, says

from cremant.completion.fetch import Cause, Source
from cremant.model.errors import Unavailable
from cremant.segment.build import PARQUET_FILE

TEN_GIB = 10 * 1024**3
#: What sockets buffer, many times over.
ENOUGH = 512 * 1024**2


def tarred(name: str, content: bytes, *, kind: bytes = tarfile.REGTYPE, claimed: int | None = None) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content) if claimed is None else claimed
    head = info.tobuf(tarfile.GNU_FORMAT)
    return gzip.compress(head + content + bytes(-len(content) % 512) + bytes(1024), 1)


def claims(length: int) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(b"\0" * 1000)

    return answer


class NeverEnds:
    """An answer for as long as anybody listens, whatever its headers say."""

    def __init__(self, status: int, **headers: str) -> None:
        self._status = status
        self._headers = headers
        self.bytes = 0

    def __call__(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(self._status)
        for name, value in self._headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while self.bytes < ENOUGH:
                self.bytes += handler.wfile.write(b"x" * 1024**2)


def goes(to: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def test_what_a_peer_should_not_send_is_refused_counted_and_harmless(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower], tmp_path: Path
) -> None:
    server = peer()
    whole, inner = server.archive, f"{server.sealed.name}/{PARQUET_FILE}"
    endless = [NeverEnds(200), NeverEnds(404), NeverEnds(206, Content_Range="bytes 0-9/10")]
    answers: dict[str, tuple[Callable[[Any], None], Cause]] = {
        "path-outside": (says(200, tarred("../../outside", b"x")), Cause.CHECKSUM),
        "absolute-path": (says(200, tarred(f"{tmp_path}/outside", b"x")), Cause.CHECKSUM),
        "link": (says(200, tarred(inner, b"", kind=tarfile.SYMTYPE)), Cause.CHECKSUM),
        "device": (says(200, tarred(inner, b"", kind=tarfile.CHRTYPE)), Cause.CHECKSUM),
        "another-file": (says(200, tarred(inner, b"no Parquet")), Cause.CHECKSUM),
        "cut-archive": (says(200, whole[:-5000]), Cause.CHECKSUM),
        "cut-answer": (says(200, whole, cut=5000), Cause.TRUNCATED),
        "10-gib-within": (says(200, tarred(inner, b"x", claimed=TEN_GIB)), Cause.CHECKSUM),
        "10-gib-header": (says(200, tarred("x", b"x", kind=tarfile.XHDTYPE, claimed=TEN_GIB)), Cause.CHECKSUM),
        "10-gib": (claims(TEN_GIB), Cause.REFUSED),
        "no-end": (endless[0], Cause.REFUSED),
        "error-without-end": (endless[1], Cause.NOT_HELD),
        "more-than-it-said": (endless[2], Cause.REFUSED),
        "somewhere-else": (goes(server.path), Cause.REFUSED),
        "nothing": (says(200), Cause.CHECKSUM),
    }
    follower = follow(server, **{name: Script(answer) for name, (answer, _) in answers.items()})
    before = files_in(tmp_path)
    with pytest.raises(Unavailable) as raised:
        follower.fetch()
    parts = str(raised.value).split("; ")
    for name, (_, cause) in answers.items():
        (said,) = [part for part in parts if f"{name}: " in part]
        assert f"({cause})" in said, said
    rounds = follower.fetcher.totals.failures[Source.PEER, Cause.TRUNCATED]
    causes = Counter(cause for _, cause in answers.values())
    assert follower.fetcher.totals.failures == {(Source.PEER, cause): rounds * n for cause, n in causes.items()}
    assert files_in(tmp_path) == before
    assert all(answer.bytes < ENOUGH for answer in endless)
    follower.urls["Server_a"] = server.url
    copies = dict.fromkeys(follower.urls, server.metadata.copies["Server_a"])
    follower.metadata = msgspec.structs.replace(follower.metadata, copies=copies)
    assert follower.fetched_right()


def files_in(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}
