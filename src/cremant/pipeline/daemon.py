# SPDX-License-Identifier: Apache-2.0
"""The process that Spark's Python workers are forked from, with the imports every worker needs already done.

Spark's own daemon imports after the fork, so each new worker pays a second for pyarrow and this package; here it is
paid once. Forking after the import is safe as long as nothing has started a thread: importing pyarrow does not.
"""

from __future__ import annotations

import gc

import pyarrow
import pyarrow.compute
import pyarrow.json  # noqa: F401
from pyspark import daemon
from pyspark import worker as _worker  # noqa: F401

import cremant.pipeline.source  # noqa: F401

if __name__ == "__main__":
    # Workers collect garbage after every task: what was imported need not be looked at each time.
    gc.collect()
    gc.freeze()
    daemon.manager()
