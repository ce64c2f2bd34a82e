# SPDX-License-Identifier: Apache-2.0
"""What commands write: answers to stdout, everything else (progress, notes, errors) to stderr.

An error is one red line, then what to do about it; never a stack trace.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from cremant.model.errors import CremantError

#: Answers. Highlighting off: numbers in results are data, not decoration.
out = Console(highlight=False)
#: Progress, notes, errors.
notes = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line for a person; may contain Rich markup."""
    notes.print(text, soft_wrap=True)


def warn(text: str) -> None:
    notes.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)


def fail(error: CremantError) -> None:
    notes.print(f"[bold red]error:[/] [red]{escape(error.message)}[/]", soft_wrap=True)
    if error.hint:
        notes.print(f"  [dim]hint:[/] {escape(error.hint)}", soft_wrap=True)


def write_json(value: Any) -> None:
    """One line of JSON on stdout, for programs; flushed at once, because they wait for it."""
    sys.stdout.write(json.dumps(value, separators=(", ", ": ")) + "\n")
    sys.stdout.flush()
