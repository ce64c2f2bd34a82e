# SPDX-License-Identifier: Apache-2.0
"""Which rows a delete column marks, whatever its type."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cremant.segment.versions import deleted_rows


@pytest.mark.parametrize(
    ("values", "kind", "deleted"),
    [
        ([True, False, True], pa.bool_(), [True, False, True]),
        (["true", "TRUE", "1", "null", "", "yes", "0"], pa.string(), [True, True, True, False, False, False, False]),
        (["True", "no"], pa.string_view(), [True, False]),
        ([1, 0, 2, -1, -(2**31)], pa.int32(), [True, False, False, False, False]),
        ([1, 2**62], pa.int64(), [True, False]),
        ([1.0, 1.5, 0.9, float("nan"), float("-inf")], pa.float32(), [True, True, False, False, False]),
        ([1.9, 2.0], pa.float64(), [True, False]),
    ],
)
def test_deleted_is_what_pinot_takes_for_true(values: list[Any], kind: pa.DataType, deleted: list[bool]) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], names=["gone"])
    flags = deleted_rows(batch, "gone")
    assert flags is not None
    assert flags.tolist() == deleted


def test_no_column_and_no_deleted_row_are_nothing() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["no", "null"])], names=["gone"])
    assert deleted_rows(batch, "gone") is None
    assert deleted_rows(batch, None) is None
    assert deleted_rows(batch, "other") is None
