# SPDX-License-Identifier: Apache-2.0
"""A controller whose repair runs when a test says so, and what its servers are asked then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from control import Cluster, StillClock


class Servers:
    """Takes down what servers are asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.waiting: list[Callable[[str], None]] = []

    def post(self, server: str, paths: Sequence[str], timeout_ms: int, ended: Callable[[str], None]) -> None:
        self.asked += [(server, path) for path in paths]
        self.waiting.append(ended)

    def close(self) -> None:
        pass


def repaired_by_hand(cluster: Cluster) -> Servers:
    """No thread repairs: tests call the runs. Returns who is asked in the place of servers."""
    for thread in cluster.controller._housekeeping[2:]:
        thread.stop()
    servers = Servers()
    cluster.controller.repair._calls = servers  # type: ignore[assignment]
    return servers


def advance(cluster: Cluster, ms: int, *beating: str) -> None:
    clock = cluster.clock
    assert isinstance(clock, StillClock)
    clock.advance(ms)
    for server in beating:
        cluster.beat(server)
    cluster.controller.instances.refresh_liveness()
