# SPDX-License-Identifier: Apache-2.0
"""Repair with real processes: a store that cannot be written, wiped disks, committers that do not come back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from cremant.model.segments import StoreState

pytestmark = pytest.mark.process

BEST_EFFORT = {"completionConfig": {"storePolicy": "STORE_BEST_EFFORT", "uploadWaitMs": 100}}


def sealed(cluster: Any) -> list[Any]:
    return list(cluster.view().tables["trips"].segments)


def break_store(root: Path) -> None:
    """Where the directory should be there is a file: nothing can be written or read."""
    shutil.rmtree(root / "store", ignore_errors=True)
    (root / "store").write_text("in the way")


def mend_store(root: Path) -> None:
    (root / "store").unlink()
    (root / "store").mkdir()


def upload_all(cluster: Any) -> None:
    url = f"{cluster.controller.url}/segments/trips_REALTIME/uploadFromServerToDeepstore"
    assert httpx.post(url, timeout=30).status_code == 200


def test_a_wiped_disk_gets_its_lone_copies_back_from_the_epoch_log(make_cluster: Any, kit: Any, tmp_path: Path) -> None:
    break_store(tmp_path)
    cluster = make_cluster(partitions=1, flush_rows=1_000, **BEST_EFFORT)
    server = cluster.servers[0]
    cluster.epochs.start()
    for _ in range(5):
        cluster.epochs.write(500)
    kit.eventually(lambda: len(sealed(cluster)) >= 2, timeout_s=60)
    kit.eventually(lambda: cluster.holds_everything(server), timeout_s=60)
    before = sealed(cluster)
    assert all(segment.store_state is not StoreState.STORED for segment in before)
    server.kill()
    for directory in (server.data_dir / "segments").iterdir():
        shutil.rmtree(directory)
    server.start()
    kit.eventually(lambda: cluster.holds_everything(server), timeout_s=120)
    kit.eventually(lambda: all(segment.copies for segment in sealed(cluster)), timeout_s=60)
    after = sealed(cluster)
    assert [segment.checksum for segment in after] == [segment.checksum for segment in before]
    assert all(segment.lost is None for segment in after)
    told = (tmp_path / "server-0.log").read_text()
    assert told.count("segment read again from the epoch log") >= 2

    url = f"{cluster.controller.url}/segments/trips/{after[0].name}/story"
    story = httpx.get(url, timeout=30).json()
    events = [event["event"] for event in story["events"]]
    wanted = ["segment built", "segment commit ended", "segment read again from the epoch log"]
    assert [event for event in events if event in wanted] == wanted, events
    assert story["silent"] == {}

    mend_store(tmp_path)
    upload_all(cluster)
    kit.eventually(lambda: all(s.store_state is StoreState.STORED for s in sealed(cluster)), timeout_s=120)
    totals = httpx.get(f"{cluster.controller.url}/tables/trips/copies", timeout=30).json()["totals"]
    assert (totals["uploadBacklog"], totals["safe"]) == (0, len(after))


def test_what_a_dead_committer_did_not_upload_another_holder_does(make_cluster: Any, kit: Any, tmp_path: Path) -> None:
    break_store(tmp_path)
    cluster = make_cluster(servers=2, partitions=1, flush_rows=1_000, replication=2, **BEST_EFFORT)
    cluster.epochs.start()
    for _ in range(3):
        cluster.epochs.write(500)
    kit.eventually(lambda: sealed(cluster) and all(len(s.copies) == 2 for s in sealed(cluster)), timeout_s=60)
    committer = sealed(cluster)[0].committer
    by_port = {f"Server_127.0.0.1_{server.url.rsplit(':', 1)[1]}": server for server in cluster.servers}
    by_port[committer].kill()
    (other,) = (server for name, server in by_port.items() if name != committer)
    mend_store(tmp_path)
    upload_all(cluster)
    kit.eventually(lambda: all(s.store_state is StoreState.STORED for s in sealed(cluster)), timeout_s=120)
    assert cluster.holds_everything(other)
    metrics = httpx.get(f"{cluster.controller.url}/metrics", timeout=30).text
    assert "cremant_repair_uploaded_total 0.0" not in metrics, "repair asked for it"
