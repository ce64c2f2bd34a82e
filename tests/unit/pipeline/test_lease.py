# SPDX-License-Identifier: Apache-2.0
"""A table's lease between a leader and a standby: renewed whatever happens, taken over within a lease of a death."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from control import Cluster
from pipelines import LocalMember

from cremant.model.cluster import TableView
from cremant.model.errors import Fenced, Unavailable
from cremant.model.limits import PIPELINE_ASK_MS, PIPELINE_LEASE_MS, PIPELINE_RENEW_MS
from cremant.pipeline.lease import Lease


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def made(cluster: Cluster) -> TableView:
    return cluster.create()


def lease(cluster: Cluster, made: TableView, member: str, *, standby: bool = False) -> Lease:
    return Lease(LocalMember(cluster.controller, member), made.name, made.record.incarnation, standby=standby)


def seconds_until_held(waiting: Lease) -> float:
    began_s = time.monotonic()
    while not waiting.take().held:
        assert time.monotonic() - began_s < 30, "the lease never lapsed"
        time.sleep(PIPELINE_ASK_MS / 1000)
    return time.monotonic() - began_s


def test_a_standby_has_the_lease_soon_after_the_leaders_last_word(cluster: Cluster, made: TableView) -> None:
    leader, standby = lease(cluster, made, "Pipeline_a"), lease(cluster, made, "Pipeline_b", standby=True)
    assert leader.take().held
    time.sleep(2 * PIPELINE_RENEW_MS / 1000)
    assert not standby.take().held, "the leader lives and is heard of"
    leader.drop()  # as after kill -9: no further word, nothing released
    assert seconds_until_held(standby) < (PIPELINE_LEASE_MS + 2 * PIPELINE_ASK_MS) / 1000 + 1
    assert not leader.take().held, "it waits in its turn"
    standby.release()
    assert seconds_until_held(leader) < 1, "a clean end need not be waited for"
    leader.release()


def test_a_leader_finds_out_that_it_is_none_any_more(cluster: Cluster, made: TableView) -> None:
    leader, other = lease(cluster, made, "Pipeline_a"), lease(cluster, made, "Pipeline_b")
    assert leader.take().held
    leader.check()
    cluster.controller.pipelines._renewed_until_ms[made.name] = 0  # it was not heard of for too long
    assert other.take().held
    time.sleep(3 * PIPELINE_RENEW_MS / 1000)
    with pytest.raises(Fenced, match="taken over by Pipeline_b"):
        leader.check()
    leader.drop()
    other.release()


def test_a_controller_that_is_away_takes_no_lease(
    cluster: Cluster, made: TableView, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = LocalMember(cluster.controller, "Pipeline_a")
    leader = Lease(member, made.name, made.record.incarnation)
    assert leader.take().held

    def away(*_: object, **__: object) -> None:
        raise Unavailable("the controller is away")

    monkeypatch.setattr(member, "call", away)
    time.sleep(2 * PIPELINE_RENEW_MS / 1000)
    leader.check()
    monkeypatch.undo()
    leader.release()
