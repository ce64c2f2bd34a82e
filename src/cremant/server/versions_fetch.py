# SPDX-License-Identifier: Apache-2.0
"""Versions of a sealed segment from elsewhere: from a server that has them, or from the deep store.

Whatever comes is checked byte by byte (segment/snapshot.py) and must be of this segment and content.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import quote

import httpx
import msgspec

from cremant.completion.fetch import Holder
from cremant.model.cluster import ClusterView, Role, TableRecord
from cremant.model.errors import Corrupt, Unavailable
from cremant.model.limits import MIB, PEER_CONNECT_MS, PEER_SILENCE_MS
from cremant.model.segments import ReplicaState, SegmentMetadata
from cremant.segment.snapshot import Locate, Snapshot, unpack
from cremant.server.peers import CALLER_HEADER
from cremant.shell.tls import failure_of_tls
from cremant.store.deepstore import DeepStore

#: A peer waits so long for an epoch that we have closed already.
_WAIT_MS = 2_000
_FRAME_BYTES_MAX = MIB


def newest_metadata(view: ClusterView | None, record: TableRecord, metadata: SegmentMetadata) -> SegmentMetadata:
    """As the view has it now."""
    table = view.tables.get(record.config.name) if view is not None else None
    if table is None or table.record.incarnation != record.incarnation:
        return metadata
    return next((segment for segment in table.segments if segment.name == metadata.name), metadata)


def holders(view: ClusterView | None, record: TableRecord, segment: str, instance: str) -> list[Holder]:
    """Live servers that serve the segment, `instance` left out: who serves it knows which of its rows are in force."""
    table = view.tables.get(record.config.name) if view is not None else None
    if view is None or table is None or table.record.incarnation != record.incarnation:
        return []
    states = table.external.get(segment, {})
    by_tls = record.config.completion.peer_scheme == "https"
    return [
        Holder(server.id, server.tls_url if by_tls else server.url) for server in view.instances
        if server.live and server.role is Role.SERVER and server.id != instance
        and states.get(server.id) is ReplicaState.ONLINE
    ]  # fmt: skip


class VersionsClient:
    """Thread-safe. `instance`: who asks."""

    def __init__(self, instance: str, store: DeepStore, *, authorities: ssl.SSLContext | None = None) -> None:
        self._store = store
        silence_s = (PEER_SILENCE_MS + _WAIT_MS) / 1000
        self._client = httpx.Client(
            timeout=httpx.Timeout(silence_s, connect=PEER_CONNECT_MS / 1000), trust_env=False, follow_redirects=False,
            headers={CALLER_HEADER: instance, "Accept-Encoding": "identity"},
            verify=authorities or ssl.create_default_context(),
        )  # fmt: skip

    def close(self) -> None:
        self._client.close()

    def from_peer(
        self, holder: Holder, table: str, metadata: SegmentMetadata, locate: Locate, *, not_before: int
    ) -> Snapshot:
        """As of the last epoch closed there, `not_before` if it comes in a moment. Raises Unavailable, Corrupt."""
        if not holder.url:
            raise Unavailable("offers no HTTPS, which the table demands (settings tls_cert, tls_key)")
        url = f"{holder.url}/tables/{quote(f'{table}_REALTIME')}/segments/{quote(metadata.name)}/versions"
        wanted = {"checksum": metadata.checksum or "", "notBefore": str(not_before), "waitMs": str(_WAIT_MS)}
        try:
            with self._client.stream("GET", url, params=wanted) as response:
                body = _read(response, _bytes_max(metadata))
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: the client was closed
            said = failure_of_tls(error)
            raise Unavailable(f"{type(error).__name__} {said or error}".strip()) from error
        if response.status_code != 200:
            raise Unavailable(f"status {response.status_code}, {_sentence(body)}")
        return _unpacked(body, metadata, locate)

    def from_store(self, metadata: SegmentMetadata, scratch: Path, locate: Locate) -> Snapshot:
        """Raises NotFound, Corrupt, PeerError, InvalidConfig."""
        stored = metadata.versions
        assert stored is not None
        target = scratch / "versions"
        store, name = self._store.by_url(stored.url)
        store.get(name, target, checksum=stored.file_checksum)
        found = _unpacked(target.read_bytes(), metadata, locate)
        # It may be known to hold up to later than it was written; or have more than its position says.
        found.versions.closed(stored.position.epoch)
        return Snapshot(found.versions, stored.position)


def _unpacked(body: bytes, metadata: SegmentMetadata, locate: Locate) -> Snapshot:
    return unpack(body, segment=metadata.name, checksum=metadata.checksum or "", rows=metadata.rows, locate=locate)


def _bytes_max(metadata: SegmentMetadata) -> int:
    return 9 * metadata.rows + _FRAME_BYTES_MAX


def _read(response: httpx.Response, bytes_max: int) -> bytes:
    parts, size_bytes = [], 0
    for chunk in response.iter_raw():
        size_bytes += len(chunk)
        if size_bytes > bytes_max:
            raise Corrupt(f"sends more than the {bytes_max} bytes that versions of these rows can have")
        parts.append(chunk)
    return b"".join(parts)


def _sentence(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"])[:300]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "no reason given"
