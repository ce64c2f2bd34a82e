# SPDX-License-Identifier: Apache-2.0
"""What Python workers import before they work: each of the three or four processes of a query's start pays for it."""

from __future__ import annotations

import subprocess
import sys


def test_no_worker_starts_with_pandas() -> None:
    """A second on a busy machine. `pa.array` and `from_pylist` of Python objects import it where they are called."""
    asked = "import sys, cremant.pipeline.source; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], timeout=120, check=False).returncode == 0
