# SPDX-License-Identifier: Apache-2.0
"""Engine: runs one DataFusion SQL text over Arrow batches, within a deadline and a share of memory (design: query.md).

A server runs `server_sql` over the pieces of its segments and tails (table `t`); a broker runs `reduce_sql` over the
servers' answers (table `partials`). Rules:

- The answer holds exactly the rows of the pieces given (rows that its validity leaves out are not there).
- Past the deadline, or when it is cancelled, the query's plan is dropped between two batches, no thread goes on burning
  CPU, and QueryError 250 or 503 is raised; past its memory QueryError 245. Other queries do not notice.
- QUERIES_RUNNING_MAX run at once and QUERIES_SHORT_MAX short ones beside them (admission.py).
- Thread-safe: any thread may call `run`. Waiting releases the GIL.

How tables are given to DataFusion was measured (10 M rows, 2 cores, DataFusion 55):

- A session and its tables are made per query: a session costs 0.06 ms, 150 batches of 3 columns 0.5 ms. So nothing is
  cached, and nothing can be stale.
- Batches are sliced to SLICE_ROWS and scanned newest first: `ORDER BY ts DESC LIMIT 10` takes 7 ms instead of 420 ms,
  because the first slices already hold the winners. Larger slices lose that, smaller ones cost registration.
- DataFusion's own batch size stays 8192: at 32768 a group-by takes twice as long (caches).
- Below SMALL_ROWS one partition is used: exchange operators would cost more than they give.
- Below DIRECT_ROWS the plan is run by the calling thread: three changes of threads cost as much as the query.

A filter that was evaluated already (pieces that are `exact`) leaves the text; pieces of both kinds meet in a view that
filters only the others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext

from cremant.exec.admission import SHORT_ROWS, Admission
from cremant.exec.advice import out_of_memory
from cremant.exec.functions import raised, register
from cremant.exec.stop import Stop, cancelled, timed_out
from cremant.exec.tables import MASK, SMALL_ROWS, Made, count_rows, piece_batches, spread
from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.segment.scan import Piece
from cremant.sql.bound import quoted

#: Of DataFusion's SQL parser (its default, 50, is met by ordinary nesting). See QUERY_DEPTH_MAX for what we send.
RECURSION_LIMIT = 250
#: Work that the calling thread does itself, as it cannot be interrupted.
DIRECT_ROWS = 16 * 1024
#: What pyo3 makes of a panic of Rust: no Exception, and importable from nowhere.
PANIC = "PanicException"
#: What makes work of few rows large.
_NOT_DIRECT = ("fn_", "agg_", "unnest(", "regexp", "repeat(")


#: A table for DataFusion: its name, its rows, their schema.
_Source = tuple[str, list[pa.RecordBatch], pa.Schema]


@dataclass(frozen=True, slots=True)
class RunStats:
    """`rows_scanned`: rows that a filter was evaluated over. `rows_matched`: rows that passed it (or were read)."""

    rows_scanned: int = 0
    rows_matched: int = 0
    elapsed_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """`table` may have zero rows, but always has the columns and types of the query."""

    table: pa.Table
    stats: RunStats


class Engine:
    """One per process. `threads`: cores for queries; `memory_bytes`: for all running queries together, a quarter of it
    for answers being collected (DataFusion's pool does not count them)."""

    def __init__(self, *, threads: int, memory_bytes: int, spill_dir: str | None = None) -> None:
        self._threads = max(1, threads)
        # Before DataFusion makes its threads: more than cores, so that the system shares these between queries.
        os.environ.setdefault("TOKIO_WORKER_THREADS", str(4 * self._threads))
        self._held = _Held(memory_bytes // 4)
        runtime = RuntimeEnvBuilder().with_fair_spill_pool(memory_bytes - memory_bytes // 4)
        #: Shared by all sessions: the memory pool is one for the process.
        self._runtime = runtime.with_temp_file_path(spill_dir) if spill_dir else runtime.with_disk_manager_os()
        self._admission = Admission()
        self._closing = False
        #: What is begun before the loop is told to stop is begun by the loop, and cancelled when it has stopped.
        self._beginning = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        #: Take over parts of what is computed without DataFusion (sums.py), beside the thread of the query.
        self.helpers = concurrent.futures.ThreadPoolExecutor(self._threads, "engine-helper")

    def close(self) -> None:
        """Stops the engine's thread. Running queries are cancelled."""
        with self._beginning:
            self._closing = True
        self.helpers.shutdown(wait=False, cancel_futures=True)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
            left = asyncio.all_tasks(self._loop)
            for task in left:  # whoever waits for one would wait for ever
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()

    def run(
        self,
        sql: str,
        pieces: Sequence[Piece],
        columns: Sequence[str],
        schema: pa.Schema,
        *,
        deadline_s: float,
        constants: dict[str, str] | None = None,
        where: str = "",
        made: dict[str, tuple[pa.DataType, Made]] | None = None,
        stop: Stop | None = None,
    ) -> RunResult:
        """Runs `sql` over table `t`, made of `columns` of `pieces`.

        `schema`: the scan form of ALL columns a piece may have (`segment.layout.scan_schema` plus `$` columns); it
        gives `t` its types when there are no pieces. `deadline_s`: absolute, on `time.monotonic()`.
        `constants`: virtual columns that are the same for every row of this server (`$hostName`).
        `$segmentName`, `$partition` and `$docId` are filled from the piece; `made` columns by their makers.
        `where`: the condition of `sql`, behind `FROM t WHERE `. `stop`: ends the query early.
        Raises QueryError (200, 211, 240, 245, 250, 503).
        """
        began_s = time.monotonic()
        stop = stop or Stop(deadline_s)
        rows = sum(piece.rows for piece in pieces)
        with self._admission.enter(stop, short=rows <= SHORT_ROWS):
            inputs = _Inputs(
                sql, pieces, columns, where,
                lambda own, names: piece_batches(own, names, schema, constants or {}, made),
            )  # fmt: skip
            table, matched = self._collect(inputs.tables, inputs.sql, inputs.rows, stop)
        scanned = inputs.rows - inputs.filtered_rows
        # What passed a filter before and needs no mask is not seen by any filter of the plan.
        if matched is None:  # DataFusion read the count of rows off the input, or off a filter that cannot hold
            matched = 0 if _is_zero(table) else scanned
        matched += 0 if inputs.masked else inputs.filtered_rows
        stats = RunStats(scanned, matched, (time.monotonic() - began_s) * 1000)
        return RunResult(table, stats)

    def reduce(
        self, sql: str, partials: Sequence[pa.Table], *, deadline_s: float, stop: Stop | None = None
    ) -> pa.Table:
        """Runs `sql` over table `partials`, the concatenation of `partials` (at least one; all of the same names and
        types: a server may know that a column has no nulls, and another may not)."""
        schema = pa.schema([field.with_nullable(True) for field in partials[0].schema])
        batches = [_declared(batch, schema) for table in partials for batch in table.to_batches() if batch.num_rows]
        rows = count_rows(batches)
        stop = stop or Stop(deadline_s)
        with self._admission.enter(stop, short=rows <= SHORT_ROWS):
            return self._collect([("partials", batches, schema)], sql, rows, stop)[0]

    def _partitions(self, rows: int) -> int:
        return 1 if rows < SMALL_ROWS else self._threads

    def _session(self, partitions: int) -> SessionContext:
        config = SessionConfig().with_target_partitions(partitions).with_batch_size(8192)
        config = config.set("datafusion.sql_parser.recursion_limit", str(RECURSION_LIMIT))
        return SessionContext(config, self._runtime)

    def _collect(self, tables: Sequence[_Source], sql: str, rows: int, stop: Stop) -> tuple[pa.Table, int | None]:
        stop.check()
        held = self._held.share()
        try:
            partitions = self._partitions(rows)
            session = self._session(partitions)
            for name, batches, schema in tables:
                session.register_record_batches(name, spread(batches, schema, partitions))
            register(session, sql)
            frame = session.sql(sql)
            plan, declared = frame.execution_plan(), frame.schema()
            if rows <= DIRECT_ROWS and not any(word in sql for word in _NOT_DIRECT):
                batches = [
                    held.add(item.to_pyarrow())
                    for index in range(plan.partition_count)
                    for item in session.execute(plan, index)
                ]
            else:
                batches = self._interruptible(session, plan, held, stop)
            return _table(batches, declared), _rows_matched(plan)
        except QueryError:
            raise
        except Exception as error:  # DataFusion raises bare Exception
            raise _query_error(error, sql) from error
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise _query_error(error, sql) from error
        finally:
            held.give_back()

    def _interruptible(self, session: SessionContext, plan: Any, held: _Share, stop: Stop) -> list[pa.RecordBatch]:
        # Here, not in the engine's loop: while operators keep DataFusion's threads busy, starting a stream waits.
        streams = [session.execute(plan, index) for index in range(plan.partition_count)]
        with self._beginning:
            if self._closing:
                raise cancelled()
            pending = asyncio.run_coroutine_threadsafe(_drain(streams, held, stop.deadline_s), self._loop)
        stop.on_cancel(pending.cancel)
        try:
            return pending.result()
        except TimeoutError as error:
            raise timed_out() from error
        except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
            raise (cancelled() if stop.cancelled or self._closing else timed_out()) from error


async def _drain(streams: Sequence[Any], held: _Share, deadline_s: float) -> list[pa.RecordBatch]:
    """All batches of all partitions. Leaving early drops the streams, which stops DataFusion's work."""
    budget_s = deadline_s - time.monotonic()
    if budget_s <= 0:
        raise TimeoutError
    tasks = [asyncio.ensure_future(_drain_one(stream, held)) for stream in streams]
    try:
        async with asyncio.timeout(budget_s):
            parts = await asyncio.gather(*tasks)
    finally:
        # When one partition fails, the others must not go on collecting.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [batch for part in parts for batch in part]


class _Inputs:
    """The tables of a query and the text over them: rows that satisfy its filter already, and all others."""

    def __init__(
        self, sql: str, pieces: Sequence[Piece], columns: Sequence[str], where: str,
        batches_of: Callable[[list[Piece], Sequence[str]], tuple[list[pa.RecordBatch], pa.Schema]],
    ) -> None:  # fmt: skip
        anchor = f" FROM t WHERE {where}"
        known = bool(where) and sql.count(anchor) == 1
        bare = sql.replace(anchor, " FROM t") if known else sql
        #: Columns that only the filter reads are not handed to what needs no filter.
        read = ([name for name in columns if quoted(name) in bare] if known else []) or columns
        filtered, schema = batches_of([piece for piece in pieces if known and piece.exact], read)
        others, other_schema = batches_of([piece for piece in pieces if not (known and piece.exact)], columns)
        self.filtered_rows = count_rows(filtered)
        self.rows = self.filtered_rows + count_rows(others)
        #: The rows that satisfy the filter are marked, not taken out.
        self.masked = MASK in schema.names
        self.tables: list[_Source]
        if not filtered and MASK not in other_schema.names:
            self.tables, self.sql = [("t", others, other_schema)], sql
        elif not others and not self.masked:
            self.tables, self.sql = [("t", filtered, schema)], bare
        elif not filtered:
            source = _source("t_b", other_schema.names, other_schema)
            self.tables, self.sql = [("t_b", others, other_schema)], f"WITH t AS ({source}) {sql}"
        else:
            self.tables = [("t_a", filtered, schema), *([("t_b", others, other_schema)] if others else [])]
            sources = [_source("t_a", schema.names, schema)]
            if others:
                sources.append(_source("t_b", schema.names, other_schema, where))
            self.sql = f"WITH t AS ({' UNION ALL '.join(sources)}) {bare}"


def _source(name: str, wanted: Sequence[str], schema: pa.Schema, where: str = "") -> str:
    columns = ", ".join(quoted(column) for column in wanted if column != MASK)
    conditions = [quoted(MASK)] if MASK in schema.names else []
    conditions += [f"({where})"] if where else []
    return f"SELECT {columns} FROM {name}" + (f" WHERE {' AND '.join(conditions)}" if conditions else "")


#: What the answer of any query may have, whatever others hold: a runaway fails alone. All slots together: 12 MiB.
_ANSWER_BYTES_MIN = 1024 * 1024


class _Held:
    """Bytes of answers being collected by all queries of an engine."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes
        self.lock = threading.Lock()

    def share(self) -> _Share:
        return _Share(self)


class _Share:
    """What one query holds of it."""

    def __init__(self, held: _Held) -> None:
        self._held = held
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        # Small batches may be slices of large buffers, which are counted where they belong.
        size = batch.get_total_buffer_size() if batch.num_rows > 8192 else _small_size(batch)
        with self._held.lock:
            enough = size <= self._held.left_bytes or self._bytes + size <= _ANSWER_BYTES_MIN
            if enough:
                self._held.left_bytes -= size
                self._bytes += size
        if not enough:
            raise QueryError(
                QueryCode.SERVER_RESOURCE_LIMIT, "the answer is larger than the memory for answers that is left",
                hint="lower LIMIT, select fewer columns, or raise query_memory_bytes",
            )  # fmt: skip
        return batch

    def give_back(self) -> None:
        with self._held.lock:
            self._held.left_bytes += self._bytes
            self._bytes = 0


def _small_size(batch: pa.RecordBatch) -> int:
    """Lists and sketches are what one row may have megabytes of."""
    large = sum(column.nbytes for column in batch.columns if pa.types.is_list(column.type) or _is_bytes(column.type))
    return int(batch.num_rows * batch.num_columns * 16 + large)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))


async def _drain_one(stream: Any, held: _Share) -> list[pa.RecordBatch]:
    return [held.add(item.to_pyarrow()) async for item in stream]


def _table(batches: list[pa.RecordBatch], declared: pa.Schema) -> pa.Table:
    """One table of the types the plan declares, whatever the data: DataFusion may simplify a batch of a CASE to one
    branch and leave out the branch's cast, and partial answers of several servers must fit each other."""
    return pa.Table.from_batches([_declared(batch, declared) for batch in batches], schema=declared)


def _declared(batch: pa.RecordBatch, declared: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(declared):
        return batch
    columns = [
        column if column.type == kind else column.cast(kind)
        for column, kind in zip(batch.columns, declared.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=declared)


def _is_zero(table: pa.Table) -> bool:
    return table.num_rows == 1 and all(value == 0 for value in table.to_pylist()[0].values())


def _rows_matched(plan: Any) -> int | None:
    """Rows that left the filter next to the scan (or the scan itself); None if the plan needed no scan."""
    found: list[int] = []
    _find_matched(plan, found)
    return sum(found) if found else None


def _find_matched(plan: Any, found: list[int]) -> bool:
    """Depth first; true if a filter or scan below was counted."""
    children = plan.children()
    below = [_find_matched(child, found) for child in children]
    if any(below):
        return True
    name = plan.display()
    if name.startswith("EmptyExec"):  # the filter was found to be impossible
        found.append(0)
        return True
    if name.startswith(("FilterExec", "DataSourceExec")) or not children:
        metrics = plan.metrics()
        rows = metrics.output_rows if metrics is not None else None
        if rows is not None and not name.startswith("PlaceholderRowExec"):
            found.append(rows)
            return bool(name.startswith("FilterExec"))
    return False


def _query_error(error: BaseException, sql: str) -> QueryError:
    text = str(error).split("\n")[0].removeprefix("DataFusion error: ")
    if "Resources exhausted" in str(error):
        return out_of_memory(f"the query needs more memory than it may have: {text[:300]}", sql)
    of_kernel = raised(str(error))
    return QueryError(QueryCode.QUERY_EXECUTION, f"QueryExecutionError: {(of_kernel or text)[:500]}")
