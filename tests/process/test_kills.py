# SPDX-License-Identifier: Apache-2.0
"""kill -9 of every role, several times, while known rows arrive and queries run: nothing lost, nothing doubled, and no
answer flagged complete was ever wrong.

The checker compares every complete answer with the producer's delivery reports at the offsets that the answer names.
Most answers fall into the time of load and kills.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.cluster import LocalCluster
from ledger import BUCKETS_SQL, SCHEMA, TOTAL_SQL, Checker, Ledger, table_config

ROWS = 300_000
RATE_PER_S = 4_000
PARTITIONS = 4
#: (role, seconds before the kill). Servers alternate; the pipeline dies most often, twice in quick succession.
KILLS = (
    ("pipeline", 6.0), ("server-1", 5.0), ("broker", 4.0), ("controller", 5.0), ("pipeline", 6.0), ("pipeline", 3.0),
    ("server-2", 6.0), ("controller", 5.0), ("broker", 3.0), ("server-1", 5.0), ("pipeline", 8.0),
)  # fmt: skip


@pytest.mark.timeout(900)
def test_every_role_is_killed_while_data_flows_and_queries_run(tmp_path: Path, phase: Callable[[str], None]) -> None:
    with LocalCluster(tmp_path / "data", servers=2) as cluster:
        cluster.run("topic", "create", "ledger", "--partitions", str(PARTITIONS))
        cluster.rest.add_table(SCHEMA, table_config(flush_rows=20_000))
        ledger = Ledger(Path(cluster.ready["logDir"]), PARTITIONS)
        ledger.produce(1_000)
        cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)

        phase(f"producing {ROWS} rows at {RATE_PER_S}/s, asking, killing")
        checker = Checker(cluster.rest, ledger).start()
        producer = threading.Thread(target=ledger.produce, args=(ROWS - 1_000,), kwargs={"rate_per_s": RATE_PER_S})
        producer.start()
        for role, delay_s in KILLS:
            threading.Event().wait(delay_s)
            killed = cluster.kill(role)
            phase(f"killed {role} ({killed}); {ledger.rows} rows sent, {checker.complete_so_far} complete answers")
        producer.join(ROWS / RATE_PER_S + 60)
        assert not producer.is_alive()
        during_load = checker.complete_so_far

        phase("all sent; waiting for the exact answer")
        try:
            took = cluster.rest.wait_for(TOTAL_SQL, ledger.total(), deadline_s=240)
        finally:
            findings = checker.stop()
            phase(
                f"{findings.complete} complete answers checked ({during_load} under load), {findings.partial} partial, "
                f"{findings.unanswered} unanswered, longest gap {findings.longest_gap_s:.1f} s, "
                f"{len(findings.wrong)} wrong"
            )
        phase(f"exact {took:.1f} s after the last row")
        assert findings.wrong[:3] == []
        assert during_load > 300, "too few answers under load for this test to mean anything"
        assert cluster.rest.rows(BUCKETS_SQL) == ledger.expected(ledger.ends())
        assert ledger.total()[0][0] == ROWS
        ledger.close()
