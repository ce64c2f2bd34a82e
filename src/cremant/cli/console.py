# SPDX-License-Identifier: Apache-2.0
"""What commands write: answers to stdout, everything else (progress, notes, errors) to stderr.

An error is one red line, then what to do about it; never a stack trace.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cremant.model.errors import CremantError, UserError

#: Tables in a file or a pipe are not folded to the width of a terminal that is not there.
_WIDTH_OF_PIPES = 400
#: Answers. Highlighting off: numbers in results are data, not decoration.
out = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_PIPES)
#: Progress, notes, errors.
notes = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line for a person; may contain Rich markup."""
    try:
        notes.print(text, soft_wrap=True)
    except OSError:
        # Whoever read our notes has gone (`2>&1 | head`). What we were doing goes on, and so does stopping cleanly.
        notes.file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process


def warn(text: str) -> None:
    say(f"[yellow]{escape(text)}[/]")


def fail(error: CremantError) -> None:
    say(f"[bold red]error:[/] [red]{escape(error.message)}[/]")
    if error.hint:
        say(f"  [dim]hint:[/] {escape(error.hint)}")


def exit_status(error: CremantError) -> int:
    """2 if the request was wrong, 1 if the world was."""
    return 2 if isinstance(error, UserError) else 1


def write_json(value: Any) -> None:
    """One line of JSON on stdout, for programs; flushed at once, because they wait for it."""
    sys.stdout.write(json.dumps(value, separators=(", ", ": ")) + "\n")
    sys.stdout.flush()
