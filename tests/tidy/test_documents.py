# SPDX-License-Identifier: Apache-2.0
"""What is not documented does not exist; and what documents name, exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from starlette.routing import Route

from cremant.cli.main import app
from cremant.model import errors, limits
from cremant.model.settings import SETTINGS
from cremant.model.table import CremantConfig
from cremant.shell.app import make_app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip


def text_of(*names: str) -> str:
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)


def test_every_setting_is_in_the_table_of_settings_with_its_default() -> None:
    documented = text_of("docs/operations.md")
    for setting in SETTINGS:
        row = next((line for line in documented.splitlines() if line.startswith(f"| `{setting.name}` ")), None)
        assert row, f"docs/operations.md lacks a row for the setting {setting.name}"
        default = f"`{setting.default}`" if setting.default != "" else "(empty)"
        assert default in row, f"docs/operations.md: {setting.name}: the default is {default}: {row}"
        assert setting.doc in row, f"docs/operations.md: {setting.name}: the row must say {setting.doc!r}"


def test_the_table_of_settings_names_no_other_setting() -> None:
    names = set(re.findall(r"^\| `([a-z_]+)` ", text_of("docs/operations.md"), re.MULTILINE))
    assert names - {setting.name for setting in SETTINGS} - set(_limits()) == set()


def _limits() -> dict[str, object]:
    return {
        name.lower(): value for name, value in vars(limits).items() if name.isupper() and name not in ("KIB", "MIB")
    }


def test_every_limit_says_why_it_is_what_it_is_or_stands_in_the_documents() -> None:
    source = Path(limits.__file__).read_text(encoding="utf-8").splitlines()
    documented = text_of("docs/operations.md")
    for number, line in enumerate(source):
        found = re.match(r"([A-Z_]+) = ", line)
        if found and found.group(1) not in ("KIB", "MIB"):
            explained = source[number - 1].startswith("#:") or "#" in line or f"`{found.group(1)}`" in documented
            assert explained, f"limits.py: {found.group(1)} has neither a `#:` comment nor a row in docs/operations.md"


def _commands(typer_app: typer.Typer, prefix: str) -> list[str]:
    found = []
    for command in typer_app.registered_commands:
        if not command.hidden:
            name = command.name or (command.callback.__name__ if command.callback else "")
            found.append(f"{prefix} {name}")
    for group in typer_app.registered_groups:
        assert group.typer_instance is not None
        found += _commands(group.typer_instance, f"{prefix} {group.name}")
    return found


def test_every_command_is_shown_in_the_readme_or_the_documents() -> None:
    documented = text_of("README.md", "docs/operations.md")
    for command in _commands(app, "cremant"):
        assert command in documented, f"`{command}` is not documented"


def test_commands_in_documents_and_their_options_exist() -> None:
    """What stands behind `cremant` in code: a command, and options that it has."""
    shown = 0
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for words in re.findall(r"(?:`|^    )cremant ([a-z][^`\n]*)", text, re.MULTILINE):
            command: Any = typer.main.get_command(app)
            for word in words.split():
                if not hasattr(command, "commands"):
                    break
                assert word in command.commands, f"{document.name}: cremant {words}: no command {word}"
                command = command.commands[word]
            known = {option for parameter in command.params for option in parameter.opts}
            given = set(re.findall(r"(?<![\w'-])--[a-z][a-z-]*", words))
            assert given <= known | {"--help"}, f"{document.name}: cremant {words}: no option {given - known}"
            shown += 1
    assert shown > 40


def test_the_tree_of_errors_in_the_docstring_is_the_tree() -> None:
    drawn = inspect.getdoc(errors) or ""
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert name in drawn, f"errors.py: {name} is not in the drawing"


PATH = re.compile(r"`((?:src|tests|bench|docs|scripts|\.ci)/[\w./\-]+)`")
MODULE_PATH = re.compile(r"`((?:model|wire|log|epoch|ingest|pipeline|segment|completion|cluster|sql|exec|controller|"
                         r"broker|server|store|shell|sim|cli)/[\w./]+\.(?:py|java))`")  # fmt: skip
TEST_NAME = re.compile(r"`((?:tests/[\w./]+\.py)::(\w+))`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_that_documents_name_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [name for name in PATH.findall(text) if not (ROOT / name.partition("::")[0]).exists()]
    missing += [name for name in MODULE_PATH.findall(text) if not (ROOT / "src" / "cremant" / name).exists()]
    assert not missing, f"{document.name} names what does not exist: {missing}"
    for whole, function in TEST_NAME.findall(text):
        source = (ROOT / whole.partition("::")[0]).read_text(encoding="utf-8")
        assert f"def {function}(" in source, f"{document.name} names a test that does not exist: {whole}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (document.parent / target).exists(), f"{document.name}: dead link {target}"


def test_every_row_of_the_designs_says_where_and_how_it_is_tested_or_not_yet() -> None:
    rows = 0
    for line in text_of("docs/designs.md").splitlines():
        found = re.match(r"\| ([DFU]-\d+) \|(.*)\|(.*)\|(.*)\|$", line)
        if found:
            rows += 1
            here, where = found.group(3), found.group(4)
            assert here.strip(), line
            assert "not yet" in here or "not taken" in here or "`" in where, f"neither 'not yet' nor a place: {line}"
    assert rows > 150, "docs/designs.md has one row per requirement of the three designs"


def test_numbers_of_rows_are_unique_and_in_order() -> None:
    for letter in "DFU":
        numbers = [int(n) for n in re.findall(rf"^\| {letter}-(\d+) \|", text_of("docs/designs.md"), re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)), f"rows {letter}-n of docs/designs.md are not 1..n"


def test_invariants_of_the_architecture_are_checked_somewhere() -> None:
    """Every rule named in ARCHITECTURE.md stands in the code that keeps it or in the tests that observe it."""
    product = "\n".join(
        path.read_text(encoding="utf-8") for top in ("src", "tests") for path in (ROOT / top).rglob("*.py")
    )
    for rule in sorted(set(re.findall(r"\| (E-\d|I-\d+) \|", text_of("ARCHITECTURE.md")))):
        assert re.search(rf"\b{rule}\b", product), f"ARCHITECTURE.md lists {rule}, neither code nor test names it"


@pytest.mark.parametrize("module", ["model.settings", "log.api", "epoch.records", "wire.messages"])
def test_public_modules_can_be_imported_alone(module: str) -> None:
    """In an interpreter that has nothing else, and without the engines."""
    code = f"import sys, cremant.{module}; print([name for name in ('datafusion', 'pyspark') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_every_sql_function_and_ingest_function_is_documented() -> None:
    from cremant.ingest.compile import FUNCTIONS
    from cremant.sql.aggregates import aggregate_names
    from cremant.sql.scalars import SCALARS

    sql, ingest = text_of("docs/compatibility.md").split("## Schemas and tables")
    documented = set(re.findall(r"`([a-z0-9]+)(?:\([^`]*\))?`", sql))
    assert {"summv", "countmv"} <= documented, "one sentence says which aggregations have a form for many values"
    aggregates = {name for name in aggregate_names() if name.removesuffix("mv") not in documented}
    names = aggregates | {name for scalar in SCALARS for name in scalar.names}
    assert sorted(names - documented) == []
    assert [name for name in sorted(FUNCTIONS) if f"`{name}`" not in ingest] == []


def _routes_in(source: str) -> Iterator[str]:
    """What `Route("/path", …)` in a module serves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Route" and isinstance(node.args[0], ast.Constant):
            methods = [keyword.value for keyword in node.keywords if keyword.arg == "methods"]
            for method in ast.literal_eval(methods[0]) if methods else ["GET"]:
                yield f"{method} {node.args[0].value}"


@pytest.mark.parametrize("role", ["broker", "server"])
def test_the_document_names_exactly_the_endpoints_of(role: str) -> None:
    """Method and path, both ways. The controller's are compared in tests/unit/controller/test_documented.py."""
    rest = importlib.import_module(f"cremant.{role}.rest")
    arguments: list[Any] = [None] * len(inspect.signature(rest.routes).parameters)
    routes = make_app(role, rest.routes(*arguments), ready=lambda: (True, "")).routes
    served = {
        f"{method} {route.path}" for route in routes if isinstance(route, Route) for method in route.methods or ()
    }
    for path in (ROOT / "src" / "cremant" / role).glob("*.py"):
        served |= set(_routes_in(path.read_text(encoding="utf-8")))
    served = {one for one in served if not one.startswith("HEAD ") and " /internal" not in one}
    section = text_of("docs/compatibility.md").split(f"### {role.capitalize()} ")[1].split("\n#")[0]
    documented = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]*)`", section))
    assert (sorted(served - documented), sorted(documented - served)) == ([], [])


def test_endpoints_that_any_document_names_exist() -> None:
    """By path, whatever a parameter is called there."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    served = {re.sub(r"{\w+}", "{}", path) for path in re.findall(r"""["'](/[\w{}/\-]+)["']""", source)}
    for document in DOCUMENTS:
        if document.name == "designs.md":
            continue  # other designs' endpoints, and what became of them
        for path in re.findall(r"`(?:GET|POST|PUT|DELETE) (/[\w{}/\-]+)", document.read_text(encoding="utf-8")):
            assert re.sub(r"{\w+}", "{}", path) in served, f"{document.name} names {path}, which nobody serves"


def test_every_key_of_our_block_in_a_table_config_is_documented_with_its_default() -> None:
    documented = text_of("docs/operations.md")
    for block in msgspec.structs.fields(CremantConfig):
        for field in msgspec.structs.fields(block.type):
            default = json.dumps(field.default).strip('"')
            row = f"| `{block.encode_name}.{field.encode_name}` | `{default}` |"
            assert row in documented, f"docs/operations.md lacks {row}"
