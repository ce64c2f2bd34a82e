# SPDX-License-Identifier: Apache-2.0
"""`cremant quickstart`: a cluster, a sample table, a live feed of a shop, a first answer, and where to go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from cremant.cli.client import Client
from cremant.cli.console import out, say
from cremant.cli.plan import FEED_RANK, Ports
from cremant.cli.shop import SCHEMA, table_config
from cremant.cli.sql import print_table
from cremant.cli.supervisor import RoleSpec
from cremant.cli.up import Interrupted, RunningCluster, progress, running_cluster
from cremant.log.embedded import EmbeddedLog
from cremant.model.errors import DeadlineExceeded, PeerError
from cremant.model.settings import Settings

TOPIC = "shop"
PARTITIONS = 4
HISTORY_MS = 120_000
#: From healthy roles to rows that SQL sees: Spark's first micro-batches are its slowest.
_FIRST_ROWS_DEADLINE_MS = 120_000
#: How often the first answer is asked for: one question in several ticks of the supervisor.
_ASK_EVERY_S = 0.25

FIRST_QUERY = (
    "SELECT country, COUNT(*) AS events, SUM(quantity) AS items, SUM(amount) AS revenue "
    "FROM shop GROUP BY country ORDER BY COUNT(*) DESC LIMIT 5"
)


def quickstart(
    settings: Settings,
    *,
    servers: int,
    ports: Ports,
    rate_per_s: float,
    seed: int,
    malformed: bool,
    stop_after_s: float,
) -> None:
    """`stop_after_s`: 0 = until Ctrl-C."""
    started = time.monotonic()
    say("[bold]Cremant quickstart[/]: controller, broker, servers, pipeline and a live feed on this machine")
    with running_cluster(settings, servers=servers, ports=ports, insecure=False) as cluster:
        # Spark takes longest to start: what does not need it goes on meanwhile.
        cluster.watch.wait(cluster.roles - {"pipeline"})
        with Client(cluster.controller, cluster.broker) as client:
            fresh = _make_table(cluster, client, min(2, servers))
            _start_feed(cluster, rate_per_s=rate_per_s, seed=seed, malformed=malformed, fresh=fresh)
            response = _first_answer(cluster, client)
            seconds = time.monotonic() - started
        say(f"\n[bold green]First answer after {seconds:.1f} s.[/]  {escape(FIRST_QUERY)}")
        print_table(response)
        _where_to_go_on(cluster, settings)
        until = time.monotonic() + stop_after_s
        cluster.supervisor.run_until(lambda: stop_after_s > 0 and time.monotonic() >= until)


def _make_table(cluster: RunningCluster, client: Client, replication: int) -> bool:
    """Topic, schema and table unless an earlier run made them. True if the topic is new."""
    log = EmbeddedLog(cluster.plan.cluster.log_dir)
    try:
        fresh = TOPIC not in [topic.name for topic in log.topics()]
        if fresh:
            log.create_topic(TOPIC, PARTITIONS)
    finally:
        log.close()
    if "shop" in client.table_names():
        say("  [green]✓[/] table [bold]shop[/] is there from an earlier run, with its rows")
        return fresh
    client.add_schema(SCHEMA)
    client.add_table(table_config(TOPIC, replication))
    say(f"  [green]✓[/] topic [bold]{TOPIC}[/] ({PARTITIONS} partitions) and table [bold]shop[/] created")
    return fresh


def _start_feed(cluster: RunningCluster, *, rate_per_s: float, seed: int, malformed: bool, fresh: bool) -> None:
    arguments = [
        "feed", TOPIC,
        "--log-dir", cluster.plan.cluster.log_dir,
        "--rate", str(rate_per_s),
        "--seed", str(seed),
        "--history-ms", str(HISTORY_MS if fresh else 0),
    ]  # fmt: skip
    if malformed:
        arguments.append("--malformed")
    cluster.supervisor.add(RoleSpec("feed", tuple(arguments), "", FEED_RANK))
    say(f"  [green]✓[/] live feed: about {rate_per_s:.0f} events/s of an online shop, seed {seed}")


def _first_answer(cluster: RunningCluster, client: Client) -> dict[str, Any]:
    response: dict[str, Any] = {}
    last_problem = ""
    next_ask = 0.0

    def answered() -> bool:
        nonlocal response, last_problem, next_ask
        if time.monotonic() < next_ask:
            return False
        next_ask = time.monotonic() + _ASK_EVERY_S
        if not cluster.watch.look(cluster.roles):
            return False
        try:
            candidate = client.query(FIRST_QUERY)
        except PeerError as error:
            last_problem = error.message
            return False
        if candidate.get("exceptions"):
            last_problem = str(candidate["exceptions"][0]["message"])
            return False
        if not candidate["resultTable"]["rows"]:
            last_problem = "no rows yet"
            return False
        response = candidate
        return True

    with progress("waiting for Spark, and for the first rows to come through it …"):
        if cluster.supervisor.run_until(answered, deadline_ms=_FIRST_ROWS_DEADLINE_MS):
            return response
    if cluster.supervisor.interrupts:
        raise Interrupted
    raise DeadlineExceeded(
        f"no rows in answers after {_FIRST_ROWS_DEADLINE_MS // 1000} s: {last_problem}",
        hint=f"`cremant status`, and the logs in {cluster.data_dir}/<role>/log.jsonl",
    )


def _where_to_go_on(cluster: RunningCluster, settings: Settings) -> None:
    default = Path(settings.data_dir) == Path("cremant-data") or settings.source("data_dir") == "default"
    option = "" if default else f" --data-dir {settings.data_dir}"
    say("\n[bold]It is live. In another terminal[/] (`cremant sql` alone is a prompt):")
    for line in (
        f'cremant sql{option} "SELECT event, COUNT(*) FROM shop GROUP BY event"',
        f"cremant sql{option} \"SELECT product, SUM(amount) AS revenue FROM shop WHERE event = 'purchase' "
        'GROUP BY product ORDER BY SUM(amount) DESC LIMIT 5"',
        f"cremant sql{option} \"SELECT DATETRUNC('minute', ts) AS minute, COUNT(*) AS events FROM shop "
        "GROUP BY DATETRUNC('minute', ts) ORDER BY minute DESC LIMIT 5\"",
        f"cremant sql{option}",
        f"cremant status{option}",
        f"curl -s {cluster.broker}/query/sql -H 'Content-Type: application/json' "
        '-d \'{"sql": "SELECT COUNT(*) FROM shop"}\'',
    ):
        out.print(f"  {escape(line)}", soft_wrap=True)
    say("\n[bold]From Python:[/]  from pinotdb import connect")
    host, port = cluster.broker.removeprefix("http://").rsplit(":", 1)
    say(f"              connect(host='{host}', port={port}, path='/query/sql', scheme='http')")
    say(f"\nAny role may be killed: `kill -9` one of the processes in {cluster.data_dir}/cluster.json and ask again.")
    say("Ctrl-C stops everything; the next start finds its data again.")
