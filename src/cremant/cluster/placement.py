# SPDX-License-Identifier: Apache-2.0
"""Placement: which servers replicate a partition. Pure; the same inputs give the same answer.

Rules: as many distinct servers as the replication asks; servers with fewer partitions of this table first, so that each
table is spread within one partition of even, then those with fewer partitions of all tables; ties are broken by a
rotation with the partition number, so that neighbours do not share their first server; what is placed stays placed
(only new partitions are asked for; `cluster/rebalance.py` moves).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cremant.model.cluster import PartitionRecord
from cremant.model.errors import UserError


class NotEnoughServers(UserError):
    """Fewer live servers than replicas wanted."""


def load_of(partitions: Iterable[PartitionRecord]) -> dict[str, int]:
    """How many partitions each server replicates."""
    load: dict[str, int] = {}
    for record in partitions:
        for server in record.replicas:
            load[server] = load.get(server, 0) + 1
    return load


def check_servers(replication: int, servers: Iterable[str]) -> list[str]:
    """The servers in order. Raises NotEnoughServers."""
    ordered = sorted(set(servers))
    if len(ordered) < replication:
        raise NotEnoughServers(
            f"replication {replication} needs {replication} live servers, found {len(ordered)}"
            + (f": {', '.join(ordered)}" if ordered else ""),
            hint="start more servers (`cremant start server`) or lower segmentsConfig.replication",
        )
    return ordered


def place(
    partitions: Sequence[int],
    replication: int,
    servers: Iterable[str],
    load: Mapping[str, int],
    own: Mapping[str, int] | None = None,
) -> dict[int, tuple[str, ...]]:
    """Replicas of each of `partitions`; `load` is what the servers carry already, `own` what of it is this table's.
    Raises NotEnoughServers."""
    ordered = check_servers(replication, servers)
    carried = {server: [(own or {}).get(server, 0), load.get(server, 0)] for server in ordered}
    placed: dict[int, tuple[str, ...]] = {}
    for partition in partitions:
        turn = {server: (index - partition) % len(ordered) for index, server in enumerate(ordered)}
        chosen = sorted(ordered, key=lambda server: (*carried[server], turn[server]))[:replication]
        for server in chosen:
            carried[server] = [count + 1 for count in carried[server]]
        placed[partition] = tuple(sorted(chosen, key=turn.__getitem__))
    return placed
