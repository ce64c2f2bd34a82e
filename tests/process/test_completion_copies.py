# SPDX-License-Identifier: Apache-2.0
"""What can happen to the copies of sealed segments, on real processes and without a store: disks are wiped, files are
damaged or gone while their holder is believed to have them, a peer lies, every copy is lost. What can be had is had
again, byte for byte; what cannot is said in every answer that needs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from completion_kit import FAILURES, commits_go_on, completion, converged, metric, running, sealed, wait_until, wipe
from feed import Feed
from server_kit import Cluster, Process

from cremant.log.open import open_logs
from cremant.model.names import epoch_topic
from cremant.model.segments import SegmentMetadata
from cremant.model.settings import Settings

Phase = Callable[[str], None]


@pytest.mark.timeout(300)
def test_wiped_disks_and_damaged_files_are_made_up_for_by_peers_and_the_log_and_a_loss_is_told(
    tmp_path: Path, phase: Phase
) -> None:
    # So slow that transfers overlap, whoever is fast.
    settings = {"peer_bytes_per_s": "400000"}
    with running(tmp_path, settings=settings, **completion("PEERS_ONLY")) as (cluster, feed):
        first, second = cluster.servers
        wait_until(lambda: len(sealed(cluster)) >= 20, "segments", 90)
        phase("one disk is wiped: all of it comes from one peer")
        wipe(second)
        second.start()
        commits_go_on(cluster)
        converged(cluster, feed, stored=False)
        assert metric(second, "pinot_server_segmentDownloads_total", source="peer") >= 16
        assert metric(first, "pinot_server_peerTransfersRefused_total") > 0
        assert metric(second, FAILURES, source="peer", cause="busy") > 0

        phase("what the peer has is damaged, while it says that it has it")
        cut, changed, gone = sealed(cluster)[:3]
        with_file(first, cut, lambda path: path.write_bytes(path.read_bytes()[:-100]))
        with_file(first, changed, flip)
        shutil.rmtree(directory_of(first, gone))
        wipe(second)
        second.start()
        converged(cluster, feed, stored=False)
        for cause in ("truncated", "checksum", "notHeld"):
            assert metric(second, FAILURES, source="peer", cause=cause) > 0, cause
        assert rebuilt(tmp_path, first) + rebuilt(tmp_path, second) >= 3
        for segment in (cut, changed, gone):
            answer = cluster.http.post(f"{cluster.controller.url}/segments/trips/{segment.name}/reset")
            assert answer.status_code == 200, answer.text
        damaged = (cut, changed, gone)
        wait_until(lambda: all(sent(first, s) == sent(second, s) for s in damaged), "the holder has mended its own")

        phase("both disks are wiped: the log has the rows")
        for server in cluster.servers:
            wipe(server)
        for server in cluster.servers:
            server.start()
        converged(cluster, feed, stored=False)
        assert rebuilt(tmp_path, first) + rebuilt(tmp_path, second) >= len(sealed(cluster))

        phase("and once more, when the log has them no more")
        roll_log(cluster, tmp_path)
        feed.go_on()
        commits_go_on(cluster, 8)
        feed.pause()
        lost = trimmed(cluster)
        for server in cluster.servers:
            wipe(server)
        for server in cluster.servers:
            server.start()
        wait_until(lambda: {one.name for one in sealed(cluster) if one.lost} >= lost, "the losses are recorded", 90)
        phase(feed.checked())
        accept(cluster, feed)


def accept(cluster: Cluster, feed: Feed) -> None:
    """A loss is in every answer that needs it, with what is missing, until it is deleted."""

    def told() -> bool:
        answer = feed.ask()
        codes = {exception["errorCode"] for exception in answer["exceptions"]}
        said = str(answer["exceptions"])
        return answer["partialResult"] is True and codes == {305} and "is lost" in said and "offsets [" in said

    wait_until(told, "the loss is told in answers")
    lost = [segment for segment in sealed(cluster) if segment.lost is not None]
    totals = cluster.http.get(f"{cluster.controller.url}/tables/trips/copies").json()["totals"]
    assert totals["lost"] == len(lost)
    for segment in lost:
        assert segment.lost is not None
        assert (segment.lost.rows, segment.lost.start_offset) == (segment.rows, segment.start_offset)
        answer = cluster.http.delete(f"{cluster.controller.url}/segments/trips/{segment.name}")
        assert answer.status_code == 200, answer.text
    rows = sum(cluster.epochs.ends) - sum(segment.rows for segment in lost)

    def exact() -> bool:
        found = feed.ask("SELECT count(*) FROM trips")
        return not found.get("exceptions") and found["resultTable"]["rows"] == [[rows]]

    wait_until(exact, "what is left is complete", 90)


def roll_log(cluster: Cluster, root: Path) -> None:
    """From now on the writer's files are so small that trimming drops some."""
    cluster.log.close()
    known = {"data_dir": str(root), "log_dir": str(root / "log"), "log_segment_bytes": "65536"}
    cluster.log = cluster.epochs.log = open_logs(Settings(("test", known))).epoch


def trimmed(cluster: Cluster) -> set[str]:
    """The names of segments whose range the log has no more."""
    topic, lost = epoch_topic("trips", cluster.incarnation), set()
    for partition in cluster.view().tables["trips"].partitions:
        number = partition.record.partition
        cluster.log.trim(topic, number, partition.consuming.start.log_offset)
        earliest = cluster.log.earliest(topic, number)
        lost |= {s.name for s in sealed(cluster) if s.partition == number and s.start.log_offset < earliest}
    assert lost
    return lost


def directory_of(server: Process, segment: SegmentMetadata) -> Path:
    (found,) = (server.data_dir / "segments").glob(f"*/{segment.name}")
    return found


def with_file(server: Process, segment: SegmentMetadata, damage: Callable[[Path], object]) -> None:
    damage(directory_of(server, segment) / "rows.parquet")


def flip(path: Path) -> None:
    """One bit, in place."""
    with path.open("r+b") as file:
        file.seek(200)
        byte = file.read(1)[0]
        file.seek(200)
        file.write(bytes([byte ^ 1]))


def sent(server: Process, segment: SegmentMetadata) -> bytes:
    """What it gives to whoever wants the committed content: the same bytes on every server."""
    path = f"{server.url}/segments/trips/{segment.name}?checksum={segment.checksum}"
    answer = httpx.get(path, timeout=20, trust_env=False)
    answer.raise_for_status()
    return answer.content


def rebuilt(root: Path, server: Process) -> int:
    told = (root / f"{server.data_dir.name}.log").read_text(encoding="utf-8")
    return told.count("segment read again from the epoch log")
