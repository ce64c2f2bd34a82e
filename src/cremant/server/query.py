# SPDX-License-Identifier: Apache-2.0
"""One server's share of a query: resolve, prune, run, answer (query design, "Server").

Rules:

- Off the event loop, in a bounded pool; what waits is bounded, too, and refused with Pinot's 211 beyond. The budget
  counts from arrival.
- A query that must see certain rows (`not_before`) waits for them before it takes a slot, and not to the end of its
  budget: without them there must be time to say so, and to bring what is there.
- So does one whose cut is not closed here yet. An upsert table never answers without a cut: it would show all versions.
- So does one with columns that only the broker has heard of, for a moment: the new schema is on its way.
- The answer covers exactly what `resolve` found; what it did not find is named, never guessed.
- A cancelled query is answered at once and its work ends between two batches; its slot is free when its thread is.

Body of an answer: 4 bytes big-endian length of the header, ServerAnswer as JSON, Arrow IPC stream (empty on an error).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import msgspec
import pyarrow as pa

from cremant.exec.admission import SHORT_ROWS, no_turn, too_many
from cremant.exec.engine import Engine, RunResult
from cremant.exec.keys import KeySpace
from cremant.exec.shortcuts import Task, run
from cremant.exec.stop import Stop, cancelled, timed_out
from cremant.model.errors import QueryError
from cremant.model.limits import (
    QUERIES_RUNNING_MAX,
    QUERIES_SHORT_MAX,
    QUERIES_WAITING_MAX,
    QUERY_ANSWER_BYTES_MAX,
)
from cremant.model.names import IS_NULL_PREFIX
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Cut, Visibility
from cremant.segment.rows import compacted, unpacked_bytes
from cremant.segment.versions import Versions
from cremant.server.epochs import EpochBoard
from cremant.server.pool import DaemonPool
from cremant.server.resolved import partition_of
from cremant.server.scan import Scan, plan_scan
from cremant.server.table import HostedTable, Resolved, SegmentPart, TailRows
from cremant.wire.codec import encode
from cremant.wire.messages import PartitionAnswer, ServerAnswer, ServerQuery

_log = logging.getLogger(__name__)

HEADER_LENGTH_BYTES = 4
#: Of a budget, what waiting for rows leaves for the answer: a fifth, half a second at most.
ANSWER_RESERVE_SHARE = 0.2
ANSWER_RESERVE_S = 0.5
#: A new schema is everywhere within milliseconds, unless a server does not hear from the controller: others are asked
#: then. Looks for it are this far apart, doubling.
SCHEMA_WAIT_S = 2.0
SCHEMA_LOOK_S = 0.01
#: What runs past the deadline is interrupted and says so itself; this much later the answer does not wait for it.
INTERRUPT_GRACE_S = 0.1

P = ParamSpec("P")
T = TypeVar("T")
#: Header, and rows as an Arrow IPC stream (None on an error).
_Answer = tuple[ServerAnswer, pa.Buffer | None]


@dataclass(slots=True)
class _Work:
    """A query under way. `task` answers it; cancelling it answers at once, whatever its thread still does."""

    stop: Stop
    task: asyncio.Task[_Answer] | None = None
    #: From arrival until a thread took it.
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A long query that waits for its turn."""

    found: Resolved
    scan: Scan
    table: HostedTable


class QueryService:
    """Answers server queries over `tables` (shared with the host). `instance` is set once known; `board` says which
    epochs are closed."""

    def __init__(self, tables: Mapping[str, HostedTable], engine: Engine, board: EpochBoard | None = None) -> None:
        self.instance = ""
        self.board = board or EpochBoard()
        self._tables = tables
        self._engine = engine
        self._pool = DaemonPool(QUERIES_RUNNING_MAX + QUERIES_SHORT_MAX, "query")
        self._short = asyncio.Semaphore(QUERIES_SHORT_MAX)
        self._long = asyncio.Semaphore(QUERIES_RUNNING_MAX)
        self._turns = _Queue()
        self._arrivals = _Queue()
        self._under_way: dict[str, _Work] = {}
        #: Dictionaries of group keys, as long as the table is hosted.
        self._key_spaces: weakref.WeakKeyDictionary[HostedTable, KeySpace] = weakref.WeakKeyDictionary()
        #: Called with (elapsed_ms, error_code) per answer, for metrics.
        self.on_answer: Callable[[float, int], None] = lambda elapsed_ms, code: None

    def close(self) -> None:
        self._pool.close()

    async def answer(self, query: ServerQuery) -> bytes:
        """The body of the reply; errors of the query travel inside."""
        began_s = time.monotonic()
        deadline_s = began_s + query.budget_ms / 1000
        work = self._under_way[query.request_id] = _Work(Stop(deadline_s))
        try:
            header, rows = await self._stoppable(query, work)
        except QueryError as error:
            header, rows = self._refusal(query, int(error.code), str(error)), None
        except Exception as error:
            _log.exception("a query failed on a bug", extra={"fields": {"request_id": query.request_id}})
            header = self._refusal(query, QueryCode.QUERY_EXECUTION, f"internal error: {type(error).__name__}")
            rows = None
        finally:
            if self._under_way.get(query.request_id) is work:
                del self._under_way[query.request_id]
        elapsed_ms = (time.monotonic() - began_s) * 1000
        self.on_answer(elapsed_ms, header.error_code)
        return pack(msgspec.structs.replace(header, elapsed_ms=elapsed_ms, wait_ms=work.wait_ms), rows)

    def cancel(self, request_id: str) -> bool:
        """Ends a query, waiting or running; its answer says so (503). False if it is not under way."""
        work = self._under_way.get(request_id)
        if work is None:
            return False
        work.stop.cancel()
        if work.task is not None:
            work.task.cancel()
        return True

    async def _stoppable(self, query: ServerQuery, work: _Work) -> _Answer:
        """The answer, or the end of the query's time; never later, even if a thread cannot be interrupted."""
        work.task = asyncio.ensure_future(self._admitted(query, work))
        left_s = work.stop.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s) + INTERRUPT_GRACE_S):
                return await work.task
        except TimeoutError as error:
            work.stop.cancel()
            raise timed_out() from error
        except asyncio.CancelledError as error:
            if work.task.cancelled() and work.stop.cancelled:
                raise cancelled() from error
            work.stop.cancel()
            work.task.cancel()
            raise

    async def _admitted(self, query: ServerQuery, work: _Work) -> _Answer:
        """All queries are prepared, and short ones carried out, in slots of their own; long ones then wait for one of
        the others. So a lookup never waits for scans."""
        began_s = time.monotonic()
        await self._schema_arrived(query, work.stop.deadline_s)
        await self._rows_arrived(query, work.stop.deadline_s)
        await self._cut_arrived(query, work.stop.deadline_s)
        with self._turns.place():
            await _acquire(self._short, work.stop.deadline_s)
        work.wait_ms = (time.monotonic() - began_s) * 1000
        done = await self._in_thread(self._short, self._prepare, query, work.stop)
        if not isinstance(done, _Prepared):
            return done
        began_s = time.monotonic()
        with self._turns.place():
            await _acquire(self._long, work.stop.deadline_s)
        work.wait_ms += (time.monotonic() - began_s) * 1000
        return await self._in_thread(self._long, self._run, query, done, work.stop)

    async def _in_thread(self, slots: asyncio.Semaphore, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `call` in the slot that was acquired; the slot is free when the thread is, also after a cancel."""
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(slots.release)

        future = self._pool.submit(call, *args, **kwargs)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    async def _schema_arrived(self, query: ServerQuery, deadline_s: float) -> None:
        """Returns when the query's columns are known, or not in time: then the answer says so."""
        give_up_s = min(_latest_wait_s(query, deadline_s), time.monotonic() + SCHEMA_WAIT_S)
        pause_s = SCHEMA_LOOK_S
        while self._lacks_columns(query) and (left_s := give_up_s - time.monotonic()) > 0:
            with self._arrivals.place():
                await asyncio.sleep(min(pause_s, left_s))
            pause_s *= 2

    def _lacks_columns(self, query: ServerQuery) -> bool:
        table = self._tables.get(query.table)
        if table is None or table.record.incarnation != query.incarnation:
            return False
        return bool(_unknown(query.columns, table.alignment.schema))

    async def _rows_arrived(self, query: ServerQuery, deadline_s: float) -> None:
        """Returns when the rows that the query must see are visible, or cannot be in time: `resolve` says which."""
        give_up_s = _latest_wait_s(query, deadline_s)
        for tail in query.tails:
            table = self._tables.get(query.table)
            partition = table.partitions.get(tail.partition) if table is not None else None
            if tail.not_before > 0 and partition is not None:
                with self._arrivals.place():
                    await partition.progress.wait(tail.not_before, max(0.0, give_up_s - time.monotonic()))

    async def _cut_arrived(self, query: ServerQuery, deadline_s: float) -> None:
        """Returns when all that is asked for is closed up to the cut, or cannot be in time: `resolve` says what."""
        table = self._tables.get(query.table)
        if query.cut is None or table is None:
            return
        give_up_s = _latest_wait_s(query, deadline_s)
        partitions = {tail.partition for tail in query.tails}
        hosted = (table.segments.get(name) for name in query.segments)
        partitions.update(one.metadata.partition for one in hosted if one is not None)
        for partition in sorted(partitions):
            state = self.board.state(query.incarnation, partition)
            if state is None or state.closed >= query.cut.epoch:
                continue
            with self._arrivals.place():
                left_s = max(0.0, give_up_s - time.monotonic())
                await self.board.wait(query.incarnation, partition, query.cut.epoch, left_s)

    def _prepare(self, query: ServerQuery, stop: Stop) -> _Answer | _Prepared:
        """The answer, if finding it is little work."""
        table = self._tables.get(query.table)
        if table is None or table.record.incarnation != query.incarnation:
            text = f"table {query.table} (incarnation {query.incarnation}) is not on this server"
            return self._refusal(query, QueryCode.SERVER_TABLE_MISSING, text), None
        if (query.cut is None) != (table.record.config.upsert is None):
            kind = "an upsert table" if query.cut is None else "an append table"
            text = f"table {query.table} is {kind} here, the query is not of such a table (yet)"
            return self._refusal(query, QueryCode.SERVER_TABLE_MISSING, text), None
        found = table.resolve(query.segments, query.tails, query.cut)
        if query.cut is not None and query.cut.unkeyed and _has_keys(found, query.cut):
            text = f"table {query.table} had keys before epoch {query.cut.epoch}, the query is of a table without (yet)"
            return self._refusal(query, QueryCode.SERVER_TABLE_MISSING, text), None
        unknown = _unknown(query.columns, found.alignment.schema)
        if unknown:  # the broker has heard of a change of the schema first: another server may have, too
            text = f"the schema of table {query.table} has no {', '.join(unknown)} on this server yet"
            return self._refusal(query, QueryCode.SERVER_TABLE_MISSING, text), None
        scan = plan_scan(table, found, query, stop)
        if query.cut is not None and query.cut.unkeyed and _got_keys(found):  # looked at after the rows' masks are made
            found = _refused(found, query.cut)
            scan = plan_scan(table, found, query, stop)
        prepared = _Prepared(found, scan, table)
        return self._run(query, prepared, stop) if prepared.scan.rows <= SHORT_ROWS else prepared

    def _run(self, query: ServerQuery, prepared: _Prepared, stop: Stop) -> _Answer:
        found, scan = prepared.found, prepared.scan
        task = Task(query.sql, query.columns, found.alignment.schema, {"$hostName": self.instance}, query.shortcut)
        space = self._key_spaces.setdefault(prepared.table, KeySpace())
        result = run(self._engine, task, scan.pieces, space, stop)
        return self._header(query, found, scan, result), pack_rows(result.table)

    def _header(self, query: ServerQuery, found: Resolved, scan: Scan, result: RunResult) -> ServerAnswer:
        matched = result.stats.rows_matched
        processed = scan.segments_queried - scan.segments_pruned
        return ServerAnswer(
            cause_id=query.cause_id,
            instance=self.instance,
            partitions=tuple(
                PartitionAnswer(
                    partition=tail.partition, covered=tail.covered, watermark=tail.watermark,
                    processed=tail.partition in scan.scanned_tails,
                    matched=tail.partition in scan.scanned_tails and matched > 0,
                )
                for tail in found.tails
            ),
            missing_segments=tuple(found.missing),
            behind_partitions=tuple(found.behind),
            refused_partitions=tuple(found.refused),
            horizon=found.horizon,
            docs_total=scan.docs_total,
            docs_scanned=matched,
            entries_scanned_in_filter=result.stats.rows_scanned if query.prune else 0,
            entries_scanned_post_filter=matched * len(query.columns),
            segments_queried=scan.segments_queried,
            segments_processed=processed,
            segments_matched=processed if matched else 0,
            segments_pruned=scan.segments_pruned,
        )  # fmt: skip

    def _refusal(self, query: ServerQuery, code: int, text: str) -> ServerAnswer:
        return ServerAnswer(
            cause_id=query.cause_id, instance=self.instance, missing_segments=query.segments,
            behind_partitions=tuple(tail.partition for tail in query.tails), error_code=int(code), error=text,
        )  # fmt: skip


def _latest_wait_s(query: ServerQuery, deadline_s: float) -> float:
    """Until when a query may wait for what is to arrive."""
    return deadline_s - min(ANSWER_RESERVE_S, query.budget_ms / 1000 * ANSWER_RESERVE_SHARE)


def _has_keys(found: Resolved, cut: Cut) -> bool:
    """Some row is in force at the cut: before a table has keys none is."""
    in_force = Cut(epoch=cut.epoch, visibility=Visibility.IN_FORCE)
    return any(bool(versions.mask(in_force).any()) for versions in _versions_of(found))


def _got_keys(found: Resolved) -> bool:
    """Some row has been in force meanwhile: since when it was there before that is no longer known."""
    return any(bool((versions.valid_from != versions.valid_until).any()) for versions in _versions_of(found))


def _versions_of(found: Resolved) -> list[Versions]:
    parts: list[SegmentPart | TailRows] = list(found.segments)
    for tail in found.tails:
        parts += [*tail.sealed, tail.rows]
    return [part.versions for part in parts if part.versions is not None]


def _refused(found: Resolved, cut: Cut) -> Resolved:
    """Nothing of what was found, and that the cut is too early: who asks takes a later one."""
    parts = {*found.refused, *map(partition_of, found.segments), *(tail.partition for tail in found.tails)}
    return replace(found, segments=[], tails=[], refused=sorted(parts), horizon=max(found.horizon, cut.epoch + 1))


def _unknown(columns: tuple[str, ...], schema: pa.Schema) -> list[str]:
    return [name for name in columns if not _is_known(name, schema)]


def _is_known(column: str, schema: pa.Schema) -> bool:
    """The engine knows all other `$` columns."""
    is_stored = not column.startswith("$") or column.startswith(IS_NULL_PREFIX)
    return not is_stored or schema.get_field_index(column) >= 0


class _Queue:
    """Queries that wait for the same: for a turn, or for rows, whose lateness must not refuse those that need none."""

    def __init__(self) -> None:
        self._waiting = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Raises QueryError 211 when too many wait already."""
        if self._waiting >= QUERIES_WAITING_MAX:
            raise too_many()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1


async def _acquire(slots: asyncio.Semaphore, deadline_s: float) -> None:
    if not slots.locked():
        await slots.acquire()  # does not wait
        return
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            await slots.acquire()
    except TimeoutError as error:
        raise no_turn() from error


def pack_rows(table: pa.Table) -> pa.Buffer:
    """A million rows take a tenth of a second: for a query's thread. Raises QueryError 245 before it makes what is too
    large: until then texts are only pointed at."""
    size_bytes = unpacked_bytes(table)
    if size_bytes > QUERY_ANSWER_BYTES_MAX:
        raise QueryError(
            QueryCode.SERVER_RESOURCE_LIMIT,
            f"{table.num_rows} rows of {size_bytes} bytes, an answer has at most {QUERY_ANSWER_BYTES_MAX}",
            hint="lower LIMIT, aggregate, select fewer columns, or fetch the rows in pages",
        )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(compacted(table))
    return sink.getvalue()


def pack(header: ServerAnswer, rows: pa.Buffer | None) -> bytes:
    """Header and rows as one body."""
    head = encode(header)
    return b"".join((len(head).to_bytes(HEADER_LENGTH_BYTES, "big"), head, rows if rows is not None else b""))
