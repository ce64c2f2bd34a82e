# SPDX-License-Identifier: Apache-2.0
"""Reading one partition of an epoch log: order, fencing, counting (rules E-1 to E-8; design: epoch-log.md, Reading).

    reader = PartitionReader(partition, start)
    for each message from start.log_offset on:  for effect in reader.step(decode(value, incarnation), log_offset): ...

The state is a function of the log alone, so all replicas take the same rows and close at the same positions.

Append tables take rows as their block arrives, first in log order wins. `next_offset` of a position is therefore the
first stream offset not yet *taken*, and can lie past the end of the closed epoch: rows of an epoch that was never
closed stay. A reader that starts at the position knows it and does not take them a second time, perhaps from a block
of another config. Upsert tables stage blocks and take those that the mark names; the rest is dropped.

    record       in force                                       otherwise
    Fence        its generation is in force from here on        lower: ignored
    Reset        back to a closed epoch it remembers            lower generation: ignored; unknown epoch: stop E-4
    RowBlock     counted for (epoch, generation), taken         lower generation, closed epoch: ignored; hole: stop E-2
    UpdateBlock  staged for (epoch, generation)                 lower generation, closed epoch: ignored
    Gap          like a block without rows                      lower generation: ignored; hole: stop E-2
    EpochMark    checked against what was counted, then closed  lower generation, closed epoch: ignored; else stop E-4
    Heartbeat    caught up, if everything below its end is here lower generation: ignored

"Lower" is lower than the generation in force; a higher one without a Fence stops the partition (E-1).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import assert_never

import msgspec
import pyarrow as pa

from cremant.epoch.coverage import BlockSet, Coverage, rows_from
from cremant.epoch.effects import (
    CaughtUp,
    Effect,
    EpochClosed,
    Fenced,
    GapTaken,
    Ignored,
    RolledBack,
    Stopped,
    TakeRows,
    TakeUpdates,
)
from cremant.epoch.records import EpochMark, Fence, Gap, Heartbeat, PartitionMark, Record, Reset, RowBlock, UpdateBlock
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.epoch.updates import UpdateSet, contradiction
from cremant.model.limits import EPOCHS_REMEMBERED, UNCLOSED_BLOCKS_MAX
from cremant.model.offsets import OffsetRange, Position


class _Closed(msgspec.Struct, frozen=True):
    """A closed epoch one can go back to: `end` is the mark's (None at a start position, which does not say)."""

    position: Position
    end: int | None


class PartitionReader:
    """`start`: a stored position, or (0, 0, 0, start_offset) for the beginning of a new partition."""

    def __init__(self, partition: int, start: Position, *, upsert: bool = False, safeguards: Safeguards = ALL) -> None:
        self.partition = partition
        #: Last closed epoch; generation in force; first stream offset not taken.
        self.epoch = start.epoch
        self.generation = start.generation if safeguards.position_generation else 0
        self.next_offset = start.next_offset
        #: Where it stopped for good, if it did.
        self.stopped: Stopped | None = None
        #: Records without effect, by cause.
        self.ignored: dict[Ignored, int] = dict.fromkeys(Ignored, 0)
        self._upsert = upsert
        self._taken_at_mark = upsert and safeguards.taken_at_mark
        self._safeguards = safeguards
        #: Closed epochs by number, oldest first, at most EPOCHS_REMEMBERED; the last one is `position`.
        self._closed: OrderedDict[int, _Closed] = OrderedDict({start.epoch: _Closed(start, None)})
        #: Blocks of epochs that are not closed, by (epoch, generation). Only generations whose epoch a mark can name.
        self._blocks: dict[tuple[int, int], BlockSet] = {}
        self._updates: dict[tuple[int, int], UpdateSet] = {}
        #: Gaps since the last close, by generation.
        self._gaps: dict[int, Coverage] = {}
        #: Content hash by (first, next, config version) of unclosed blocks, at most UNCLOSED_BLOCKS_MAX.
        self._hashes: OrderedDict[tuple[int, int, int], str] = OrderedDict()

    @property
    def position(self) -> Position:
        """The last closed position (the start, before the first mark)."""
        return self._closed[self.epoch].position

    def step(self, record: Record, log_offset: int) -> list[Effect]:
        if self.stopped is not None:
            return [self.stopped]
        if isinstance(record, Fence):
            return self._fence(record)
        if record.generation < self.generation and self._safeguards.fenced_ignored:
            return self._ignore(Ignored.LOWER_GENERATION)
        if record.generation > self.generation and self._safeguards.position_generation:
            return self._stop(
                "E-1", f"a record of generation {record.generation}, whose Fence is not in this partition"
            )
        match record:
            case RowBlock():
                return self._block(record)
            case UpdateBlock():
                return self._update(record)
            case Gap():
                return self._gap(record)
            case EpochMark():
                return self._mark(record, log_offset)
            case Heartbeat():
                return self._heartbeat(record)
            case Reset():
                return self._reset(record, log_offset)
            case _:
                assert_never(record)

    # --- one method per kind ---

    def _fence(self, fence: Fence) -> list[Effect]:
        if fence.generation <= self.generation:
            return self._ignore(Ignored.LOWER_GENERATION)
        self.generation = fence.generation
        return [Fenced(fence.generation)]

    def _block(self, block: RowBlock) -> list[Effect]:
        if block.epoch <= self.epoch:
            return self._ignore(Ignored.CLOSED_EPOCH)
        key = (block.epoch, block.generation)
        blocks = self._blocks.get(key)
        if blocks is None:
            blocks = self._first_block(key, block.config_version)
        if block.config_version != blocks.config_version:
            return self._stop(
                "E-2",
                f"epoch {block.epoch} of generation {block.generation} has blocks of config versions "
                f"{blocks.config_version} and {block.config_version}",
            )
        if (conflict := self._conflicting(block)) is not None:
            return conflict
        blocks.add(block, distinct=self._safeguards.distinct_counts, keep=self._taken_at_mark)
        if self._taken_at_mark:
            return []
        return self._take(block)

    def _first_block(self, key: tuple[int, int], config_version: int) -> BlockSet:
        """A generation writes blocks only after it has rolled the committed epoch forward in every partition: no mark
        can name a block of a lower one from here on."""
        self._forget_before(key[1])
        blocks = self._blocks[key] = BlockSet(config_version)
        return blocks

    def _forget_before(self, generation: int) -> None:
        for staged in (self._blocks, self._updates):
            for old in [old for old in staged if old[1] < generation]:
                del staged[old]

    def _update(self, block: UpdateBlock) -> list[Effect]:
        if block.epoch <= self.epoch:
            return self._ignore(Ignored.CLOSED_EPOCH)
        key = (block.epoch, block.generation)
        if key not in self._updates:
            self._forget_before(block.generation)
            self._updates[key] = UpdateSet()
        self._updates[key].add(block)
        return []

    def _conflicting(self, block: RowBlock) -> list[Effect] | None:
        key = (block.range.first, block.range.next, block.config_version)
        known = self._hashes.setdefault(key, block.content_hash)
        if known != block.content_hash:
            return self._stop(
                "E-2",
                f"two blocks of offsets [{block.range.first}, {block.range.next}) and config version "
                f"{block.config_version} differ: {known} and {block.content_hash}",
                hint="a transform or the table's pipeline function is not deterministic",
            )
        if len(self._hashes) > UNCLOSED_BLOCKS_MAX:
            self._hashes.popitem(last=False)
        return None

    def _take(self, block: RowBlock) -> list[Effect]:
        first, end = block.range.first, block.range.next
        if end <= self.next_offset:
            return self._ignore(Ignored.NOTHING_NEW)
        if first > self.next_offset:
            return self._hole(first)
        batch = block.batch if first == self.next_offset else rows_from(block.batch, self.next_offset)
        taken = TakeRows(
            batch=batch,
            range=OffsetRange(self.next_offset, end),
            epoch=block.epoch,
            config_version=block.config_version,
            max_ingestion_ms=block.max_ingestion_ms,
            timestamp_type=block.timestamp_type,
            rejected_from_ms=block.rejected_from_ms,
        )
        self.next_offset = end
        return [taken]

    def _gap(self, gap: Gap) -> list[Effect]:
        self._gaps.setdefault(gap.generation, Coverage()).add(gap.range.first, gap.range.next)
        if gap.range.next <= self.next_offset:
            return self._ignore(Ignored.NOTHING_NEW)
        if self._taken_at_mark:
            return []
        if gap.range.first > self.next_offset:
            return self._hole(gap.range.first)
        taken = GapTaken(range=OffsetRange(self.next_offset, gap.range.next), reason=gap.reason.value)
        self.next_offset = gap.range.next
        return [taken]

    def _mark(self, mark: EpochMark, log_offset: int) -> list[Effect]:
        if mark.epoch <= self.epoch:
            return self._ignore(Ignored.CLOSED_EPOCH)
        if self.partition >= mark.partition_count:
            return self._stop("E-7", f"mark of epoch {mark.epoch} has {mark.partition_count} partitions only")
        # A partition that has just come to be enters at whatever epoch the table has reached (E-7).
        if mark.previous != self.epoch and self.epoch != 0:
            return self._stop(
                "E-4", f"epoch {mark.epoch} follows epoch {mark.previous}, but the last one closed here is {self.epoch}"
            )
        line = mark.partitions[self.partition]
        blocks = self._blocks.get((mark.epoch, mark.blocks_generation)) or BlockSet(mark.config_version)
        if (refusal := self._refuse(mark, line, blocks)) is not None:
            return refusal
        updates = self._updates.get((mark.epoch, mark.blocks_generation), UpdateSet())
        taken = updates.distinct()
        counted = taken.num_rows if self._safeguards.distinct_counts else updates.written
        if (wrong := _wrong_updates(taken, counted, line.updates)) != "":
            return self._stop("E-4", f"epoch {mark.epoch} of generation {mark.blocks_generation} {wrong}")
        effects = self._take_staged(blocks, mark) if self._taken_at_mark else []
        if self._upsert and taken.num_rows:
            effects.append(TakeUpdates(epoch=mark.epoch, batch=taken))
        position = Position(
            log_offset=log_offset + 1, epoch=mark.epoch, generation=self.generation, next_offset=self.next_offset
        )
        self._close(_Closed(position, line.end))
        effects.append(EpochClosed(epoch=mark.epoch, position=position, line=line, partitions=mark.partition_count))
        if line.reached_at_ms is not None and self.next_offset >= line.stream_end:
            effects.append(CaughtUp(line.reached_at_ms))
        return effects

    def _refuse(self, mark: EpochMark, line: PartitionMark, blocks: BlockSet) -> list[Effect] | None:
        """E-2, E-3 and E-4: the blocks that the mark names are what the mark says."""
        closed = self._closed[self.epoch]
        if closed.end is not None and line.end < closed.end:
            return self._stop(
                "E-3", f"epoch {mark.epoch} ends at offset {line.end}, epoch {self.epoch} before it at {closed.end}"
            )
        if blocks.rows != line.rows:
            return self._stop(
                "E-4",
                f"epoch {mark.epoch} of generation {mark.blocks_generation} has {blocks.rows} distinct rows here, "
                f"its mark says {line.rows}",
            )
        if blocks.config_version != mark.config_version:
            return self._stop(
                "E-2",
                f"blocks of epoch {mark.epoch} are of config version {blocks.config_version}, its mark says "
                f"{mark.config_version}",
            )
        gaps = self._gaps.get(mark.blocks_generation)
        covered = blocks.coverage.joined(gaps) if gaps is not None else blocks.coverage
        first = closed.position.next_offset
        if blocks.coverage.end > line.end or not covered.covers(first, line.end):
            return self._stop(
                "E-2", f"blocks of epoch {mark.epoch} cover {covered}, its mark closes offsets [{first}, {line.end})"
            )
        return None

    def _take_staged(self, blocks: BlockSet, mark: EpochMark) -> list[Effect]:
        """Upsert tables: the rows that the mark names, and the gaps between them, in offset order."""
        effects: list[Effect] = []
        gaps = self._gaps.get(mark.blocks_generation, Coverage())
        for block in blocks.in_order():
            effects.extend(self._fill(gaps, block.range.first))
            if block.range.next > self.next_offset:
                effects.extend(self._take(block))
        effects.extend(self._fill(gaps, mark.partitions[self.partition].end))
        return effects

    def _fill(self, gaps: Coverage, end: int) -> list[Effect]:
        if self.next_offset >= end or not gaps.covers(self.next_offset, end):
            return []
        taken = GapTaken(range=OffsetRange(self.next_offset, end), reason="expired")
        self.next_offset = end
        return [taken]

    def _heartbeat(self, beat: Heartbeat) -> list[Effect]:
        complete = beat.last_closed == self.epoch or self.epoch == 0
        if complete and self.partition < len(beat.ends) and self.next_offset >= beat.ends[self.partition]:
            return [CaughtUp(beat.at_ms)]
        return []

    def _reset(self, reset: Reset, log_offset: int) -> list[Effect]:
        back = self._closed.get(reset.epoch)
        if back is None and self._enters_after(reset.epoch):
            back = self._closed[0]
        if back is None:
            return self._stop(
                "E-4",
                f"rewound to epoch {reset.epoch}, which this reader did not see closed (it is at {self.epoch})",
                hint="start again from the position of a segment that ends at or before that epoch",
            )
        position = Position(
            log_offset=log_offset + 1,
            epoch=back.position.epoch,
            generation=self.generation,
            next_offset=back.position.next_offset,
        )
        for epoch in [epoch for epoch in self._closed if epoch > position.epoch]:
            del self._closed[epoch]
        self._closed[position.epoch] = _Closed(position, back.end)
        self._forget_unclosed()
        self.epoch = position.epoch
        self.next_offset = position.next_offset
        return [RolledBack(epoch=position.epoch, next_offset=position.next_offset)]

    def _enters_after(self, epoch: int) -> bool:
        """This partition came to be after `epoch`: it goes back to its beginning (E-7)."""
        return 0 in self._closed and all(closed > epoch for closed in self._closed if closed)

    # --- shared ---

    def _close(self, closed: _Closed) -> None:
        self.epoch = closed.position.epoch
        self._closed[self.epoch] = closed
        if len(self._closed) > EPOCHS_REMEMBERED:
            self._closed.popitem(last=False)
        self._forget_unclosed()

    def _forget_unclosed(self) -> None:
        """Blocks of any other epoch were applied nowhere else and never will be (E-3)."""
        self._blocks.clear()
        self._updates.clear()
        self._gaps.clear()
        self._hashes.clear()

    def _ignore(self, cause: Ignored) -> list[Effect]:
        self.ignored[cause] += 1
        return []

    def _hole(self, first: int) -> list[Effect]:
        return self._stop("E-2", f"offsets [{self.next_offset}, {first}) are missing and no Gap says why")

    def _stop(self, rule: str, message: str, *, hint: str = "") -> list[Effect]:
        self.stopped = Stopped(
            rule=rule,
            message=f"partition {self.partition}: {message}",
            hint=hint or "an operator can take the table back to the last epoch closed in every partition",
        )
        return [self.stopped]


def _wrong_updates(taken: pa.RecordBatch, counted: int, expected: int) -> str:
    if counted != expected:
        return f"has {counted} distinct updates here, its mark says {expected}"
    return contradiction(taken)


__all__ = [
    "CaughtUp", "Effect", "EpochClosed", "Fenced", "GapTaken", "Ignored", "PartitionReader", "RolledBack", "Stopped",
    "TakeRows", "TakeUpdates",
]  # fmt: skip
