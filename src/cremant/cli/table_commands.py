# SPDX-License-Identifier: Apache-2.0
"""The commands of `cremant table`: names, options and help."""

from __future__ import annotations

from typing import Annotated

import typer

from cremant.cli.find import find_cluster
from cremant.cli.options import AsJson, ControllerUrl, DataDir

tables = typer.Typer(help="Create, list, show, drop, pause and resume tables; see their copies.", no_args_is_help=True)
TableName = Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table")]


@tables.command("create")
def create(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…", help="Schema and table config as JSON: two files, or one with both; - is stdin"
        ),
    ],
    check_only: Annotated[bool, typer.Option("--check", help="Only say whether it would be accepted")] = False,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create a table, its schema, or both."""
    from cremant.cli.table import create as run

    run(find_cluster(controller, data_dir), files, check_only=check_only, as_json=as_json)


@tables.command("list")
def list_(data_dir: DataDir = None, controller: ControllerUrl = None, as_json: AsJson = False) -> None:
    """List the tables with their rows, segments and lag."""
    from cremant.cli.table import list_tables

    list_tables(find_cluster(controller, data_dir), as_json=as_json)


@tables.command("show")
def show(
    table: TableName,
    all_segments: Annotated[bool, typer.Option("--all-segments", help="List every sealed segment")] = False,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show a table: columns, partitions and replicas, segments, lag, and its config with secrets hidden."""
    from cremant.cli.table import show as run

    run(find_cluster(controller, data_dir), table, all_segments=all_segments, as_json=as_json)


@tables.command("copies")
def copies(
    table: TableName,
    missing: Annotated[bool, typer.Option("--missing", help="Only segments that miss a copy or their upload")] = False,
    all_segments: Annotated[bool, typer.Option("--all-segments", help="List every segment")] = False,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show where the bytes of sealed segments are: servers and since when, the deep store, and what is safe."""
    from cremant.cli.copies import copies as run

    cluster = find_cluster(controller, data_dir)
    run(cluster, table, missing=missing, all_segments=all_segments, as_json=as_json)


@tables.command("drop")
def drop(
    table: TableName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    keep_schema: Annotated[bool, typer.Option("--keep-schema", help="Drop the table only")] = False,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Drop a table with its rows, and its schema. The topic it read stays."""
    from cremant.cli.table import drop as run

    run(find_cluster(controller, data_dir), table, yes=yes, keep_schema=keep_schema, as_json=as_json)


@tables.command("pause")
def pause(
    table: TableName,
    comment: Annotated[str, typer.Option("--comment", help="Why, for whoever looks later")] = "",
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop taking rows; queries go on."""
    from cremant.cli.table import pause as run

    run(find_cluster(controller, data_dir), table, comment=comment, as_json=as_json)


@tables.command("resume")
def resume(
    table: TableName, data_dir: DataDir = None, controller: ControllerUrl = None, as_json: AsJson = False
) -> None:
    """Go on taking rows where it stopped."""
    from cremant.cli.table import resume as run

    run(find_cluster(controller, data_dir), table, as_json=as_json)


@tables.command("rewind")
def rewind(
    table: TableName,
    to_epoch: Annotated[int, typer.Option("--to-epoch", help="A closed epoch; everything after it is read again")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would give up")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take a table back to a closed epoch: later rows, updates and segments are dropped and consumed again."""
    from cremant.cli.table_epochs import rewind as run

    run(find_cluster(controller, data_dir), table, to_epoch, dry_run=dry_run, yes=yes, as_json=as_json)


@tables.command("rebuild-keys")
def rebuild_keys(
    table: TableName,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait for the end; 0 = do not wait")] = 600.0,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make the key coordinator's state anew from the rows in force; expired keys go. Queries go on meanwhile."""
    from cremant.cli.table_epochs import rebuild_keys as run

    run(find_cluster(controller, data_dir), table, wait_s=wait, as_json=as_json)
