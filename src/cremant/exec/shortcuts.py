# SPDX-License-Identifier: Apache-2.0
"""One server query over pieces, by the cheapest way that gives the same answer.

    rows of a selection   taken out of the batches, no engine
    first rows by number  the engine sorts those that may be among them (top.py)
    different values      read from dictionaries, if a piece is whole and unfiltered; of rows that are not all there,
                          those that occur
    sums and counts       added up here, if the filter is settled and nothing is grouped (sums.py)
    groups                by one number per row instead of several texts (keys.py)
    everything else       the engine; filters that were evaluated already are left out of its text

Pieces that cannot go the short way (tails, parts of segments, columns of many values) go through the engine, and both
partial answers are joined: merging partial answers is what the broker does anyway.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from cremant.exec.engine import Engine, RunResult, RunStats
from cremant.exec.keys import HIDDEN, KeySpace, row_keys
from cremant.exec.stop import Stop
from cremant.exec.sums import Part, totals
from cremant.exec.top import TOP_ROWS_MAX, narrowed
from cremant.model.names import GROUP_KEY
from cremant.segment.rows import RowMask, take_column
from cremant.segment.scan import Piece
from cremant.wire.messages import Shortcut

#: More rows than this are the engine's: it does not hold the interpreter.
_ROWS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Task:
    """A query over the pieces that were found for it. `schema`: scan form of all columns of the table."""

    sql: str
    columns: tuple[str, ...]
    schema: pa.Schema
    constants: dict[str, str]
    shortcut: Shortcut


def run(engine: Engine, task: Task, pieces: Sequence[Piece], space: KeySpace, stop: Stop) -> RunResult:
    """Raises QueryError as Engine.run."""
    shortcut = task.shortcut
    if shortcut.top and shortcut.limit <= TOP_ROWS_MAX:
        return _top(engine, task, pieces, stop)
    if shortcut.rows and shortcut.limit <= _ROWS_MAX:
        return _rows(engine, task, pieces, stop)
    if shortcut.values_only and not shortcut.where:
        return _values(engine, task, pieces, space, stop)
    if shortcut.sums:
        return _sums(engine, task, pieces, stop)
    if shortcut.keys:
        return _groups(engine, task, pieces, space, stop)
    return _plain(engine, task, pieces, stop)


def _plain(engine: Engine, task: Task, pieces: Sequence[Piece], stop: Stop) -> RunResult:
    return engine.run(
        task.sql, pieces, task.columns, task.schema, deadline_s=stop.deadline_s, constants=task.constants,
        where=task.shortcut.where, stop=stop,
    )  # fmt: skip


def _top(engine: Engine, task: Task, pieces: Sequence[Piece], stop: Stop) -> RunResult:
    shortcut = task.shortcut
    fewer, left_out = narrowed(
        pieces, shortcut.top, descending=shortcut.top_descending, limit=shortcut.limit, is_settled=not shortcut.where,
        stop=stop,
    )  # fmt: skip
    result = _plain(engine, task, fewer, stop)
    return RunResult(result.table, _added(result.stats, left_out))


def _rows(engine: Engine, task: Task, pieces: Sequence[Piece], stop: Stop) -> RunResult:
    shortcut = task.shortcut
    wanted, taken = shortcut.limit, []
    others = []
    for piece in reversed(pieces):
        if not (piece.exact or (not shortcut.where and piece.index is not None)):
            others.append(piece)
            continue
        stop.check()
        for number in reversed(range(len(piece.batches))):
            if wanted <= 0:
                break
            mask = piece.chosen(number)
            batch = piece.batches[number]
            rows = np.arange(min(wanted, batch.num_rows)) if mask is None else mask.rows[:wanted]
            arrays = [take_column(batch.column(name), rows) for name in shortcut.rows]
            wanted -= len(rows)
            taken.append(pa.RecordBatch.from_arrays(arrays, schema=_rows_schema(task)))
    found = sum(batch.num_rows for batch in taken)
    if wanted > 0 and others:
        rest = _plain(engine, task, others[::-1], stop)
        table = pa.concat_tables([pa.Table.from_batches(taken, rest.table.schema), rest.table])
        return RunResult(table, _added(rest.stats, found))
    return RunResult(pa.Table.from_batches(taken, _rows_schema(task)), RunStats(0, found))


def _rows_schema(task: Task) -> pa.Schema:
    fields = [task.schema.field(name) for name in task.shortcut.rows]
    return pa.schema([field.with_name(f"c{number}") for number, field in enumerate(fields)])


def _values(engine: Engine, task: Task, pieces: Sequence[Piece], space: KeySpace, stop: Stop) -> RunResult:
    (key,) = task.shortcut.keys
    dictionary = space.column(key.column)
    coded, others = [], []
    for piece in pieces:
        codes = piece.index.codes(key.column) if piece.index is not None else None
        if codes is None or piece.masks is not None or (piece.complete and not piece.immutable):
            others.append(piece)
        else:
            coded.append((piece, codes, dictionary.numbers(codes)))
    if not coded:
        return _plain(engine, task, pieces, stop)
    seen = np.zeros(len(dictionary), np.bool_)
    arrays, rows, kind = [], 0, task.schema.field(key.column).type
    for piece, codes, numbers in coded:
        stop.check()
        rows += piece.existing_rows
        wanted = np.arange(len(codes.values)) if numbers is None else np.flatnonzero(~seen[numbers])
        if not piece.complete and len(wanted):
            wanted = codes.occurring(wanted, _existing_rows(piece, len(codes.codes)))
        if numbers is not None:
            seen[numbers[wanted]] = True
        if len(wanted):
            arrays.append(codes.values.take(pa.array(wanted)).cast(kind))
    # Each once, or, of too many values to be numbered, once per piece: merging them is the broker's.
    table = pa.table([pa.chunked_array(arrays, kind)], schema=pa.schema([pa.field(key.name, kind, nullable=False)]))
    if not others:
        return RunResult(table, RunStats(0, rows))
    rest = _plain(engine, task, others, stop)
    joined = pa.concat_tables([pa.Table.from_batches(table.to_batches(), rest.table.schema), rest.table])
    return RunResult(joined, _added(rest.stats, rows))


def _existing_rows(piece: Piece, rows: int) -> np.ndarray:
    """One flag per row of its segment; batches that the piece lacks have none."""
    there = np.zeros(rows, np.bool_)
    for number, batch in enumerate(piece.batches):
        first, mask = piece.first_rows[number], piece.existing(number)
        there[first : first + batch.num_rows] = True if mask is None else mask.flags
    return there


def _sums(engine: Engine, task: Task, pieces: Sequence[Piece], stop: Stop) -> RunResult:
    settled: list[Piece] = []
    others: list[Piece] = []
    for piece in pieces:
        whole = piece.exact or not task.shortcut.where
        (settled if whole else others).append(piece)
    if not settled:
        return _plain(engine, task, pieces, stop)
    parts: list[Part] = [
        part
        for piece in settled
        for part in ((batch, piece.chosen(number)) for number, batch in enumerate(piece.batches))
    ]
    matched = sum(batch.num_rows if mask is None else mask.count for batch, mask in parts)
    columns = list(dict.fromkeys(one.column for one in task.shortcut.sums if one.column))
    found = dict(zip(columns, totals(columns, parts, engine.helpers, stop), strict=True))
    arrays = []
    for one in task.shortcut.sums:
        if one.column:
            kind = pa.int64() if pa.types.is_int32(task.schema.field(one.column).type) else pa.float64()
            arrays.append(pa.array([found[one.column] if matched else None], kind))
        else:
            arrays.append(pa.array([matched], pa.int64()))
    table = pa.table(arrays, [one.name for one in task.shortcut.sums])
    if not others:
        return RunResult(table, RunStats(0, matched))
    rest = _plain(engine, task, others, stop)
    return RunResult(pa.concat_tables([table.cast(rest.table.schema), rest.table]), _added(rest.stats, matched))


def _groups(engine: Engine, task: Task, pieces: Sequence[Piece], space: KeySpace, stop: Stop) -> RunResult:
    began_s = time.monotonic()
    shortcut = task.shortcut
    columns = [key.column for key in shortcut.keys if key.column]
    kinds = [task.schema.field(name).type for name in columns]
    keys, coded = (None, []) if not _is_worth_it(kinds, pieces) else row_keys(space, columns, pieces)
    if keys is None:
        return _plain(engine, task, pieces, stop)
    bare, shown = _hidden_by_key(coded, settled=not shortcut.where)

    def number_of(piece: Piece, number: int) -> pa.Array:
        return keys.numbers(piece, number, shown[id(piece)][number] if id(piece) in shown else None)

    result = engine.run(
        shortcut.keyed_sql, bare, [*shortcut.keyed_columns, GROUP_KEY], task.schema, deadline_s=stop.deadline_s,
        constants=task.constants, where=shortcut.where, made={GROUP_KEY: (keys.type, number_of)}, stop=stop,
    )  # fmt: skip
    grouped = result.table
    hidden = sum(mask.hidden for masks in shown.values() for mask in masks if mask is not None)
    if hidden:
        shown_groups = np.flatnonzero(_whole(grouped.column(GROUP_KEY)).to_numpy() != HIDDEN)
        columns_left = [take_column(_whole(column), shown_groups) for column in grouped.columns]
        grouped = pa.table(columns_left, schema=grouped.schema)
        result = RunResult(grouped, _added(result.stats, -hidden, -min(hidden, result.stats.rows_scanned)))
    values = dict(zip(columns, keys.columns_of(_whole(grouped.column(GROUP_KEY)), kinds), strict=True))
    names = [key.name for key in shortcut.keys]
    arrays = [values[key.column] if key.column else grouped.column(key.name) for key in shortcut.keys]
    for name in grouped.column_names:
        if name != GROUP_KEY and name not in names:
            names.append(name)
            arrays.append(grouped.column(name))
    table = pa.table(arrays, names)
    grouped_by_number = {id(piece) for piece in coded}
    others = [piece for piece in pieces if id(piece) not in grouped_by_number]
    if others:
        rest = _plain(engine, task, others, stop)
        table = pa.concat_tables([table.cast(rest.table.schema), rest.table])
        result = RunResult(table, _added(rest.stats, result.stats.rows_matched, result.stats.rows_scanned))
    return RunResult(table, RunStats(
        result.stats.rows_scanned, result.stats.rows_matched, (time.monotonic() - began_s) * 1000
    ))  # fmt: skip


#: Pieces with fewer existing and matching rows than this share are better off without the others.
_HIDDEN_SHARE = 0.5


def _hidden_by_key(
    pieces: Sequence[Piece], *, settled: bool
) -> tuple[list[Piece], dict[int, tuple[RowMask | None, ...]]]:
    """The pieces, some without their masks: their rows are then told apart by their key. And by the id of such a piece,
    which rows are shown. `settled`: there is no filter, or else it is where a piece is `exact`."""
    bare: list[Piece] = []
    shown: dict[int, tuple[RowMask | None, ...]] = {}
    for piece in pieces:
        if (settled or piece.exact) and not (piece.complete and piece.masks is None):
            masks = tuple(piece.chosen(number) for number in range(len(piece.batches)))
            hidden = sum(mask.hidden for mask in masks if mask is not None)
            if hidden and hidden <= piece.rows * (1 - _HIDDEN_SHARE):
                piece = replace(piece, validity=None, masks=None)
                shown[id(piece)] = masks
        bare.append(piece)
    return bare, shown


#: Over fewer rows, finding out the numbers costs more than grouping by texts.
_CODED_ROWS_MIN = 100_000


def _is_worth_it(kinds: Sequence[pa.DataType], pieces: Sequence[Piece]) -> bool:
    if len(kinds) == 1 and pa.types.is_integer(kinds[0]):
        return False
    return sum(piece.rows for piece in pieces if piece.index is not None) >= _CODED_ROWS_MIN


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _added(stats: RunStats, matched: int, scanned: int = 0) -> RunStats:
    return RunStats(stats.rows_scanned + scanned, stats.rows_matched + matched, stats.elapsed_ms)
