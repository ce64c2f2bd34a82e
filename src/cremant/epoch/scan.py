# SPDX-License-Identifier: Apache-2.0
"""Reading a partition up to one's own Fence, as a fold: what the start protocol needs to know of it (step 4).

The scan believes exactly what a reader believes (E-1): after a Fence, marks of lower generations do not exist. Epoch
numbers are taken from every record, believed or not: the next base must exceed them all (E-5).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from cremant.epoch.format import BlockHead, Head, UpdateHead
from cremant.epoch.records import EpochMark, Fence, Reset
from cremant.model.errors import InvariantViolation
from cremant.model.limits import EPOCHS_REMEMBERED
from cremant.model.offsets import Position

#: The last thing that was decided in a partition: an epoch closed, or taken back.
Decision = EpochMark | Reset | None


class ScanRequest(Protocol):
    """`start` is a stored position, `generation` one's own; 0 = read until whatever is the end of the log now."""

    @property
    def start(self) -> Position: ...

    @property
    def generation(self) -> int: ...


class PartitionScan:
    """`from_offset`: read from here on (a position's mark is included). Feed heads in log order with `add` until
    `done`."""

    def __init__(self, request: ScanRequest) -> None:
        start = request.start
        self._start_epoch = start.epoch
        self.from_offset = max(0, start.log_offset - 1)
        #: Highest epoch of any record, closed or not, believed or not.
        self.epoch_max = start.epoch
        #: Generation in force; once `done`, one's own, or a higher one that fences us.
        self.generation_in_force = start.generation
        #: Log offset of one's own Fence, None before it.
        self.fence_offset: int | None = None
        self.decision: Decision = None
        self._own = request.generation
        self._marks: OrderedDict[int, EpochMark] = OrderedDict()

    @property
    def done(self) -> bool:
        return self.fence_offset is not None

    @property
    def fenced(self) -> bool:
        """A higher generation was here first."""
        return self.generation_in_force > self._own > 0

    @property
    def closed_epoch(self) -> int:
        return self._start_epoch if self.decision is None else self.decision.epoch

    @property
    def last_mark(self) -> EpochMark | None:
        """The mark of the committed epoch: of the decision, a Reset taken into account; None before the first epoch.

        Raises InvariantViolation (E-4) where a Reset names an epoch whose mark was not read."""
        match self.decision:
            case None if self._start_epoch == 0:
                return None
            case None:
                return self.mark_of(self._start_epoch)
            case EpochMark():
                return self.decision
            case Reset(epoch=0):
                return None
            case Reset(epoch=epoch):
                return self.mark_of(epoch)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Closed epochs whose marks were read and are remembered, ascending."""
        return tuple(self._marks)

    def mark_of(self, epoch: int) -> EpochMark:
        """Raises InvariantViolation (E-4) for an epoch whose mark was not read or is forgotten."""
        mark = self._marks.get(epoch)
        if mark is None:
            raise InvariantViolation(
                "E-4",
                f"the mark of epoch {epoch} is not among the last {len(self._marks)} that were read",
                hint="go back no further than the start of the oldest consuming segment",
            )
        return mark

    def add(self, log_offset: int, head: Head) -> None:
        if self.done:
            return
        if isinstance(head, Fence):
            self.generation_in_force = max(self.generation_in_force, head.generation)
            if head.generation == self._own:
                self.fence_offset = log_offset
            return
        if isinstance(head, BlockHead | UpdateHead | EpochMark):
            self.epoch_max = max(self.epoch_max, head.epoch)
        if head.generation < self.generation_in_force:
            return
        if isinstance(head, EpochMark) and not self._late(head):
            self._marks[head.epoch] = self.decision = head
            if len(self._marks) > EPOCHS_REMEMBERED:
                self._marks.popitem(last=False)
        elif isinstance(head, Reset):
            self.decision = head
            for epoch in [epoch for epoch in self._marks if epoch > head.epoch]:
                del self._marks[epoch]

    def _late(self, mark: EpochMark) -> bool:
        """Of an epoch that is closed already (rolled forward twice)."""
        return self.decision is not None and mark.epoch <= self.decision.epoch
