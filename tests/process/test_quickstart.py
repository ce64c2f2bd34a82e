# SPDX-License-Identifier: Apache-2.0
"""`cremant quickstart` as a new user sees it: a first answer, and the same data the next time."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.cluster import command

FREE_PORTS = [f"--{role}-port=0" for role in ("controller", "broker", "server", "pipeline")]


def quickstart(data_dir: Path) -> tuple[float, int, str]:
    """Seconds to the first answer, the documents it knew, and everything printed."""
    done = subprocess.run(
        command("quickstart", "--data-dir", str(data_dir), *FREE_PORTS, "--stop-after-s", "2"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds = re.search(r"First answer after ([\d.]+) s", done.stderr)
    documents = re.search(r"of ([\d,]+) documents", done.stderr)
    assert seconds, done.stderr
    assert documents, done.stderr
    return float(seconds.group(1)), int(documents.group(1).replace(",", "")), done.stdout + done.stderr


def test_a_first_answer_comes_and_a_second_start_finds_the_data(tmp_path: Path, phase: Callable[[str], None]) -> None:
    seconds, documents, printed = quickstart(tmp_path / "data")
    phase(f"first answer after {seconds} s over {documents} documents")
    assert documents > 0
    assert "country" in printed
    assert "revenue" in printed
    assert "cremant sql" in printed
    assert "Traceback" not in printed
    seconds, more_documents, printed = quickstart(tmp_path / "data")
    phase(f"second start: first answer after {seconds} s over {more_documents} documents")
    assert "from an earlier run" in printed
    assert more_documents >= documents
