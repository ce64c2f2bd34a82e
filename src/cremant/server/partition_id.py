# SPDX-License-Identifier: Apache-2.0
"""Which partition of which table, what it is doing, and what may be wrong with its log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cremant.log.api import Log
from cremant.model.errors import InvariantViolation, NotFound
from cremant.model.names import epoch_topic

#: No offset of a stream: the tail of a partition that keeps no rows begins there.
NO_ROWS = 2**62


class PartitionState(StrEnum):
    WAITING = "waiting"
    CATCHING_UP = "catchingUp"
    CONSUMING = "consuming"
    RETRYING = "retrying"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PartitionId:
    table: str
    incarnation: str
    partition: int

    @property
    def topic(self) -> str:
        return epoch_topic(self.table, self.incarnation)

    def __str__(self) -> str:
        return f"{self.table}.{self.incarnation}/{self.partition}"


def check_log(log: Log, own: PartitionId) -> None:
    """Raises NotFound. The controller makes the epoch log before the table: without one, this is another log or a
    dropped table."""
    topic, partition = own.topic, own.partition
    try:
        known = partition < log.topic(topic).partitions
    except NotFound:
        known = False
    if not known:
        raise NotFound(f"epoch log {topic} partition {partition} does not exist", hint="is log_dir the same here?")


def applied_in_part(own: PartitionId, log_offset: int, error: Exception) -> InvariantViolation:
    """Half an epoch is in: the reader of the log would not say the rest again."""
    return InvariantViolation(
        "E-4", f"partition {own}: the record at log offset {log_offset} was applied in part: {error}",
        hint="reset the open segment: the partition is read again",
    )  # fmt: skip
