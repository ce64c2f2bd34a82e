# SPDX-License-Identifier: Apache-2.0
"""Segments from server to server over real sockets: the endpoint, its limits, and fetching when peers misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.server
import io
import socket
import tarfile
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from peer_kit import Follower, PeerServer, Script, hangs, says
from starlette.requests import Request

from cremant.completion.fetch import Cause, Source
from cremant.model.errors import Unavailable
from cremant.model.segments import Copy
from cremant.segment.build import PARQUET_FILE
from cremant.segment.reader import SealedSegment
from cremant.server import download
from cremant.server.fetching import SegmentFetcher
from cremant.server.table import HostedSegment

# --- the endpoint ---


def test_both_paths_give_the_archive_with_its_checksums(peer: Callable[..., PeerServer]) -> None:
    server = peer()
    for path in (server.path, f"{server.url}/tables/trips/segments/{server.sealed.name}"):
        answer = httpx.get(path, headers={"Accept-Encoding": "identity"})
        assert answer.status_code == 200
        assert answer.content == server.archive
        assert answer.headers["Content-Type"] == "application/gzip"
        assert answer.headers["Content-Length"] == str(len(server.archive))
        assert answer.headers["X-Cremant-Content-Checksum"] == server.metadata.checksum
        assert answer.headers["X-Cremant-File-Checksum"] == server.metadata.file_checksum
    head = httpx.head(server.path)
    assert (head.status_code, head.headers["Content-Length"], head.content) == (200, str(len(server.archive)), b"")


def test_ranges_resume_unless_the_file_is_another(peer: Callable[..., PeerServer]) -> None:
    server = peer()
    whole = server.archive
    tag = httpx.head(server.path).headers["ETag"]

    def ranged(wanted: str, **headers: str) -> httpx.Response:
        return httpx.get(server.path, headers={"Range": wanted, "Accept-Encoding": "identity", **headers})

    rest = ranged("bytes=1000-", **{"If-Range": tag})
    assert (rest.status_code, rest.content) == (206, whole[1000:])
    assert rest.headers["Content-Range"] == f"bytes 1000-{len(whole) - 1}/{len(whole)}"
    assert ranged("bytes=5-9").content == whole[5:10]
    assert ranged(f"bytes=0-{10**12}").content == whole
    other = ranged("bytes=1000-", **{"If-Range": '"another"'})
    assert (other.status_code, other.content) == (200, whole)
    past = ranged(f"bytes={len(whole)}-")
    assert (past.status_code, past.headers["Content-Range"]) == (416, f"bytes */{len(whole)}")
    assert ranged("lines=1-").content == whole


def test_two_segments_with_equal_files_are_two_archives(peer: Callable[..., PeerServer]) -> None:
    server = peer()
    first = server.sealed
    marker = msgspec.structs.replace(first.marker, name=f"{first.name}x")
    second = SealedSegment(first.directory, marker, first.batches)
    server.table.segments[second.name] = HostedSegment(server.metadata, second)
    for sealed in (first, second):
        content = httpx.get(server.path.replace(first.name, sealed.name)).content
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(content))) as archive:
            assert archive.getnames()[-1] == f"{sealed.name}/{PARQUET_FILE}"


def test_who_expects_another_content_is_told(peer: Callable[..., PeerServer]) -> None:
    server = peer()
    checksum = server.metadata.checksum
    assert httpx.get(server.path, params={"checksum": checksum}).status_code == 200
    assert httpx.get(server.path, headers={"If-Match": f'"{checksum}"'}).status_code == 200
    for wrong in (
        httpx.get(server.path, params={"checksum": "other"}),
        httpx.get(server.path, headers={"If-Match": '"other"'}),
    ):
        assert wrong.status_code == 409
        assert wrong.json()["error"].endswith(f"this server has content {checksum}, expected other")
    assert server.service.sent.refused == {Cause.OTHER_CONTENT: 2}


def test_only_sealed_segments_of_the_table_are_given_and_names_lead_nowhere_else(
    peer: Callable[..., PeerServer],
) -> None:
    server = peer()
    name = server.sealed.name
    server.table.segments["trips__0__1__x"] = HostedSegment(server.metadata)
    (server.files.root / "secret").write_text("x")
    for path in (
        f"/segments/trips_OFFLINE/{name}",
        f"/segments/other/{name}",
        "/segments/trips/trips__0__1__x",
        "/segments/trips/..%2f..%2fsecret",
        "/segments/trips/%2e%2e",
        f"/tables/..%2ftrips/segments/{name}",
    ):
        assert httpx.get(server.url + path).status_code == 404, path
    assert server.service.sent.refused[Cause.NOT_HELD] == 4  # the others are no path of ours
    url = f"{server.url}/tables/trips/segments/{name}/metadata"
    assert httpx.get(url).json()["error"].startswith("HTTP 404")  # another room's route, not ours


def reading(path: str, caller: str, until: threading.Event) -> threading.Thread:
    """Takes the head of an answer and leaves the rest until told."""

    def read() -> None:
        with httpx.stream("GET", path, headers={"X-Cremant-Instance": caller}, timeout=60):
            until.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_transfers_are_bounded_per_server_and_per_caller_and_places_come_back(
    kit: Any, peer: Callable[..., PeerServer]
) -> None:
    # So slow that a transfer lasts as long as the test wants it to.
    server = peer(bytes_per_s=1, transfers_max=3, each_max=2)
    leave = threading.Event()
    threads = [reading(server.path, "a", leave), reading(server.path, "a", leave)]
    kit.eventually(lambda: server.service._running["a"] == 2)
    refused = httpx.get(server.path, headers={"X-Cremant-Instance": "a"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert "2 of them to a" in refused.json()["error"]
    threads.append(reading(server.path, "b", leave))
    kit.eventually(lambda: server.service._running.total() == 3)
    assert httpx.get(server.path, headers={"X-Cremant-Instance": "c"}).status_code == 429
    assert server.service.sent.refused == {Cause.BUSY: 2}
    leave.set()
    for thread in threads:
        thread.join(20)
    kit.eventually(lambda: server.service._running.total() == 0, 60)
    assert not server.service._running
    assert server.service.sent.broken == 3


@pytest.mark.timeout(30)
def test_who_stops_reading_before_the_last_bytes_loses_its_place(peer: Callable[..., PeerServer]) -> None:
    """Whose network takes everything but the end of the answer."""
    server = peer(stall_ms=100)
    path = f"/segments/trips/{server.sealed.name}"
    scope = {
        "type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"",
        "path_params": {"table": "trips", "segment": server.sealed.name},
    }  # fmt: skip

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await asyncio.sleep(60)

    async def transfer() -> None:
        response = await server.service.download(Request(scope, receive))
        await response(scope, receive, send)

    asyncio.run(transfer())
    assert (server.service.sent.broken, server.service.sent.transfers) == (1, 0)
    assert not server.service._running


def test_who_stops_reading_loses_its_place(kit: Any, peer: Callable[..., PeerServer]) -> None:
    server = peer(stall_ms=300)
    parquet = server.sealed.directory / PARQUET_FILE
    parquet.write_bytes(b"\0" * 64_000_000)  # more than sockets buffer
    marker = msgspec.structs.replace(server.sealed.marker, parquet_bytes=64_000_000)
    server.table.segments[server.sealed.name].sealed = SealedSegment(
        server.sealed.directory, marker, server.sealed.batches
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(f"GET /segments/trips/{server.sealed.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        kit.eventually(lambda: server.service.sent.broken == 1, 60)
        kit.eventually(lambda: not server.service._running)
        received = 0
        while chunk := idle.recv(1 << 20):
            received += len(chunk)
        assert received < 64_000_000  # the receiver sees that bytes are missing


# --- fetching ---


def test_a_segment_comes_from_a_peer_when_the_store_has_nothing(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server, Server_a=server)
    assert follower.fetched_right()
    assert follower.fetcher.totals.segments == {Source.PEER: 1}
    assert follower.fetcher.totals.bytes[Source.PEER] == len(server.archive)
    assert server.service.sent.transfers == 1


def test_the_store_is_asked_first_and_peers_when_it_fails(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server, Server_a=server)
    url = follower.store.put("trips/segment", server.sealed.directory / PARQUET_FILE)
    follower.metadata = msgspec.structs.replace(follower.metadata, store_url=url)
    assert follower.fetched_right()
    assert follower.fetcher.totals.segments == {Source.STORE: 1}
    stored = follower.store.root / "trips" / "segment"
    stored.write_bytes(stored.read_bytes()[:-9])
    assert follower.fetched_right()
    stored.unlink()
    assert follower.fetched_right()
    follower.metadata = msgspec.structs.replace(follower.metadata, store_url="hdfs://elsewhere/segment")
    assert follower.fetched_right()
    follower.metadata = msgspec.structs.replace(follower.metadata, store_url=f"peer:///{server.sealed.name}")
    assert follower.fetched_right()
    assert follower.fetcher.totals.segments == {Source.STORE: 1, Source.PEER: 4}
    failures = {cause for source, cause in follower.fetcher.totals.failures if source is Source.STORE}
    assert failures == {Cause.CHECKSUM, Cause.NOT_HELD, Cause.REFUSED}
    follower.metadata = msgspec.structs.replace(follower.metadata, store_url=server.path)
    assert follower.fetched_right()  # a URL of any HTTP server that has the archive
    assert follower.fetcher.totals.segments[Source.STORE] == 2


def test_a_transfer_that_breaks_is_continued_where_it_stopped(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    whole, tag = server.archive, httpx.head(server.path).headers["ETag"]

    def rest(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(whole) - 100_000))
        handler.send_header("Content-Range", f"bytes 100000-{len(whole) - 1}/{len(whole)}")
        handler.end_headers()
        handler.wfile.write(whole[100_000:])

    script = Script(says(200, whole, cut=100_000, tag=tag), rest)
    follower = follow(server, Server_b=script)
    assert follower.fetched_right()
    assert script.heard[1]["Range"] == "bytes=100000-"
    assert script.heard[1]["If-Range"] == tag
    assert follower.fetcher.totals.bytes[Source.PEER] == len(whole)
    # By another peer, too: whoever has the same file.
    broken = Script(says(200, whole, cut=100_000, tag=tag), says(503))
    follower = follow(server, Server_a=broken)
    follower.urls["Server_c"] = server.url
    follower.metadata = msgspec.structs.replace(
        follower.metadata, copies={**follower.metadata.copies, "Server_c": Copy(checksum="c", verified_at_ms=0)}
    )
    while follower.fetcher.totals.failures[Source.PEER, Cause.TRUNCATED] == 0:  # until the broken one came first
        follower.fetcher.totals.bytes.clear()
        assert follower.fetched_right()
    assert follower.fetcher.totals.bytes[Source.PEER] == len(whole)


def test_what_came_of_an_archive_before_another_source_gave_the_segment_is_removed(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server, Server_a=Script(says(200, server.archive, cut=100_000, tag='"t"')))
    url = follower.store.put("trips/segment", server.sealed.directory / PARQUET_FILE)
    follower.metadata = msgspec.structs.replace(follower.metadata, store_url=url)
    follower.fetcher.stop()
    follower.fetcher = SegmentFetcher(
        "me", follower.store, follower.view, fsync=False, order=(Source.PEER, Source.STORE)
    )
    assert follower.fetched_right()
    assert follower.fetcher.totals.failures[Source.PEER, Cause.TRUNCATED] == 1
    assert follower.fetcher.totals.segments == {Source.STORE: 1}


def test_a_range_that_says_nothing_is_one_sources_failure(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    def nonsense(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Length", "3")
        handler.send_header("Content-Range", "bytes */3")
        handler.end_headers()
        handler.wfile.write(b"???")

    server = peer()
    follower = follow(server, Server_a=Script(nonsense))
    url = follower.store.put("trips/segment", server.sealed.directory / PARQUET_FILE)
    follower.metadata = msgspec.structs.replace(follower.metadata, store_url=url)
    order = (Source.PEER, Source.STORE)
    follower.fetcher = SegmentFetcher("me", follower.store, follower.view, fsync=False, order=order)
    assert follower.fetched_right()
    assert follower.fetcher.totals.failures == {(Source.PEER, Cause.REFUSED): 1}


def test_damaged_and_wrong_peers_are_named_with_what_was_wrong(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    whole = server.archive
    flipped = bytearray(whole)
    flipped[100_000] ^= 1
    follower = follow(
        server,
        Server_b=Script(says(200, bytes(flipped))),
        Server_c=Script(says(404, b'{"code": 404, "error": "no such segment"}')),
        Server_e=Script(says(200, whole[:5000])),
        Server_f="http://127.0.0.1:1",
        Server_g=Script(says(409, b'{"code": 409, "error": "has another"}')),
        Server_h=Script(says(200, b"\0" * 10, cut=0)),
    )
    with pytest.raises(Unavailable) as raised:
        follower.fetch()
    text = str(raised.value)
    for name, cause in (
        ("Server_b: archive of", Cause.CHECKSUM),
        ("Server_c: status 404, no such segment", Cause.NOT_HELD),
        ("Server_e: archive of", Cause.CHECKSUM),
        ("Server_f: ConnectError", Cause.UNREACHABLE),
        ("Server_g: status 409, has another", Cause.OTHER_CONTENT),
        ("Server_h: the connection broke after 0 bytes", Cause.TRUNCATED),
    ):
        (said,) = [part for part in text.split("; ") if name in part]
        assert f"({cause})" in said, said
        assert follower.fetcher.totals.failures[Source.PEER, cause] >= 3  # in every round
    assert "/scratch" not in text
    assert not (follower.scratch / PARQUET_FILE).exists()
    follower.urls["Server_a"] = server.url
    follower.metadata = msgspec.structs.replace(
        follower.metadata, copies={**follower.metadata.copies, "Server_a": Copy(checksum="c", verified_at_ms=0)}
    )
    assert follower.fetched_right()


@pytest.mark.parametrize("known", [True, False], ids=["sent before", "never sent"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_holder_that_finds_its_file_damaged_looks_it_through(
    peer: Callable[..., PeerServer], damage: str, known: bool
) -> None:
    server = peer()
    hosted = server.table.segments[server.sealed.name]
    hosted.verified = True
    assert not known or httpx.get(server.path).status_code == 200
    path = server.sealed.directory / PARQUET_FILE
    path.write_bytes(path.read_bytes()[:-100]) if damage == "cut" else path.unlink()
    with contextlib.suppress(httpx.RemoteProtocolError):  # the answer had begun
        assert httpx.get(server.path).status_code >= 400
    assert not hosted.verified


def test_a_busy_peer_is_asked_until_it_has_time(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    busy = says(429, b'{"code": 429, "error": "4 transfers are running"}')
    follower = follow(server, Server_b=Script(*[busy] * 4, says(200, server.archive)))
    assert follower.fetched_right()
    assert follower.fetcher.totals.failures == {(Source.PEER, Cause.BUSY): 4}


def test_rows_that_are_not_those_of_the_metadata_are_refused(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server, Server_b=Script(says(200, server.archive)))
    follower.metadata = msgspec.structs.replace(follower.metadata, checksum="0" * 32)
    with pytest.raises(Unavailable, match=r"Server_b.*content checksum"):
        follower.fetch()
    assert not (follower.scratch / PARQUET_FILE).exists()


def test_a_peer_that_hangs_costs_its_deadline_and_no_more(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server, Server_b=Script(hangs))
    follower.fetcher._downloads = download.Downloader("me", silence_ms=200)
    with pytest.raises(Unavailable, match=r"Server_b: nothing came for 200 ms.*timeout"):
        follower.fetch()


def test_without_any_source_it_says_so_and_takes_what_appears_meanwhile(
    peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server)
    with pytest.raises(Unavailable, match="no live server and no store has it"):
        follower.fetch()
    waited = follower.fetcher._stopping.wait

    def appears(timeout_s: float) -> bool:
        follower.urls["Server_a"] = server.url
        follower.metadata = server.metadata
        return waited(timeout_s)

    follower.fetcher._stopping.wait = appears  # type: ignore[method-assign]
    assert follower.fetched_right()
