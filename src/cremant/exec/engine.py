# SPDX-License-Identifier: Apache-2.0
"""Engine: runs one DataFusion SQL text over Arrow batches, within a deadline and a share of memory (design: query.md).

A server runs `server_sql` over the pieces of its segments and tails (table `t`); a broker runs `reduce_sql` over the
servers' answers (table `partials`). Rules:

- The answer holds exactly the rows of the pieces given (rows whose validity bit is off are not there).
- Past the deadline the query is cancelled (its plan is dropped between two batches, no thread goes on burning CPU)
  and QueryError 250 is raised; past its memory QueryError 245. Other queries do not notice.
- At most QUERIES_RUNNING_MAX run at once; QUERIES_WAITING_MAX more wait their turn until their deadline (240), beyond
  that a query is refused at once (211).
- Thread-safe: any thread may call `run`. Waiting releases the GIL.

How tables are given to DataFusion was measured (10 M rows, 2 cores, DataFusion 55):

- A session and its tables are made per query: a session costs 0.06 ms, 150 batches of 3 columns 0.5 ms. So nothing is
  cached, and nothing can be stale.
- Batches are sliced to SLICE_ROWS and scanned newest first: `ORDER BY ts DESC LIMIT 10` takes 7 ms instead of 420 ms,
  because the first slices already hold the winners. Larger slices lose that, smaller ones cost registration.
- DataFusion's own batch size stays 8192: at 32768 a group-by takes twice as long (caches).
- Below SMALL_ROWS one partition is used: exchange operators would cost more than they give.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext

from cremant.exec.tables import SMALL_ROWS, count_rows, piece_batches, spread
from cremant.model.errors import QueryError
from cremant.model.limits import QUERIES_RUNNING_MAX, QUERIES_WAITING_MAX
from cremant.model.query_codes import QueryCode
from cremant.segment.scan import Piece

#: Hidden column that carries a piece's validity; `t` is then a view without it.
_VALID = "$valid"
#: Of DataFusion's SQL parser (its default, 50, is met by ordinary nesting). See QUERY_DEPTH_MAX for what we send.
RECURSION_LIMIT = 250


@dataclass(frozen=True, slots=True)
class RunStats:
    """`rows_scanned`: rows of the pieces given. `rows_matched`: rows that passed the filter (or were read, if less)."""

    rows_scanned: int = 0
    rows_matched: int = 0
    elapsed_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """`table` may have zero rows, but always has the columns and types of the query."""

    table: pa.Table
    stats: RunStats


class Engine:
    """One per process. `threads`: cores for queries; `memory_bytes`: for all running queries together."""

    def __init__(self, *, threads: int, memory_bytes: int, spill_dir: str | None = None) -> None:
        self._threads = max(1, threads)
        self._memory_bytes = memory_bytes
        runtime = RuntimeEnvBuilder().with_fair_spill_pool(memory_bytes)
        #: Shared by all sessions: the memory pool is one for the process.
        self._runtime = runtime.with_temp_file_path(spill_dir) if spill_dir else runtime.with_disk_manager_os()
        self._admission = _Admission()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the engine's thread. Running queries are abandoned."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
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
    ) -> RunResult:
        """Runs `sql` over table `t`, made of `columns` of `pieces`.

        `schema`: the scan form of ALL columns a piece may have (`segment.layout.scan_schema` plus `$` columns); it
        gives `t` its types when there are no pieces. `deadline_s`: absolute, on `time.monotonic()`.
        `constants`: virtual columns that are the same for every row of this server (`$hostName`).
        `$segmentName`, `$partition` and `$docId` are filled from the piece. Raises QueryError
        (200, 211, 240, 245, 250).
        """
        began_s = time.monotonic()
        rows = sum(piece.rows for piece in pieces)
        with self._admission.enter(deadline_s):
            with_validity = any(piece.validity is not None for piece in pieces)
            batches, table_schema = piece_batches(
                pieces, columns, schema, constants or {}, validity_column=_VALID if with_validity else None
            )
            session = self._session(rows)
            name = "t_all" if with_validity else "t"
            session.register_record_batches(name, spread(batches, table_schema, self._partitions(rows)))
            if with_validity:
                kept = ", ".join(_quoted(column) for column in table_schema.names if column != _VALID)
                session.register_view("t", session.sql(f'SELECT {kept} FROM t_all WHERE "{_VALID}"'))
            table, matched = self._collect(session, sql, deadline_s)
        stats = RunStats(rows, rows if matched is None else matched, (time.monotonic() - began_s) * 1000)
        return RunResult(table, stats)

    def reduce(self, sql: str, partials: Sequence[pa.Table], *, deadline_s: float) -> pa.Table:
        """Runs `sql` over table `partials`, the concatenation of `partials` (at least one; all of one schema)."""
        batches = [batch for table in partials for batch in table.to_batches() if batch.num_rows]
        rows = count_rows(batches)
        with self._admission.enter(deadline_s):
            session = self._session(rows)
            session.register_record_batches("partials", spread(batches, partials[0].schema, self._partitions(rows)))
            return self._collect(session, sql, deadline_s)[0]

    def _partitions(self, rows: int) -> int:
        return 1 if rows < SMALL_ROWS else self._threads

    def _session(self, rows: int) -> SessionContext:
        config = SessionConfig().with_target_partitions(self._partitions(rows)).with_batch_size(8192)
        config = config.set("datafusion.sql_parser.recursion_limit", str(RECURSION_LIMIT))
        return SessionContext(config, self._runtime)

    def _collect(self, session: SessionContext, sql: str, deadline_s: float) -> tuple[pa.Table, int | None]:
        try:
            frame = session.sql(sql)
            plan, declared = frame.execution_plan(), frame.schema()
        except Exception as error:  # DataFusion raises bare Exception
            raise _query_error(error) from error
        pending = asyncio.run_coroutine_threadsafe(self._drain(session, plan, deadline_s), self._loop)
        try:
            batches = pending.result()
        except (TimeoutError, asyncio.CancelledError, concurrent.futures.CancelledError) as error:
            raise QueryError(
                QueryCode.EXECUTION_TIMEOUT,
                "the query did not finish within its time and was cancelled",
                hint="narrow the filter, or raise timeoutMs",
            ) from error
        except QueryError:
            raise
        except Exception as error:
            raise _query_error(error) from error
        return _table(batches, declared), _rows_matched(plan)

    async def _drain(self, session: SessionContext, plan: Any, deadline_s: float) -> list[pa.RecordBatch]:
        """All batches of all partitions. Leaving early drops the streams, which stops DataFusion's work."""
        budget_s = deadline_s - time.monotonic()
        if budget_s <= 0:
            raise TimeoutError
        held = _Held(self._memory_bytes)
        async with asyncio.timeout(budget_s):
            parts = await asyncio.gather(
                *(_drain_one(session.execute(plan, index), held) for index in range(plan.partition_count))
            )
        return [batch for part in parts for batch in part]


class _Held:
    """Bytes of the answer collected so far: DataFusion's pool does not count them, so we do."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes

    def add(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise QueryError(
                QueryCode.SERVER_RESOURCE_LIMIT, "the answer is larger than the memory for queries",
                hint="lower LIMIT, select fewer columns, or raise query_memory_bytes",
            )  # fmt: skip


async def _drain_one(stream: Any, held: _Held) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    async for item in stream:
        batch = item.to_pyarrow()
        held.add(batch.get_total_buffer_size() if batch.num_rows > 8192 else batch.num_rows * batch.num_columns * 16)
        batches.append(batch)
    return batches


class _Admission:
    """A counting gate with a bounded queue whose waiters give up at their deadline."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(QUERIES_RUNNING_MAX)
        self._lock = threading.Lock()
        self._waiting = 0

    @contextlib.contextmanager
    def enter(self, deadline_s: float) -> Iterator[None]:
        if not self._slots.acquire(blocking=False):
            self._wait(deadline_s)
        try:
            yield
        finally:
            self._slots.release()

    def _wait(self, deadline_s: float) -> None:
        with self._lock:
            if self._waiting >= QUERIES_WAITING_MAX:
                raise QueryError(
                    QueryCode.SERVER_OUT_OF_CAPACITY, f"{QUERIES_WAITING_MAX} queries are waiting already",
                    hint="send fewer queries at once",
                )  # fmt: skip
            self._waiting += 1
        try:
            admitted = self._slots.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
        finally:
            with self._lock:
                self._waiting -= 1
        if not admitted:
            raise QueryError(
                QueryCode.QUERY_SCHEDULING_TIMEOUT, "the query's time was over before its turn came",
                hint="send fewer queries at once, or raise timeoutMs",
            )  # fmt: skip


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _table(batches: list[pa.RecordBatch], declared: pa.Schema) -> pa.Table:
    """One table of the types the plan declares, whatever the data: DataFusion may simplify a batch of a CASE to one
    branch and leave out the branch's cast, and partial answers of several servers must fit each other."""
    return pa.Table.from_batches([_declared(batch, declared) for batch in batches], schema=declared)


def _declared(batch: pa.RecordBatch, declared: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(declared):
        return batch
    columns = [column.cast(kind) for column, kind in zip(batch.columns, declared.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=declared)


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
    if name.startswith(("FilterExec", "DataSourceExec")) or not children:
        metrics = plan.metrics()
        rows = metrics.output_rows if metrics is not None else None
        if rows is not None and not name.startswith("PlaceholderRowExec"):
            found.append(rows)
            return bool(name.startswith("FilterExec"))
    return False


def _query_error(error: Exception) -> QueryError:
    text = str(error).split("\n")[0].removeprefix("DataFusion error: ")
    if "Resources exhausted" in str(error):
        return QueryError(
            QueryCode.SERVER_RESOURCE_LIMIT, f"the query needs more memory than it may have: {text[:300]}",
            hint="group by fewer values, lower LIMIT, or raise query_memory_bytes",
        )  # fmt: skip
    return QueryError(QueryCode.QUERY_EXECUTION, f"QueryExecutionError: {text[:500]}")
