# SPDX-License-Identifier: Apache-2.0
"""What the soak asks an upsert table, and what is right: each question knows its SQL and judges rows by the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from upsert_ledger import BUCKETS, HOT_KEYS, TABLE, TENANTS, V_END, Table, columns_of, key_of

_BUCKETS = f"SELECT bucket, COUNT(*), SUM(v) FROM {TABLE} GROUP BY bucket ORDER BY bucket LIMIT 99"

Judge = Callable[[Table, list[list[Any]]], bool]


class Question(NamedTuple):
    kind: str
    sql: str
    #: Whether rows are right, given the table at the answer's epoch.
    judge: Judge
    #: The epoch that was asked for.
    as_of: int | None = None


def equals(expected: Callable[[Table], list[list[Any]]]) -> Judge:
    """Nulls (sums of nothing) are zeros."""
    return lambda table, rows: [[0 if cell is None else cell for cell in row] for row in rows] == expected(table)


def total() -> Question:
    def expected(table: Table) -> list[list[Any]]:
        return [[int(table.visible.sum()), int(table.v[table.visible].sum())]]

    return Question("total", f"SELECT COUNT(*), SUM(v) FROM {TABLE}", equals(expected))


def as_of(epoch: int) -> Question:
    return Question("as of", f"SET asOfEpoch = {epoch}; {_BUCKETS}", equals(Table.buckets), epoch)


def buckets() -> Question:
    return Question("buckets", _BUCKETS, equals(Table.buckets))


def one_bucket(bucket: int) -> Question:
    def expected(table: Table) -> list[list[Any]]:
        return next(([[count, v]] for found, count, v in table.buckets() if found == bucket), [[0, 0]])

    return Question("filter", f"SELECT COUNT(*), SUM(v) FROM {TABLE} WHERE bucket = {bucket}", equals(expected))


def span(first: int, end: int) -> Question:
    def expected(table: Table) -> list[list[Any]]:
        return [[int((table.visible & (table.v >= first) & (table.v < end)).sum())]]

    return Question("range", f"SELECT COUNT(*) FROM {TABLE} WHERE v >= {first} AND v < {end}", equals(expected))


def point(key: int) -> Question:
    tenant, name = columns_of(key)
    sql = f"SELECT seq, v, bucket FROM {TABLE} WHERE tenant = {tenant} AND key = '{name}'"
    return Question("point", sql, equals(lambda table: table.row(key)))


def extremes() -> Question:
    """What metadata could answer, were it not for validity."""

    def expected(table: Table) -> list[list[Any]]:
        seq, v = table.seq[table.visible], table.v[table.visible]
        return [[int(f(column)) for column in (seq, v) for f in (np.min, np.max)]] if len(v) else []

    def judge(table: Table, rows: list[list[Any]]) -> bool:
        return not table.visible.any() or rows == expected(table)

    return Question("extremes", f"SELECT MIN(seq), MAX(seq), MIN(v), MAX(v) FROM {TABLE}", judge)


def distinct() -> Question:
    def expected(table: Table) -> list[list[Any]]:
        keys = np.flatnonzero(table.visible)
        return [[len(np.unique(keys // TENANTS)), len(np.unique(table.bucket[keys]))]]

    return Question("distinct", f"SELECT DISTINCTCOUNT(key), DISTINCTCOUNT(bucket) FROM {TABLE}", equals(expected))


def top(count: int) -> Question:
    def expected(table: Table) -> list[list[Any]]:
        keys = np.flatnonzero(table.visible)
        v = table.v[keys]
        if len(keys) > count:
            keys = keys[v >= np.partition(v, -count)[-count]]
        rows = sorted((-int(table.v[key]), *columns_of(key)) for key in keys.tolist())
        return [[tenant, name, -v] for v, tenant, name in rows[:count]]

    sql = f"SELECT tenant, key, v FROM {TABLE} ORDER BY v DESC, tenant, key LIMIT {count}"
    return Question("top", sql, equals(expected))


def some(count: int) -> Question:
    """Any rows will do, but each must be visible, and no key twice."""

    def judge(table: Table, rows: list[list[Any]]) -> bool:
        keys = [key_of(row[0], row[1]) for row in rows]
        return (
            len(rows) == min(count, int(table.visible.sum()))
            and len(set(keys)) == len(keys)
            and all([row[2:]] == table.row(key) for key, row in zip(keys, rows, strict=True))
        )

    return Question("some", f"SELECT tenant, key, seq, v, bucket FROM {TABLE} LIMIT {count}", judge)


def all_versions() -> Question:
    sql = f"SET skipUpsert = true; SELECT COUNT(*) FROM {TABLE}"
    return Question("all versions", sql, equals(lambda table: [[table.versions]]))


def contents(bucket: int) -> Question:
    """Every visible row of a bucket."""

    def judge(table: Table, rows: list[list[Any]]) -> bool:
        keys = np.flatnonzero(table.visible & (table.bucket == bucket)).tolist()
        expected = [(*columns_of(key), int(table.seq[key]), int(table.v[key])) for key in keys]
        return sorted(tuple(row) for row in rows) == sorted(expected)

    sql = f"SELECT tenant, key, seq, v FROM {TABLE} WHERE bucket = {bucket} LIMIT 1000000"
    return Question("contents", sql, judge)


def any_question(dice: np.random.Generator, keys: int, epoch: int | None) -> Question:
    """`epoch`: of an earlier answer, to look back from."""
    pick = int(dice.integers(0, 14))
    match pick:
        case 0 | 1 | 2:
            return total()
        case 3 | 4:
            return buckets()
        case 5:
            return one_bucket(int(dice.integers(0, BUCKETS)))
        case 6:
            first = int(dice.integers(0, V_END))
            return span(first, first + int(dice.integers(1, V_END)))
        case 7:
            return point(int(dice.integers(0, min(HOT_KEYS, keys))))
        case 8:
            return point(int(dice.integers(0, keys)))
        case 9:
            return extremes()
        case 10:
            return top(5) if dice.random() < 0.5 else some(20)
        case 11:
            return distinct()
        case 12:
            return all_versions()
        case _:
            return total() if epoch is None else as_of(max(1, epoch - int(dice.integers(0, 12))))
