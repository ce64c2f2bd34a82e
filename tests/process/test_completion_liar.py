# SPDX-License-Identifier: Apache-2.0
"""A server that lies among honest ones, on real processes: what it sends is refused by cause and harms nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from completion_kit import FAILURES, completion, metric, sealed, wait_until, wipe
from liar import Liar
from server_kit import Cluster, Process

Phase = Callable[[str], None]


@pytest.mark.timeout(300)
def test_a_peer_that_lies_is_refused_by_cause_and_does_no_harm(tmp_path: Path, phase: Phase) -> None:
    """It is a replica of everything, says that it has the committed content, and sends archives of the worst kind."""
    cluster = Cluster(tmp_path)
    with contextlib.ExitStack() as closing:
        closing.callback(cluster.close)
        liar = closing.enter_context(Liar(cluster))
        cluster.form(2, 1, 1_000, 3, **completion("PEERS_ONLY"))
        cluster.epochs.start()
        for _ in range(2 * len(liar.answers)):
            cluster.epochs.write(1_000)
        first, second = cluster.servers
        wait_until(lambda: len(sealed(cluster)) >= 2 * len(liar.answers), "segments", 90)
        wait_until(lambda: all({first.id, second.id} <= set(one.copies) for one in sealed(cluster)), "copies", 60)
        wait_until(lambda: all(liar.id in one.copies for one in sealed(cluster)), "the liar is believed to hold all")
        phase("one disk is wiped: the liar and the other are asked")
        before = {path for path in tmp_path.rglob("*") if "evil" in path.name}
        rounds, refused = 0, dict.fromkeys(("checksum", "refused", "truncated"), 0.0)
        while liar.asked < 2 * len(liar.answers):  # whoever is asked first is drawn
            rounds += 1
            assert rounds < 10, "the liar is not asked"
            wipe(second)
            second.start()
            wait_until(lambda: cluster.holds_everything(second), "every row once", 90)
            wait_until(lambda: installed(second) == {one.name for one in sealed(cluster)}, "all are installed", 60)
            for cause in refused:
                refused[cause] += metric(second, FAILURES, source="peer", cause=cause)
        found = {path for path in tmp_path.rglob("*") if "evil" in path.name}
        assert found == before == set()
        assert min(refused.values()) > 0, refused
        phase(f"{liar.asked} lies")
        for url in (cluster.controller.url, second.url):
            for path in ("/segments/trips/..%2f..%2fevil", "/tables/trips/segments/..%2fevil", "/segments/..%2f/evil"):
                assert httpx.get(url + path, trust_env=False).status_code == 404, url + path
        wait_until(lambda: cluster.holds_everything(first), "the honest one is as it was")


def installed(server: Process) -> set[str]:
    return {marker.parent.name for marker in (server.data_dir / "segments").glob("*/*/segment.json")}
