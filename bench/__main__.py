# SPDX-License-Identifier: Apache-2.0
"""`python -m bench NAME [--quick] [--json FILE] [--controller URL --broker URL]`: runs one benchmark and reports.

Without URLs it starts a cluster of its own from the real command line in a temporary directory; with URLs it drives a
running one. `--quick` ends within about a minute on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from bench.context import Context, describe_commit, describe_machine

BENCHMARKS = {
    "freshness": "how old the newest visible row is, at a steady rate",
    "ingest": "rows per second from a preloaded topic until queryable, and what they cost",
    "query": "latency of ten query shapes, and queries per second of four clients",
    "sim": "seeds and steps per second of the simulated world",
    "start": "seconds from `cremant quickstart` to the first answer, and of a restart",
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
    if arguments.kafka:
        print("bench: --kafka: this version has no Kafka stream; rows go to Cremant's own topics", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{arguments.name}")
    context = Context(quick=arguments.quick, controller=arguments.controller, broker=arguments.broker)
    print(f"bench {arguments.name}: {BENCHMARKS[arguments.name]}", file=sys.stderr)
    machine = describe_machine()
    parameters, metrics = module.run(context)
    report = {
        "name": arguments.name,
        "commit": describe_commit(),
        "machine": machine,
        "parameters": {"quick": arguments.quick, **parameters},
        "metrics": metrics,
    }
    width = max(len(name) for name in metrics)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:,.2f}" if isinstance(value, float) else f"  {name:<{width}}  {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="small amounts: about a minute")
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.add_argument("--controller", metavar="URL", help="drive this cluster instead of an own one")
    parser.add_argument("--broker", metavar="URL")
    parser.add_argument("--kafka", metavar="HOST:PORT", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
