# SPDX-License-Identifier: Apache-2.0
"""One server's share of a query: resolve, prune, run, answer (query design, "Server").

Rules:

- Off the event loop, in a bounded pool; what waits is bounded, too, and refused with Pinot's 211 beyond. The budget
  counts from arrival.
- The answer covers exactly what `resolve` found; what it did not find is named, never guessed.
- Pruning uses metadata only (of segments, of batches within them, of blocks of a tail) and drops only what cannot
  match; pruned rows count in `docs_total`, as in Pinot.

Body of an answer: 4 bytes big-endian length of the header, ServerAnswer as JSON, Arrow IPC stream (empty on an error).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from cremant.exec.engine import Engine, RunResult
from cremant.exec.tables import DOC_ID
from cremant.model.errors import QueryError
from cremant.model.limits import QUERIES_RUNNING_MAX, QUERIES_WAITING_MAX
from cremant.model.query_codes import QueryCode
from cremant.segment.prune import may_match
from cremant.segment.reader import Zones
from cremant.segment.scan import Piece
from cremant.server.pool import DaemonPool
from cremant.server.table import HostedTable, Resolved, ResolvedTail, SegmentPart, TailRows
from cremant.wire.codec import encode
from cremant.wire.messages import PartitionAnswer, ServerAnswer, ServerQuery

_log = logging.getLogger(__name__)

HEADER_LENGTH_BYTES = 4


@dataclass(slots=True)
class _Scan:
    """What of the resolved rows is scanned, and what was counted on the way."""

    pieces: list[Piece] = field(default_factory=list)
    docs_total: int = 0
    segments_queried: int = 0
    segments_pruned: int = 0
    #: Partitions whose tail had rows that were not pruned away.
    scanned_tails: set[int] = field(default_factory=set)


class QueryService:
    """Answers server queries over `tables` (shared with the host). `instance` is set once known."""

    def __init__(self, tables: Mapping[str, HostedTable], engine: Engine) -> None:
        self.instance = ""
        self._tables = tables
        self._engine = engine
        self._pool = DaemonPool(QUERIES_RUNNING_MAX, "query")
        self._running = asyncio.Semaphore(QUERIES_RUNNING_MAX)
        self._waiting = 0
        #: Called with (elapsed_ms, error_code) per answer, for metrics.
        self.on_answer: Callable[[float, int], None] = lambda elapsed_ms, code: None

    def close(self) -> None:
        self._pool.close()

    async def answer(self, query: ServerQuery) -> bytes:
        """The body of the reply; errors of the query travel inside."""
        began_s = time.monotonic()
        deadline_s = began_s + query.budget_ms / 1000
        try:
            header, table = await self._admitted(query, deadline_s)
        except QueryError as error:
            header, table = self._refusal(query, int(error.code), str(error)), None
        except Exception as error:
            _log.exception("a query failed on a bug", extra={"fields": {"request_id": query.request_id}})
            header = self._refusal(query, QueryCode.QUERY_EXECUTION, f"internal error: {type(error).__name__}")
            table = None
        elapsed_ms = (time.monotonic() - began_s) * 1000
        self.on_answer(elapsed_ms, header.error_code)
        return pack(_timed(header, elapsed_ms), table)

    async def _admitted(self, query: ServerQuery, deadline_s: float) -> tuple[ServerAnswer, pa.Table | None]:
        if self._waiting >= QUERIES_WAITING_MAX:
            raise QueryError(QueryCode.SERVER_OUT_OF_CAPACITY, f"{QUERIES_WAITING_MAX} queries are waiting already")
        self._waiting += 1
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._running.acquire()
        except TimeoutError as error:
            raise QueryError(
                QueryCode.QUERY_SCHEDULING_TIMEOUT, "the query's time was over before its turn came"
            ) from error
        finally:
            self._waiting -= 1
        try:
            return await asyncio.wrap_future(self._pool.submit(self._run, query, deadline_s))
        finally:
            self._running.release()

    def _run(self, query: ServerQuery, deadline_s: float) -> tuple[ServerAnswer, pa.Table | None]:
        table = self._tables.get(query.table)
        if table is None or table.record.incarnation != query.incarnation:
            text = f"table {query.table} (incarnation {query.incarnation}) is not on this server"
            return self._refusal(query, QueryCode.SERVER_TABLE_MISSING, text), None
        found = table.resolve(query.segments, query.tails)
        scan = plan_scan(table, found, query)
        result = self._engine.run(
            query.sql, scan.pieces, query.columns, found.alignment.schema, deadline_s=deadline_s,
            constants={"$hostName": self.instance},
        )  # fmt: skip
        return self._header(query, found, scan, result), result.table

    def _header(self, query: ServerQuery, found: Resolved, scan: _Scan, result: RunResult) -> ServerAnswer:
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


def plan_scan(table: HostedTable, found: Resolved, query: ServerQuery) -> _Scan:
    """Pieces of everything found that may match."""
    scan = _Scan()
    for part in found.segments:
        if isinstance(part, SegmentPart):
            _add_segment(scan, table, found, query, part)
        else:
            scan.segments_queried += 1
            _add_tail(scan, table, found, query, part)
    for tail in found.tails:
        _add_resolved_tail(scan, table, found, query, tail)
    return scan


def _add_resolved_tail(
    scan: _Scan, table: HostedTable, found: Resolved, query: ServerQuery, tail: ResolvedTail
) -> None:
    """The whole counts as one (consuming) segment, however much of it is sealed here already."""
    pieces, pruned = len(scan.pieces), scan.segments_pruned
    scan.segments_queried += 1
    for part in tail.sealed:
        scan.segments_queried -= 1
        _add_segment(scan, table, found, query, part)
    _add_tail(scan, table, found, query, tail.rows)
    scanned = len(scan.pieces) > pieces
    scan.segments_pruned = pruned + (0 if scanned or not tail.covered.length else 1)
    if scanned or not tail.covered.length:
        scan.scanned_tails.add(tail.partition)


def _add_segment(scan: _Scan, table: HostedTable, found: Resolved, query: ServerQuery, part: SegmentPart) -> None:
    metadata, marker = part.hosted.metadata, part.sealed.marker
    scan.segments_queried += 1
    ranges = metadata.columns

    def range_of(column: str) -> tuple[Any, Any] | None:
        known = ranges.get(column)
        return (known.min, known.max) if known is not None else None

    if part.whole:
        scan.docs_total += marker.rows
    if not may_match(query.prune, range_of, table.single_precision):
        scan.segments_pruned += 1
        if not part.whole:
            scan.docs_total += sum(batch.num_rows for batch in part.batches(found.alignment))
        return
    batches = part.batches(found.alignment)
    if not part.whole:
        scan.docs_total += sum(batch.num_rows for batch in batches)
    elif query.prune and DOC_ID not in query.columns:
        batches = _matching(batches, part.sealed.zones, table, query)
    if not batches:
        scan.segments_pruned += 1
        return
    rows = sum(batch.num_rows for batch in batches)
    key = f"{table.name}/{query.incarnation}/{metadata.name}/{marker.checksum}/{found.schema_version}"
    all_rows = part.whole and rows == marker.rows
    scan.pieces.append(Piece(key, metadata.partition, metadata.name, batches, rows, None, immutable=all_rows))


def _matching(
    batches: tuple[pa.RecordBatch, ...], zones: Zones, table: HostedTable, query: ServerQuery
) -> tuple[pa.RecordBatch, ...]:
    """Those batches of a whole segment in which a row may match."""
    return tuple(
        batch
        for index, batch in enumerate(batches)
        if may_match(query.prune, functools.partial(zones.range_of, index), table.single_precision)
    )


def _add_tail(scan: _Scan, table: HostedTable, found: Resolved, query: ServerQuery, rows: TailRows) -> None:
    total = sum(part.rows for part in rows.parts)
    scan.docs_total += total
    kept = tuple(part for part in rows.parts if may_match(query.prune, part.block.range_of, table.single_precision))
    if not kept:
        return
    key = f"{table.name}/{query.incarnation}/tail/{rows.partition}"
    batches = TailRows(rows.partition, rows.segment, kept).batches(found.alignment)
    count = sum(part.rows for part in kept)
    scan.pieces.append(Piece(key, rows.partition, rows.segment, batches, count, None, False))


def _timed(header: ServerAnswer, elapsed_ms: float) -> ServerAnswer:
    return msgspec.structs.replace(header, elapsed_ms=elapsed_ms)


def pack(header: ServerAnswer, table: pa.Table | None) -> bytes:
    """Header and rows as one body."""
    head = encode(header)
    sink = pa.BufferOutputStream()
    sink.write(len(head).to_bytes(HEADER_LENGTH_BYTES, "big") + head)
    if table is not None:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body
