# SPDX-License-Identifier: Apache-2.0
"""`python -m bench NAME [options]`: runs one benchmark and reports; `all` runs those that have figures of Apache Pinot,
and prints a table.

Without URLs it starts a cluster of its own from the real command line in a temporary directory, with `--log kafka` on a
Kafka of its own; with URLs it drives a running one. `--quick` ends within about a minute on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.context import Context, describe_commit, describe_machine

BENCHMARKS = {
    "commit": "gaps in what is visible, with commits and without, while the deep store answers, hangs, and fails",
    "freshness": "how old the newest visible row is, at a steady rate",
    "indexes": "CPU of a server's share of a query, with and without indexes, codes and shortcuts",
    "ingest": "rows per second from a preloaded topic until queryable, and what they cost",
    "outage": "rows, queries and copies while the deep store is away (--minutes)",
    "query": "latency of ten query shapes, and queries per second of four clients",
    "sim": "seeds and steps per second of the simulated world",
    "soak": "memory, files and threads of every role under a steady load (--minutes)",
    "start": "seconds from the start of a cluster to the first answer, and of a restart",
    "takeover": "seconds from kill -9 of a pipeline to the next closed epoch, with one on standby (--only TABLE)",
    "upsert": "what keys cost: rows per second, freshness, queries, bytes, restart (--only PART)",
    "all": "freshness, ingest, query and start, one after the other, and a table of their figures",
}


def main() -> int:
    arguments = _arguments()
    if arguments.name not in BENCHMARKS:
        listed = "\n".join(f"  {name:<10} {question}" for name, question in BENCHMARKS.items())
        print(f"bench: no benchmark {arguments.name!r}; there are:\n{listed}", file=sys.stderr)
        return 2
    if bool(arguments.controller) != bool(arguments.broker):
        print("bench: --controller and --broker go together", file=sys.stderr)
        return 2
    if arguments.name == "all":
        from bench.everything import run_all

        return run_all(arguments)
    module = importlib.import_module(f"bench.{arguments.name}")
    log = "kafka" if arguments.kafka else arguments.log
    context = Context(
        quick=arguments.quick, log=log, kafka=arguments.kafka, controller=arguments.controller, broker=arguments.broker,
        minutes=arguments.minutes, only=arguments.only, rows=arguments.rows, keys=arguments.keys,
    )  # fmt: skip
    print(f"bench {arguments.name}, {log} log: {BENCHMARKS[arguments.name]}", file=sys.stderr)
    machine = describe_machine()
    parameters, metrics = module.run(context)
    report: dict[str, Any] = {
        "name": arguments.name,
        "commit": describe_commit(),
        "machine": machine,
        "parameters": {"quick": arguments.quick, "log": log, **parameters},
        "metrics": metrics,
    }
    width = max(len(name) for name in metrics)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:,.2f}" if isinstance(value, float) else f"  {name:<{width}}  {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="One benchmark, or all.")
    parser.add_argument("name", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="small amounts: about a minute")
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.add_argument("--log", choices=("embedded", "kafka"), default="embedded", help="of an own cluster")
    parser.add_argument("--controller", metavar="URL", help="drive this cluster instead of an own one")
    parser.add_argument("--broker", metavar="URL")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="rows go to this Kafka, instead of one of our own")
    parser.add_argument("--minutes", type=float, default=0.0, help="of soak (60; 5 with --quick), of outage (10; 1)")
    parser.add_argument("--only", default="", metavar="PART", help="of upsert: this part alone (bench/upsert.py)")
    parser.add_argument("--rows", type=int, default=0, help="of upsert: this many instead of what a part has")
    parser.add_argument("--keys", type=int, default=0, help="of upsert: this many instead of what a part has")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
