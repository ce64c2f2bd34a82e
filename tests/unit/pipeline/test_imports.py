# SPDX-License-Identifier: Apache-2.0
"""What Python workers import before they work: each of the three or four processes of a query's start pays for it."""

from __future__ import annotations

import subprocess
import sys


def test_no_worker_starts_with_pandas_or_a_client_of_http() -> None:
    """A second on a busy machine. `pa.array` and `from_pylist` of Python objects import pandas where they are called;
    HTTP is for schema registries, and for keys that are made anew."""
    asked = "import sys, cremant.pipeline.source; print(*sys.modules.keys() & {'pandas', 'httpx'})"
    done = subprocess.run([sys.executable, "-c", asked], timeout=120, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
