# SPDX-License-Identifier: Apache-2.0
"""The commands of `cremant topic`, and `cremant produce`: names, options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cremant.cli.find import find_cluster
from cremant.cli.options import AsJson, ControllerUrl, DataDir

topics = typer.Typer(help="Create, list and delete topics of the embedded log, or of a Kafka.", no_args_is_help=True)
KafkaBrokers = Annotated[
    str | None,
    typer.Option("--kafka", metavar="HOST:PORT,…", help="Brokers of a Kafka, instead of the embedded log",
                 show_default=False),
]  # fmt: skip
KafkaProperties = Annotated[
    Path | None,
    typer.Option("--properties", metavar="FILE", help="Properties (security.protocol, sasl.*, ssl.*) for --kafka",
                 show_default=False),
]  # fmt: skip


@topics.command("create")
def create(
    topic: str,
    partitions: Annotated[int, typer.Option("--partitions", "-p", help="How many partitions")] = 1,
    kafka: KafkaBrokers = None,
    properties: KafkaProperties = None,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Create a topic."""
    from cremant.cli.streams import kafka_of
    from cremant.cli.topic import create_topic

    named = kafka_of(kafka, properties)
    create_topic(find_cluster(controller, data_dir), topic, partitions, kafka=named, as_json=as_json)


@topics.command("list")
def list_(
    kafka: KafkaBrokers = None,
    properties: KafkaProperties = None,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the topics, with the messages they keep."""
    from cremant.cli.streams import kafka_of
    from cremant.cli.topic import list_topics

    list_topics(find_cluster(controller, data_dir), kafka=kafka_of(kafka, properties), as_json=as_json)


@topics.command("delete")
def delete(
    topic: str,
    kafka: KafkaBrokers = None,
    properties: KafkaProperties = None,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete a topic and its messages."""
    from cremant.cli.streams import kafka_of
    from cremant.cli.topic import delete_topic

    delete_topic(find_cluster(controller, data_dir), topic, kafka=kafka_of(kafka, properties), as_json=as_json)


def produce(
    topic: Annotated[str, typer.Argument(help="A topic; with --table, a table")],
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="A file of JSON lines, or - for stdin")],
    keyed: Annotated[
        bool, typer.Option("--keyed", help='Lines are {"key": ..., "value": ...}; a key decides the partition')
    ] = False,
    to_table: Annotated[
        bool, typer.Option("--table", help="TOPIC names a table: append to the stream it reads, wherever that is")
    ] = False,
    kafka: KafkaBrokers = None,
    properties: KafkaProperties = None,
    data_dir: DataDir = None,
    controller: ControllerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Append JSON lines to a topic; prints the offsets per partition."""
    from cremant.cli.streams import kafka_of
    from cremant.cli.topic import produce as run

    run(
        find_cluster(controller, data_dir),
        topic,
        source,
        keyed=keyed,
        kafka=kafka_of(kafka, properties),
        to_table=to_table,
        as_json=as_json,
    )
