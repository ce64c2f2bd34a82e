# SPDX-License-Identifier: Apache-2.0
# Everyday commands; `just` lists them. Each is one line that also works without just.

venv := ".venv/bin/"

# list the recipes
default:
    @just --list

# make or renew .venv with the tools of the tests
setup:
    scripts/setup dev

# a cluster with a sample table and live events, until Ctrl-C
quickstart *options:
    scripts/quickstart {{ options }}

# all tests, or those named: `just test tests/unit/log`
test *arguments:
    scripts/test {{ arguments }}

# the tests that need neither Java nor processes: seconds, not minutes
quick:
    {{ venv }}python -m pytest -q tests/tidy tests/unit tests/contract

# style, types and layers
check:
    {{ venv }}ruff check .
    {{ venv }}ruff format --check .
    {{ venv }}mypy
    {{ venv }}lint-imports

# let ruff mend what it can
fix:
    {{ venv }}ruff check --fix .
    {{ venv }}ruff format .

# the simulated world: `just sim --seed 7`
sim *options:
    {{ venv }}cremant sim {{ options }}

# a benchmark: `just bench freshness --quick`
bench name *options:
    {{ venv }}python -m bench {{ name }} {{ options }}

# suites of tables, rows and queries with known answers: `just acceptance ../suites`
acceptance directory *options:
    scripts/acceptance {{ directory }} {{ options }}

# everything CI runs, from a fresh environment
ci:
    .ci/run

# exact versions for CI and the README commands, after a change of pyproject.toml
lock *options:
    scripts/lock {{ options }}

# the pipeline's small jar, after a change of its source
jar:
    {{ venv }}python scripts/build-jar
