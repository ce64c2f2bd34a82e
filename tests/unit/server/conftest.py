# SPDX-License-Identifier: Apache-2.0
"""Fixtures over the hand-written epoch log and its cluster of real processes."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peer_kit import Follower, PeerServer, Script
from server_kit import Cluster, Kit, Process


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(
        *,
        servers: int = 1,
        partitions: int = 2,
        flush_rows: int = 5_000_000,
        replication: int = 1,
        settings: dict[str, str] | None = None,
        **segments: Any,
    ) -> Cluster:
        made.append(Cluster(tmp_path, **(settings or {})))
        made[-1].form(servers, partitions, flush_rows, replication, **segments)
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def make_process(tmp_path: Path) -> Iterator[Callable[[str, str, str], Process]]:
    """One more role of the cluster in `tmp_path`: (role, name, controller URL)."""
    made: list[Process] = []

    def make(role: str, name: str, controller_url: str) -> Process:
        made.append(Process(role, tmp_path, name, controller_url))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture
def peer(kit: Any, tmp_path: Path) -> Iterator[Callable[..., PeerServer]]:
    made: list[PeerServer] = []

    def make(**limits: Any) -> PeerServer:
        made.append(PeerServer(kit, tmp_path / f"peer-{len(made)}", **limits))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def follow(kit: Any, tmp_path: Path) -> Iterator[Callable[..., Follower]]:
    made: list[Follower] = []
    scripts: list[Script] = []

    def make(holder: PeerServer, *, by_tls: ssl.SSLContext | None = None, **peers: Any) -> Follower:
        scripts.extend(given for given in peers.values() if isinstance(given, Script))
        urls = {name: given if isinstance(given, str) else given.url for name, given in peers.items()}
        made.append(Follower(kit, holder, tmp_path / f"follower-{len(made)}", urls, by_tls))
        return made[-1]

    yield make
    for follower in made:
        follower.fetcher.stop()
    for script in scripts:
        script.close()
