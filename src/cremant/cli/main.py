# SPDX-License-Identifier: Apache-2.0
"""The command `cremant`: names, options and help of every command. What a command does is in the module it calls,
imported when it runs, so that `cremant --help` costs no more than it must."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cremant import __version__
from cremant.cli.console import exit_status, fail
from cremant.cli.find import find_cluster, usual_cluster
from cremant.cli.options import (
    AsJson,
    ConfigFile,
    ControllerUrl,
    DataDir,
    EpochKafka,
    Format,
    Insecure,
    SetValues,
    kafka_flags,
    load_settings,
    set_values,
)  # fmt: skip
from cremant.cli.segment_commands import segments
from cremant.cli.start import RoleName
from cremant.cli.table_commands import tables
from cremant.cli.topic_commands import KafkaProperties, produce, topics
from cremant.model.errors import CremantError

app = typer.Typer(
    name="cremant",
    help="A realtime OLAP store: events stream in, SQL answers include them a moment later.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Servers = Annotated[int, typer.Option("--servers", help="How many servers to run")]
ControllerPort = Annotated[int, typer.Option("--controller-port", help="Port of the controller; 0 = any free port")]
BrokerPort = Annotated[int, typer.Option("--broker-port", help="Port of the broker; 0 = any free port")]
ServerPort = Annotated[
    int, typer.Option("--server-port", help="Port of the first server, the next count down; 0 = any free ports")
]
PipelinePort = Annotated[int, typer.Option("--pipeline-port", help="Port of the pipeline; 0 = any free port")]
Host = Annotated[
    str | None, typer.Option("--host", help="Address to listen on [default: 127.0.0.1]", show_default=False)
]
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", help="Directory of the embedded log [default: DATA_DIR/log]", show_default=False),
]
StoreUri = Annotated[
    str | None,
    typer.Option(
        "--store-uri", help="Deep store: a path or s3://bucket/prefix [default: DATA_DIR/store]", show_default=False
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cremant {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces of errors", envvar="CREMANT_DEBUG")] = False,
) -> None:
    if debug:
        os.environ["CREMANT_DEBUG"] = "1"


@app.command()
def up(
    data_dir: DataDir = None,
    servers: Servers = 2,
    host: Host = None,
    controller_port: ControllerPort = 9000,
    broker_port: BrokerPort = 8099,
    server_port: ServerPort = 8098,
    pipeline_port: PipelinePort = 8100,
    log_dir: LogDir = None,
    store_uri: StoreUri = None,
    kafka: EpochKafka = None,
    kafka_properties: KafkaProperties = None,
    values: SetValues = None,
    insecure: Insecure = False,
    json_ready: Annotated[
        bool, typer.Option("--json-ready", help="Write one line of JSON to stdout when everything is up")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Run an empty cluster on this machine until Ctrl-C: controller, broker, servers, pipeline."""
    from cremant.cli.plan import Ports
    from cremant.cli.up import up as run_up

    flags: dict[str, object] = {"data_dir": data_dir, "host": host, "log_dir": log_dir, "store_uri": store_uri}
    flags |= kafka_flags(kafka, kafka_properties) | set_values(values)
    ports = Ports(controller_port, broker_port, server_port, pipeline_port)
    run_up(load_settings(config, flags), servers=servers, ports=ports, insecure=insecure, json_ready=json_ready)


@app.command()
def start(
    role: Annotated[RoleName, typer.Argument(help="Which role")],
    data_dir: DataDir = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; 0 = any free port", show_default=False)
    ] = None,
    host: Host = None,
    controller: ControllerUrl = None,
    log_dir: LogDir = None,
    store_uri: StoreUri = None,
    insecure: Insecure = False,
    kafka: EpochKafka = None,
    kafka_properties: KafkaProperties = None,
    values: SetValues = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Pipeline only: stay warm and take over when the running one dies")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Run one role in this process: controller, broker, server or pipeline."""
    from cremant.cli.start import start as run_start

    flags: dict[str, object] = {
        "data_dir": data_dir,
        "host": host,
        "log_dir": log_dir,
        "store_uri": store_uri,
        "controller_url": controller or os.environ.get("CREMANT_CONTROLLER"),
    }
    flags |= kafka_flags(kafka, kafka_properties) | set_values(values)
    default_ports = {"controller": 9000, "broker": 8099, "server": 8098, "pipeline": 8100}
    chosen = default_ports[role] if port is None else port
    run_start(role, load_settings(config, flags), port=chosen, insecure=insecure, standby=standby)


@app.command()
def quickstart(
    data_dir: DataDir = None,
    servers: Servers = 2,
    rate: Annotated[
        float, typer.Option("--rate", min=0.1, help="Events per second of the live feed, on average")
    ] = 300.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the live feed")] = 1,
    malformed: Annotated[
        bool, typer.Option("--malformed", help="Let the feed send a malformed record now and then")
    ] = False,
    controller_port: ControllerPort = 9000,
    broker_port: BrokerPort = 8099,
    server_port: ServerPort = 8098,
    pipeline_port: PipelinePort = 8100,
    stop_after_s: Annotated[
        float, typer.Option("--stop-after-s", help="Stop so many seconds after the first answer; 0 = run until Ctrl-C")
    ] = 0.0,
    config: ConfigFile = None,
) -> None:
    """Start here: a cluster with a sample table, live events, and a first answer."""
    from cremant.cli.plan import Ports
    from cremant.cli.quickstart import quickstart as run_quickstart

    ports = Ports(controller_port, broker_port, server_port, pipeline_port)
    run_quickstart(
        load_settings(config, {"data_dir": data_dir}),
        servers=servers,
        ports=ports,
        rate_per_s=rate,
        seed=seed,
        malformed=malformed,
        stop_after_s=stop_after_s,
    )


@app.command(hidden=True)
def feed(
    topic: str,
    log_dir: Annotated[Path, typer.Option("--log-dir")],
    rate: Annotated[float, typer.Option("--rate")] = 300.0,
    seed: Annotated[int, typer.Option("--seed")] = 1,
    history_ms: Annotated[int, typer.Option("--history-ms")] = 0,
    malformed: Annotated[bool, typer.Option("--malformed")] = False,
) -> None:
    """The quickstart's live feed, in a process of its own."""
    from cremant.cli.generator import run_generator

    run_generator(
        load_settings(None, {"log_dir": log_dir}),
        topic,
        rate_per_s=rate,
        seed=seed,
        history_ms=history_ms,
        malformed=malformed,
    )


app.add_typer(tables, name="table")
app.add_typer(topics, name="topic")
app.add_typer(segments, name="segment")
app.command("produce")(produce)


@app.command()
def sql(
    query: Annotated[
        str | None, typer.Argument(help="One SQL query; without it a prompt, or statements from a pipe")
    ] = None,
    form: Annotated[Format, typer.Option("--format", "-f", help="How to print the answer")] = Format.TABLE,
    options: Annotated[str, typer.Option("--options", help="Query options, as in 'timeoutMs=2000;trace=true'")] = "",
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Ask a query, or converse; --json is short for --format json."""
    form = Format.JSON if as_json else form
    target = find_cluster(controller, data_dir)
    if query is not None:
        from cremant.cli.sql import sql as run_sql

        run_sql(target, query, form=form, options=options)
    elif sys.stdin.isatty():
        from cremant.cli.repl import converse

        converse(target, form, options)
    else:
        from cremant.cli.repl import run_script

        run_script(target, form, options)


@app.command()
def status(data_dir: DataDir = None, controller: ControllerUrl = None, as_json: AsJson = False) -> None:
    """Show roles, tables, partitions, segments and lag."""
    from cremant.cli.status import status as run_status

    run_status(find_cluster(controller, data_dir), as_json=as_json)


@app.command()
def freshness(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table")],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again each second, until Ctrl-C")] = False,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show how fresh a table is, what holds it back, and whether it keeps its promise (exit status 3: it does not)."""
    from cremant.cli.freshness import freshness as run_freshness

    raise typer.Exit(run_freshness(find_cluster(controller, data_dir), table, watch=watch, as_json=as_json))


@app.command()
def doctor(
    kafka: EpochKafka = None,
    kafka_properties: KafkaProperties = None,
    values: SetValues = None,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Look at machine, directories, Kafka and cluster; say what is wrong and how to mend it."""
    from cremant.cli.doctor import doctor as run_doctor

    flags = {"data_dir": data_dir, **kafka_flags(kafka, kafka_properties), **set_values(values)}
    settings = load_settings(config, flags)
    try:
        target, trouble = find_cluster(controller, data_dir), None
    except CremantError as error:
        target, trouble = usual_cluster(), error
    raise typer.Exit(run_doctor(target, settings, trouble, as_json=as_json))


@app.command()
def sim(
    seed: Annotated[int, typer.Option("--seed", help="First seed")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", help="How many seeds to run, upwards from the first")] = 1,
    world: Annotated[str, typer.Option("--world", help="epochs or completion; empty: both")] = "",
    scenario: Annotated[str, typer.Option("--scenario", help="A failure case of completion by name")] = "",
    as_json: AsJson = False,
) -> None:
    """Run the simulated worlds: a seed is a whole history of crashes, orphans and faults."""
    from cremant.cli.simulate import simulate

    raise typer.Exit(simulate(seed, seeds, world, scenario, as_json=as_json))


def run() -> None:
    """Entry point. Errors meant for people are one line and a hint."""
    debug = "--debug" in sys.argv[1:2] or bool(os.environ.get("CREMANT_DEBUG"))
    try:
        app()
    except CremantError as error:
        if debug:
            raise
        fail(error)
        sys.exit(exit_status(error))
