# SPDX-License-Identifier: Apache-2.0
"""Sketches that take rows as they are scanned, in memory that does not grow: for queries without groups.

DataFusion calls an accumulator once per batch and group. Over few groups that is cheap, over many it would be a call of
Python per row; with GROUP BY sketches are therefore made of lists (agg_quantiles.py, agg_theta.py).

The last argument is the size of the sketch, as an array; an accumulator that saw no rows has no sketch (NULL).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datafusion import Accumulator, AggregateUDF, udaf

from cremant.exec.agg_theta import compact, parse, smallest
from cremant.exec.functions import Factory

#: Hashes that wait before the smallest are chosen.
_HASHES_WAITING_MAX = 64 * 1024


class _Quantiles(Accumulator):  # type: ignore[misc]
    """`make` and `read` of one kind of sketch."""

    make: Callable[[int], Any]
    read: Callable[[bytes], Any]

    def __init__(self) -> None:
        self._sketch: Any = None

    def update(self, *values: pa.Array) -> None:
        numbers, size = values
        numbers = numbers.drop_null()
        if not len(numbers):
            return
        if self._sketch is None:
            self._sketch = type(self).make(int(size[0].as_py()))
        # The library wants to own what it reads.
        self._sketch.update(np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float64))

    def merge(self, states: list[pa.Array]) -> None:
        for state in _present(states):
            other = type(self).read(state)
            if self._sketch is None:
                self._sketch = other
            else:
                self._sketch.merge(other)

    def state(self) -> list[pa.Scalar]:
        return [self.evaluate()]

    def evaluate(self) -> pa.Scalar:
        return pa.scalar(None if self._sketch is None else bytes(self._sketch.serialize()), pa.binary())


class _TDigest(_Quantiles):
    make = staticmethod(datasketches.tdigest_double)
    read = staticmethod(datasketches.tdigest_double.deserialize)


class _Kll(_Quantiles):
    make = staticmethod(datasketches.kll_doubles_sketch)
    read = staticmethod(datasketches.kll_doubles_sketch.deserialize)


class _Theta(Accumulator):  # type: ignore[misc]
    """The k smallest hashes of those that came."""

    def __init__(self) -> None:
        self._k = 0
        self._parts: list[npt.NDArray[np.int64]] = []
        self._waiting = 0
        self._theta = _THETA_ALL

    def update(self, *values: pa.Array) -> None:
        hashes, size = values
        hashes = hashes.drop_null()
        if len(hashes):
            self._take(hashes.to_numpy(zero_copy_only=False), int(size[0].as_py()))

    def merge(self, states: list[pa.Array]) -> None:
        for state in _present(states):
            k = int.from_bytes(state[:4], "little")
            hashes, theta = parse(state[4:])
            self._theta = min(self._theta, theta)
            self._take(hashes, k)

    def _take(self, hashes: npt.NDArray[np.int64], k: int) -> None:
        self._k = k
        self._parts.append(hashes[hashes < self._theta])
        self._waiting += len(self._parts[-1])
        if self._waiting > max(_HASHES_WAITING_MAX, 4 * k):
            self._choose()

    def _choose(self) -> None:
        chosen, theta = smallest(np.concatenate(self._parts), self._k)
        self._theta = min(self._theta, theta)
        self._parts, self._waiting = [chosen[chosen < self._theta]], len(chosen)

    def _sketch(self) -> bytes | None:
        if not self._parts:
            return None
        self._choose()
        return compact(self._parts[0], self._theta)

    def state(self) -> list[pa.Scalar]:
        sketch = self._sketch()
        return [pa.scalar(None if sketch is None else self._k.to_bytes(4, "little") + sketch, pa.binary())]

    def evaluate(self) -> pa.Scalar:
        return pa.scalar(self._sketch(), pa.binary())


_THETA_ALL = (1 << 63) - 1


def _present(states: list[pa.Array]) -> list[bytes]:
    return [state for state in states[0].to_pylist() if state is not None]


def _row(name: str, accumulator: type[Accumulator], takes: pa.DataType) -> tuple[str, Factory]:
    def make() -> AggregateUDF:
        return udaf(accumulator, [takes, pa.int64()], pa.binary(), [pa.binary()], "immutable", name)

    return name, make


FUNCTIONS: dict[str, Factory] = dict(
    [
        _row("agg_tdigest_stream", _TDigest, pa.float64()),
        _row("agg_kll_stream", _Kll, pa.float64()),
        _row("agg_theta_stream", _Theta, pa.int64()),
    ]
)
