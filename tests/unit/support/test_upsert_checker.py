# SPDX-License-Identifier: Apache-2.0
"""The judge of the upsert soak: right answers of every kind pass, and each way of being wrong is caught. DuckDB plays
the cluster."""

from __future__ import annotations

import re
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from upsert_checker import Findings, UpsertChecker
from upsert_ledger import ListSink, UpsertLedger
from upsert_marks import Marks

from cremant.epoch.records import EpochMark, Fence, PartitionMark, Reset

PARTITIONS = 3
KEYS = 60
EPOCHS = tuple(range(101, 113))


class FakeCluster:
    """Answers over the rows of a sink, as of the newest epoch that it was told of. `fault`: what it does wrong."""

    controller = broker = "http://nowhere"

    def __init__(self, ledger: UpsertLedger, sink: ListSink, ends: dict[int, tuple[int, ...]], fault: str = "") -> None:
        rows = [
            {"p": partition, "o": offset, **row}
            for partition, messages in sink.partitions.items()
            for offset, row in enumerate(messages)
        ]
        self._db = duckdb.connect(config={"threads": 1})
        self._tables: dict[str, str] = {}
        self._db.register("rows", pa.Table.from_pylist(rows))
        self._ends = ends
        self._fault = fault
        self.asked = 0
        self.epoch = min(ends)

    def query(self, text: str) -> dict[str, Any]:
        self.asked += 1
        self.epoch = EPOCHS[min(self.asked // 24, len(EPOCHS) - 1)]
        options = dict(re.findall(r"SET (\w+) = (\S+);", text))
        epoch = int(options.get("asOfEpoch", self.epoch))
        if epoch < min(self._ends):
            return {"exceptions": [{"message": f"epoch {epoch} is below the horizon"}], "partialResult": True}
        epoch = max(one for one in self._ends if one <= epoch)
        if self._fault == "goes back" and self.asked % 50 == 0:
            epoch = min(self._ends)
        made = self._table(epoch, options)
        if made not in self._tables:
            self._tables[made] = f"t{len(self._tables)}"
            self._db.execute(f"CREATE TABLE {self._tables[made]} AS {made}")
        sql = text.rpartition("; ")[2].replace("FROM accounts", f"FROM {self._tables[made]}")
        sql = sql.replace("DISTINCTCOUNT(", "COUNT(DISTINCT ")
        rows = [list(row) for row in self._db.execute(sql).fetchall()]
        return {"exceptions": [], "resultTable": {"rows": rows}, "epoch": epoch, "readToken": str(epoch)}

    def _table(self, epoch: int, options: dict[str, str]) -> str:
        ends = list(self._ends[epoch])
        if self._fault == "mixed cut":
            ends[1] = self._ends[max(self._ends)][1]
        if self._fault == "row too many":
            ends[0] += 1
        below = " OR ".join(f"(p = {partition} AND o < {end})" for partition, end in enumerate(ends))
        rows = f"SELECT * FROM rows WHERE key IS NOT NULL AND ({below})"
        if "skipUpsert" in options or self._fault == "not rewritten":
            return rows
        order = "seq DESC, p DESC, o DESC"
        if self._fault == "arrival order":
            order = "p DESC, o DESC"
        if self._fault == "ties as they come":
            order = "seq DESC, o, p"
        ranked = f"SELECT *, row_number() OVER (PARTITION BY tenant, key ORDER BY {order}) AS n FROM ({rows})"
        if self._fault == "deleted keys come back":
            ranked = f"SELECT * FROM ({ranked.replace(rows, rows + ' AND NOT deleted')})"
        return f"SELECT * FROM ({ranked}) WHERE n = 1 AND NOT deleted"


def mark(epoch: int, ends: tuple[int, ...], generation: int = 1) -> EpochMark:
    lines = tuple(PartitionMark(end=end, rows=0) for end in ends)
    return EpochMark(
        generation=generation, epoch=epoch, previous=0, blocks_generation=generation, config_version=1, partitions=lines
    )


def run(fault: str = "") -> Findings:
    sink = ListSink(PARTITIONS)
    ledger = UpsertLedger(sink, PARTITIONS, keys=KEYS, seed=3)
    marks = Marks(None, "", "")  # type: ignore[arg-type]  # records are added by hand
    ends = {}
    for epoch in EPOCHS:
        ledger.produce(150, batch=50)
        ends[epoch] = ledger.ends()
        marks.add(mark(epoch, ends[epoch]), at_ms=0.0)
    ledger.produce(50)
    cluster = FakeCluster(ledger, sink, ends, fault)
    checker = UpsertChecker(lambda: cluster, ledger, marks, threads=1, pause_s=0.0)  # type: ignore[arg-type, return-value]
    checker._threads[0].start()
    while cluster.asked < 26 * len(EPOCHS) and checker._threads[0].is_alive():
        checker._stop.wait(0.05)
    checker._judging.start()
    return checker.stop()


def test_right_answers_of_every_kind_pass() -> None:
    findings = run()
    assert findings.wrong == []
    assert len(findings.by_kind) == 11, findings.by_kind
    assert findings.complete > 200
    assert findings.partial > 0, "below the horizon nobody answers"
    assert findings.met > 100
    assert all(age.missing_ms >= 0 for age in findings.ages)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("not rewritten", "total"),
        ("mixed cut", "buckets"),
        ("row too many", "all versions"),
        ("arrival order", "total"),
        ("ties as they come", "total"),
        ("deleted keys come back", "total"),
        ("goes back", "U-3"),
    ],
)
def test_each_way_of_being_wrong_is_caught(fault: str, says: str) -> None:
    wrong = run(fault).wrong
    assert any(says in problem for problem in wrong), wrong[:3]


def test_of_partition_0_only_what_decides_is_believed() -> None:
    marks = Marks(None, "", "")  # type: ignore[arg-type]
    marks.add(Fence(generation=1), 0.0)
    marks.add(mark(5, (10, 10)), 1.0)
    marks.add(mark(6, (20, 10)), 2.0)
    marks.add(Fence(generation=2), 3.0)
    marks.add(mark(7, (99, 99)), 4.0)
    marks.add(mark(6, (98, 98), generation=2), 5.0)
    assert [one.epoch for one in marks.between(0, 100)] == [5, 6]
    assert marks.at(4) is None
    assert [marks.at(epoch).ends for epoch in (5, 6, 9)] == [(10, 10), (20, 10), (20, 10)]  # type: ignore[union-attr]
    marks.add(Reset(generation=2, epoch=5), 6.0)
    marks.add(mark(8, (15, 12), generation=2), 7.0)
    assert [one.epoch for one in marks.between(0, 100)] == [5, 8]
    assert marks.newest() == marks.wait_for((15, 12), 1.0)
