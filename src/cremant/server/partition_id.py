# SPDX-License-Identifier: Apache-2.0
"""Which partition of which table, and what it is doing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cremant.model.names import epoch_topic


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
