# SPDX-License-Identifier: Apache-2.0
"""How a server's process ends while queries that nobody waits for are still inside our functions."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import contextlib, threading, time
import pyarrow as pa
import cremant.server.main
from cremant.cli.start import RoleName, start
from cremant.exec.engine import Engine
from cremant.exec.stop import Stop
from cremant.model.errors import QueryError
from cremant.model.settings import Settings
from cremant.segment.scan import Piece

schema = pa.schema([pa.field("s", pa.string(), nullable=False)])
batch = pa.RecordBatch.from_arrays([pa.array([f'{{"a": {n}}}' for n in range(100_000)])], schema=schema)
pieces = [Piece("p", 0, "s", (batch,) * 20, 2_000_000, None, True)]

def query(engine, stop):
    with contextlib.suppress(QueryError):
        sql = "SELECT count(DISTINCT fn_json_format(s)) FROM t"
        engine.run(sql, pieces, ["s"], schema, deadline_s=stop.deadline_s, stop=stop)

def run_server(settings, *, port, insecure):
    engine, stop = Engine(threads=2, memory_bytes=1 << 28), Stop(time.monotonic() + 60)
    for _ in range(4):
        threading.Thread(target=query, args=(engine, stop), daemon=True).start()
    time.sleep(1)
    stop.cancel()
    print("stopping")

cremant.server.main.run_server = run_server
start(RoleName.SERVER, Settings(), port=0, insecure=False)
"""


def test_a_server_ends_with_status_0_while_cancelled_queries_are_inside_functions() -> None:
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopping\n", "")
