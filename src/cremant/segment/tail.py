# SPDX-License-Identifier: Apache-2.0
"""Tail: the undecided rows of one partition on one server, in offset order (segment completion design, "The cut").

Rules:

- One thread appends; any thread takes snapshots; `maintain` runs in a background thread. A snapshot is immutable and
  swapped as a whole: readers never wait for a merge or a spill, and never see one half done.
- Rows at or past `next_offset` only: the reader of the epoch log has trimmed overlaps (E-2), here it is asserted.
- The heap holds at most `HEAP_BYTES_MAX`: finished blocks leave it for mapped Arrow files once there are
  `TAIL_SPILL_BYTES` of them; sooner, and unfinished ones, too, when the tails of the server take more memory together
  than they may. When files may not or cannot grow, `blocked` names why, and consumption of the partition pauses until
  rows are sealed and dropped: never out of memory, never silent.
- Spill files are scratch: after a restart the epoch log is read again, and the directory is emptied.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from cremant.model.cluster import SPILL_BEHIND, SPILL_FAILED, TAIL_QUOTA
from cremant.model.errors import InvariantViolation
from cremant.model.limits import TAIL_DISK_BYTES_MAX, TAIL_HEAP_BYTES_MAX, TAIL_MERGE_ROWS, TAIL_SPILL_BYTES
from cremant.segment.blocks import TailBlock, TailSnapshot, plan_merge
from cremant.segment.layout import scan_form

#: Rows that wait for a spill, finished or not: the background thread may be a few files behind before we pause.
HEAP_BYTES_MAX = 4 * TAIL_SPILL_BYTES
#: The share of a usual file from which rows are spilled, or waited for, when the server's tails take too much memory.
_PRESSED_SHARE = 16


class SpillQuota:
    """Disk and memory that the tails of one server may take together. Thread-safe."""

    def __init__(self, limit_bytes: int = TAIL_DISK_BYTES_MAX, heap_limit_bytes: int = TAIL_HEAP_BYTES_MAX) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.heap_limit_bytes = heap_limit_bytes
        self.heap_bytes = 0
        self._lock = threading.Lock()

    @property
    def pressed(self) -> bool:
        """The heap is full: tails are to become smaller."""
        return self.heap_bytes >= self.heap_limit_bytes

    def heap_changed(self, bytes_more: int) -> None:
        with self._lock:
            self.heap_bytes += bytes_more

    def reserve(self, size_bytes: int) -> bool:
        with self._lock:
            if self.used_bytes + size_bytes > self.limit_bytes:
                return False
            self.used_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes


class Tail:
    """Rows of one partition from `first_offset` on. `directory` is emptied and then its own."""

    def __init__(self, directory: Path, first_offset: int, quota: SpillQuota) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._directory = directory
        self._quota = quota
        self._lock = threading.Lock()
        self._maintenance = threading.Lock()
        self._snapshot = TailSnapshot(first_offset, first_offset, (), 0)
        self.heap_bytes = 0
        self._files: dict[Path, int] = {}
        self._files_made = 0
        self._refused: str | None = None
        self._closed = False

    @property
    def snapshot(self) -> TailSnapshot:
        return self._snapshot

    @property
    def disk_bytes(self) -> int:
        return sum(self._files.values())

    @property
    def blocked(self) -> str | None:
        """Why nothing may be appended now; None when it may."""
        if self.heap_bytes >= HEAP_BYTES_MAX or (self._quota.pressed and self.heap_bytes >= self._spill_bytes()):
            return self._refused or SPILL_BEHIND
        return None

    def append(self, batch: pa.RecordBatch, next_offset: int) -> None:
        """Rows of offsets [tail's next_offset, next_offset); the batch may be empty (all of them filtered)."""
        with self._lock:
            now = self._snapshot
            if next_offset < now.next_offset:
                raise InvariantViolation("E-2", f"append up to {next_offset}, but the tail is at {now.next_offset}")
            if not batch.num_rows:
                self._snapshot = replace(now, next_offset=next_offset)
                return
            block = TailBlock.of(batch)
            if block.first < now.next_offset or block.last >= next_offset:
                raise InvariantViolation(
                    "E-2",
                    f"rows [{block.first}, {block.last}] appended as [{now.next_offset}, {next_offset})",
                )
            self._snapshot = TailSnapshot(now.first_offset, next_offset, (*now.blocks, block), now.rows + block.rows)
            self._set_heap(self.heap_bytes + block.bytes)

    def append_gap(self, next_offset: int) -> None:
        """Offsets up to `next_offset` have no rows here."""
        with self._lock:
            if next_offset > self._snapshot.next_offset:
                self._snapshot = replace(self._snapshot, next_offset=next_offset)

    def restart(self, offset: int) -> None:
        """Empty, and going on at `offset`: the rows before it are served from elsewhere."""
        with self._lock:
            self._swap(offset, offset, ())

    def drop_below(self, offset: int) -> None:
        """Rows below `offset` are sealed and served from their segment."""
        with self._lock:
            now = self._snapshot
            first = min(max(offset, now.first_offset), now.next_offset)
            self._swap(first, now.next_offset, now.blocks_between(first, now.next_offset))

    def truncate(self, offset: int) -> None:
        """Rows at or past `offset` were taken back by a Reset."""
        with self._lock:
            now = self._snapshot
            end = max(min(offset, now.next_offset), now.first_offset)
            self._swap(now.first_offset, end, now.blocks_between(now.first_offset, end))

    def maintain(self) -> bool:
        """Merges or spills once; True if there may be more to do. Any thread, one at a time; never blocks readers,
        and appenders only for the swap."""
        with self._maintenance:
            return not self._closed and (self._merge() or self._spill())

    def close(self) -> None:
        """Lets go of everything; snapshots in use stay readable."""
        with self._maintenance, self._lock:
            self._closed = True
            now = self._snapshot
            self._swap(now.next_offset, now.next_offset, ())
        shutil.rmtree(self._directory, ignore_errors=True)

    def _swap(self, first: int, end: int, blocks: tuple[TailBlock, ...]) -> None:
        """Under the lock: a new snapshot; files that it no longer uses go (mappings in use outlive them)."""
        self._snapshot = TailSnapshot(first, end, blocks, sum(block.rows for block in blocks))
        self._set_heap(sum(block.bytes for block in blocks if block.file is None))
        used = {block.file for block in blocks}
        for file in [file for file in self._files if file not in used]:
            file.unlink(missing_ok=True)
            self._quota.release(self._files.pop(file))

    def _set_heap(self, heap_bytes: int) -> None:
        """Under the lock."""
        self._quota.heap_changed(heap_bytes - self.heap_bytes)
        self.heap_bytes = heap_bytes

    def _spill_bytes(self) -> int:
        return TAIL_SPILL_BYTES // _PRESSED_SHARE if self._quota.pressed else TAIL_SPILL_BYTES

    def _replace_run(self, old: Sequence[TailBlock], new: Sequence[TailBlock]) -> bool:
        """Puts `new` in the place of the neighbours `old`, unless they changed since they were read."""
        with self._lock:
            blocks = self._snapshot.blocks
            at = next((index for index, block in enumerate(blocks) if block is old[0]), None)
            if at is None or any(a is not b for a, b in zip(old, blocks[at : at + len(old)], strict=False)):
                return False
            if len(blocks) < at + len(old):
                return False
            changed = (*blocks[:at], *new, *blocks[at + len(old) :])
            self._swap(self._snapshot.first_offset, self._snapshot.next_offset, changed)
            return True

    def _merge(self) -> bool:
        blocks = self._snapshot.blocks
        start = 0
        for end in range(1, len(blocks) + 1):
            # Runs on the heap that have one schema; rows of another schema version are aligned when scanned.
            joined = end < len(blocks) and blocks[end].file is None and _same_schema(blocks[end - 1], blocks[end])
            if joined:
                continue
            run = blocks[start:end]
            start = end
            plan = None if run[0].file is not None else plan_merge([block.rows for block in run])
            if plan is not None:
                chosen = run[plan[0] : plan[1]]
                merged = pa.Table.from_batches([block.batch for block in chosen]).combine_chunks().to_batches()
                self._replace_run(chosen, [TailBlock.of(batch) for batch in merged])
                return True
        return False

    def _spill(self) -> bool:
        """Writes the oldest finished heap blocks of one schema to one file, when there are enough of them."""
        chosen: list[TailBlock] = []
        size, enough, pressed = 0, self._spill_bytes(), self._quota.pressed
        for block in self._snapshot.blocks:
            finished = block.file is None and (pressed or block.rows >= TAIL_MERGE_ROWS or block.bytes >= enough)
            if not finished or (chosen and not _same_schema(chosen[-1], block)):
                if size >= enough:
                    break
                chosen, size = [], 0
            if finished:
                chosen.append(block)
                size += block.bytes
            if size >= enough:
                break
        if size < enough:
            return False
        return self._write(chosen)

    def _write(self, chosen: list[TailBlock]) -> bool:
        schema = scan_form(chosen[0].batch.schema)
        batches = [block.batch.cast(schema) for block in chosen]
        size = sum(pa.ipc.get_record_batch_size(batch) for batch in batches) + 64 * 1024
        if not self._quota.reserve(size):
            self._refused = TAIL_QUOTA
            return False
        self._files_made += 1
        file = self._directory / f"{self._files_made:08d}.arrow"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            source = pa.ipc.open_file(pa.memory_map(str(file), "r"))
            mapped = [TailBlock.of(source.get_batch(index), file) for index in range(source.num_record_batches)]
        except OSError:
            # Disk full or gone: the rows stay on the heap, and `blocked` says so once that is full.
            file.unlink(missing_ok=True)
            self._quota.release(size)
            self._refused = SPILL_FAILED
            return False
        self._refused = None
        with self._lock:
            self._files[file] = size
        if not self._replace_run(chosen, mapped):
            with self._lock:
                self._files.pop(file, None)
            file.unlink(missing_ok=True)
            self._quota.release(size)
        return True


def _same_schema(left: TailBlock, right: TailBlock) -> bool:
    return left.batch.schema is right.batch.schema or bool(left.batch.schema.equals(right.batch.schema))
