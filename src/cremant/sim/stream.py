# SPDX-License-Identifier: Apache-2.0
"""The stream of the simulated world, and the rows that its messages become: a function of partition, offset and config
version alone (rule E-2)."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np
import pyarrow as pa

_SCHEMA = pa.schema(
    [("$offset", pa.int64()), ("$subRow", pa.int32()), ("$ingestionTime", pa.int64()), ("value", pa.int64())]
)


class StreamPartition:
    """Messages of offsets [earliest, end). `start`: where the table begins to read."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.earliest = start
        self.end = start
        #: Ends and the times they were reached, ascending.
        self._ends = [start]
        self._times = [0]

    def produce(self, count: int, now_ms: int) -> None:
        self.end += count
        self._ends.append(self.end)
        self._times.append(now_ms)

    def end_at(self, at_ms: int) -> int:
        """Everything produced before `at_ms` is below this offset."""
        return self._ends[max(0, bisect_right(self._times, at_ms - 1) - 1)]


@lru_cache(maxsize=4096)
def rows(partition: int, first: int, end: int, config: int) -> pa.RecordBatch:
    """Some messages become no row (rejected, or filtered by a filter that a config change moves), some become two."""
    offsets = np.arange(first, end, dtype=np.int64)
    counts = np.ones(len(offsets), np.int64)
    counts[offsets % 7 == 3] = 2
    counts[(offsets * 31 + config * 17 + partition) % 5 == 0] = 0
    counts[offsets % 11 == 5] = 0
    repeated = np.repeat(offsets, counts)
    sub = np.zeros(len(repeated), np.int32)
    sub[1:][repeated[1:] == repeated[:-1]] = 1
    values = (repeated * 2_654_435_761 + partition * 97 + config * 1_000_003 + sub) % 1_000_000_007
    arrays = [pa.array(repeated), pa.array(sub), pa.array(repeated + 1_700_000_000_000), pa.array(values)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
