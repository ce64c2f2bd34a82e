# SPDX-License-Identifier: Apache-2.0
"""Real controller and server processes over a real log that is written by hand: restarts, kill -9, sealing, replicas.

After everything: every row exactly once, whatever was killed; and no answer along the way counted a row twice or
missed one below its watermark.
"""

from __future__ import annotations

import functools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from authority import Authority

from cremant.model.cluster import Role
from cremant.wire.codec import decode, encode
from cremant.wire.watermarks import WantedMark, WatermarksReply, WatermarksRequest

pytestmark = pytest.mark.process


def sealed_names(cluster: Any) -> list[str]:
    return [segment.name for segment in cluster.view().tables["trips"].segments]


def test_rows_are_queryable_on_arrival_before_their_epoch_is_closed(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster()
    server = cluster.servers[0]
    cluster.epochs.start()
    cluster.epochs.block(0, 10)
    kit.eventually(lambda: cluster.totals(server) == (10, 45, 10))
    cluster.epochs.mark()
    cluster.epochs.write(100)
    kit.eventually(lambda: cluster.holds_everything(server))
    header, _ = cluster.ask(server, "SELECT count(*) FROM t")
    assert [p.watermark.epoch for p in header.partitions] == [2, 2]
    assert header.segments_queried == 2
    assert httpx.get(f"{server.url}/health").text == "OK"
    assert httpx.get(f"{server.url}/tables").json() == {"tables": ["trips_REALTIME"]}
    assert len(httpx.get(f"{server.url}/tables/trips_REALTIME/segments").json()["segments"]) == 2
    assert httpx.get(f"{server.url}/tables/nosuch_REALTIME/segments").status_code == 404
    assert "pinot_server_realtimeIngestionDelayMs" in httpx.get(f"{server.url}/metrics").text
    assert server.stop() == 0


def test_segments_are_sealed_while_consumption_goes_on_and_every_answer_is_exact(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(flush_rows=2_000)
    server = cluster.servers[0]
    cluster.epochs.start()
    for _ in range(40):
        view = cluster.view()
        cluster.epochs.write(300)
        found = cluster.totals(server, view)
        if found is not None:
            # Rows below the promised offsets, each once: fares are 0, 1, 2... in each of two partitions.
            assert found[0] == found[2]
    kit.eventually(lambda: cluster.holds_everything(server))
    kit.eventually(lambda: len(sealed_names(cluster)) >= 10)
    kit.eventually(lambda: cluster.holds_everything(server))
    for segment in cluster.view().tables["trips"].segments:
        assert segment.rows == segment.end_offset - segment.start_offset >= 2_000
        assert segment.columns["fare"].min == segment.start_offset
        assert segment.max_time_ms == 1_700_000_000_000 + segment.end_offset - 1
    chains: dict[int, int] = {}
    for segment in sorted(cluster.view().tables["trips"].segments, key=lambda s: (s.partition, s.sequence)):
        assert segment.start_offset == chains.get(segment.partition, 0)
        chains[segment.partition] = segment.end_offset


def test_a_server_killed_again_and_again_while_consuming_and_sealing_ends_with_every_row_once(
    make_cluster: Any, kit: Any
) -> None:
    cluster = make_cluster(flush_rows=1_500)
    server = cluster.servers[0]
    cluster.epochs.start()
    for round_number in range(3):
        for _ in range(12):
            cluster.epochs.write(250)
        if round_number % 2:
            kit.eventually(lambda: sealed_names(cluster))
        server.kill()
        cluster.epochs.write(500)
        cluster.epochs.start()  # a new pipeline, too
        server.start()
    cluster.epochs.write(1)
    kit.eventually(lambda: cluster.holds_everything(server))
    kit.eventually(lambda: len(sealed_names(cluster)) >= 10)
    server.kill()
    server.start()
    kit.eventually(lambda: cluster.holds_everything(server))


def test_a_restarted_server_never_answers_with_less_than_it_had(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(flush_rows=4_000)
    server = cluster.servers[0]
    cluster.epochs.start()
    for _ in range(10):
        cluster.epochs.write(1_000)
    kit.eventually(lambda: cluster.holds_everything(server))
    for _ in range(2):
        server.kill()
        server.start()
        exact = False
        while not exact:
            found = cluster.totals(server)
            assert found is None or found == cluster.expected()
            exact = found is not None


def test_two_replicas_seal_the_same_content_and_one_takes_over_when_the_other_dies(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(servers=2, flush_rows=1_000, replication=2)
    first, second = cluster.servers
    cluster.epochs.start()
    for _ in range(10):
        cluster.epochs.write(300)
    kit.eventually(lambda: len(sealed_names(cluster)) >= 4)
    for server in (first, second):
        kit.eventually(lambda server=server: cluster.holds_everything(server))

    def both_hold_every_segment() -> bool:
        table = cluster.view().tables["trips"]
        return all(len(segment.copies) == 2 for segment in table.segments)

    kit.eventually(both_hold_every_segment)
    for segment in cluster.view().tables["trips"].segments:
        assert {copy.checksum for copy in segment.copies.values()} == {segment.checksum}
    first.kill()
    sealed = len(sealed_names(cluster))
    for _ in range(10):
        cluster.epochs.write(300)
    kit.eventually(lambda: cluster.holds_everything(second))
    kit.eventually(lambda: len(sealed_names(cluster)) >= sealed + 4)
    first.start()
    kit.eventually(lambda: cluster.holds_everything(first))
    kit.eventually(both_hold_every_segment)


def test_lost_and_damaged_local_segments_come_back_from_the_deep_store(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(flush_rows=1_000)
    server = cluster.servers[0]
    cluster.epochs.start()
    for _ in range(10):
        cluster.epochs.write(500)
    kit.eventually(lambda: len(sealed_names(cluster)) >= 4)
    kit.eventually(lambda: cluster.holds_everything(server))
    installed = functools.partial((server.data_dir / "segments").glob, "*/*/segment.json")
    kit.eventually(lambda: len(list(installed())) >= 4)
    server.kill()
    directories = sorted(marker.parent for marker in installed())
    for file in directories[0].iterdir():
        file.unlink()
    arrow = directories[1] / "rows.arrow"
    data = bytearray(arrow.read_bytes())
    data[4_000] ^= 0xFF  # among the offsets
    arrow.write_bytes(data)
    truncated = directories[2] / "rows.parquet"
    truncated.write_bytes(truncated.read_bytes()[:-10])
    server.start()
    kit.eventually(lambda: cluster.holds_everything(server))

    def repaired() -> bool:
        return arrow.exists() and arrow.read_bytes() != bytes(data)

    kit.eventually(repaired)
    kit.eventually(lambda: cluster.holds_everything(server))


def test_a_server_goes_on_while_the_controller_is_down_and_seals_when_it_is_back(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(flush_rows=1_000)
    server = cluster.servers[0]
    cluster.epochs.start()
    cluster.epochs.write(500)
    kit.eventually(lambda: cluster.holds_everything(server))
    view = cluster.view()
    cluster.controller.kill()
    for _ in range(10):
        cluster.epochs.write(500)
    kit.eventually(lambda: cluster.totals(server, view) == cluster.expected())
    cluster.controller.start()
    kit.eventually(lambda: len(sealed_names(cluster)) >= 8)
    kit.eventually(lambda: cluster.holds_everything(server))


def test_a_dropped_table_leaves_no_bytes_behind(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(flush_rows=1_000)
    server = cluster.servers[0]
    cluster.epochs.start()
    for _ in range(5):
        cluster.epochs.write(500)
    kit.eventually(lambda: sealed_names(cluster))
    assert httpx.delete(f"{cluster.controller.url}/tables/trips").status_code == 200
    kit.eventually(lambda: not list((server.data_dir / "segments").iterdir()))
    assert httpx.get(f"{server.url}/tables").json() == {"tables": []}


def test_a_wiped_server_gets_its_segments_from_a_peer_when_the_store_is_gone(
    make_cluster: Any, kit: Any, tmp_path: Path
) -> None:
    """By HTTPS: the table asks for it."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("server")
    tls = {"tls_cert": str(certificate), "tls_key": str(key), "tls_ca": str(authority.certificate)}
    cluster = make_cluster(
        servers=2, flush_rows=1_000, replication=2, settings=tls, peerSegmentDownloadScheme="https",
        completionConfig={"storePolicy": "STORE_REQUIRED"},
    )  # fmt: skip
    assert all(server.tls_url for server in cluster.view().instances if server.role is Role.SERVER)
    first, second = cluster.servers
    cluster.epochs.start()
    for _ in range(6):
        cluster.epochs.write(500)
    kit.eventually(lambda: len(sealed_names(cluster)) >= 6)
    kit.eventually(lambda: all(len(s.copies) == 2 for s in cluster.view().tables["trips"].segments))
    second.kill()
    for path in (second.data_dir / "segments").glob("*/*"):
        shutil.rmtree(path)
    shutil.rmtree(tmp_path / "store")
    first.kill()  # both anew: the tails have no rows of sealed segments then
    first.start()
    second.start()
    kit.eventually(lambda: cluster.holds_everything(first))
    kit.eventually(lambda: cluster.holds_everything(second), 60)
    metrics = cluster.http.get(f"{second.url}/metrics").text
    assert 'pinot_server_segmentDownloads_total{source="peer"}' in metrics
    assert re.search(r'segmentDownloadFailures_total\{cause="\w+",source="store"\}', metrics)
    assert "pinot_server_peerTransfers_total 0.0" not in cluster.http.get(f"{first.url}/metrics").text
    path, rest = f"/segments/trips_REALTIME/{sealed_names(cluster)[0]}", {"Range": "bytes=9-"}
    through = cluster.http.get(cluster.controller.url + path, headers=rest)
    direct = cluster.http.get(first.url + path, headers=rest)
    assert through.status_code == direct.status_code == 206
    assert through.content == direct.content


def test_how_far_a_server_is_visible_is_told_on_demand_and_known_again_after_a_restart(
    make_cluster: Any, kit: Any
) -> None:
    cluster = make_cluster(flush_rows=100, partitions=1)
    server = cluster.servers[0]
    cluster.epochs.start()

    def ask(timeout_ms: int = 0, **wanted: int) -> Any:
        body = WatermarksRequest(
            table="trips", incarnation=cluster.incarnation, wanted=(WantedMark(partition=0, **wanted),),
            timeout_ms=timeout_ms,
        )  # fmt: skip
        answer = cluster.http.post(f"{server.url}/internal/v1/watermarks", content=encode(body))
        return decode(answer.content, WatermarksReply).tails

    kit.eventually(ask)
    proven_ms = 1_800_000_000_000
    with ThreadPoolExecutor(2) as threads:
        rows, fresh = threads.submit(ask, 9_000, offset=100), threads.submit(ask, 9_000, fresh_ms=proven_ms)
        cluster.epochs.write(100, reached_at_ms=proven_ms)
        assert [tail.watermark.next_offset for tail in rows.result() + fresh.result()] == [100, 100]
        assert fresh.result()[0].watermark.freshness_ms == proven_ms
    kit.eventually(lambda: sealed_names(cluster))
    [segment] = cluster.view().tables["trips"].segments
    assert segment.mark == fresh.result()[0].watermark
    server.kill()
    server.start()
    # Of its one sealed segment; its log has nothing more to say.
    [tail] = kit.eventually(ask)
    assert (tail.rows, tail.watermark) == (0, segment.mark)
    assert tail.log_end == tail.log_offset
    assert tail.log_read_at_ms is not None
