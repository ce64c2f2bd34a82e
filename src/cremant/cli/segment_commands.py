# SPDX-License-Identifier: Apache-2.0
"""The commands of `cremant segment`."""

from __future__ import annotations

from typing import Annotated

import typer

from cremant.cli.find import find_cluster
from cremant.cli.options import AsJson, ControllerUrl, DataDir

segments = typer.Typer(help="Look at sealed and open segments.", no_args_is_help=True)


@segments.callback()
def _group() -> None:
    """Keeps the name of the command: a group of one would lose it."""


@segments.command("story")
def story(
    segment: Annotated[str, typer.Argument(metavar="SEGMENT", help="Name of the segment")],
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Tell what happened to a segment: cuts, builds, uploads, fetches, repairs, on every role, in order."""
    from cremant.cli.segment import story as run

    run(find_cluster(controller, data_dir), segment, as_json=as_json)
