# SPDX-License-Identifier: Apache-2.0
"""The style that matters is a test. Each ban names what to do instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ROOT / "src" / "cremant"
#: Modules aim at 400 lines and stop at 800. Those above the aim stand here with their length; they may only shrink.
LONG_MODULES: dict[str, int] = {}
LINES_AIM, LINES_MAX, FUNCTION_LINES_MAX = 400, 800, 80
#: What holds text; everything else in the repository is small or generated.
TEXT = {".py", ".md", ".toml", ".txt", ".java", ".yml", ".json", ".jsonl", ".sql", ""}


def repository_files() -> Iterator[Path]:
    for top in ("src", "tests", "bench", "docs", "scripts", ".ci"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "justfile"):
        yield ROOT / name


def python_files(*tops: Path) -> list[Path]:
    return [path for top in tops for path in sorted(top.rglob("*.py")) if "__pycache__" not in path.parts]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PRODUCT = python_files(ROOMS)
EVERYTHING = python_files(ROOMS, ROOT / "tests", ROOT / "bench")


def test_every_file_names_its_licence() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()] + [ROOT / ".ci" / "run"]
    others = [path for path in repository_files() if path.suffix == ".java"]
    for path in [*EVERYTHING, *scripts, *others, ROOT / "justfile"]:
        head = path.read_text(encoding="utf-8")[:400]
        assert "SPDX-License-Identifier: Apache-2.0" in head, f"{relative(path)} lacks the SPDX line"


def test_every_module_says_what_it_is() -> None:
    for path in EVERYTHING:
        if path.stat().st_size > 60:
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{relative(path)}: no docstring"


def test_modules_are_one_noun_long() -> None:
    for path in EVERYTHING:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        allowed = LONG_MODULES.get(relative(path), LINES_AIM)
        assert allowed <= LINES_MAX
        if lines > allowed and relative(path).startswith("src"):
            pytest.fail(
                f"{relative(path)} has {lines} lines, {allowed} are allowed: split it, it is more than one noun"
            )
        assert lines <= LINES_MAX, f"{relative(path)} has {lines} lines"


def test_functions_fit_a_screen() -> None:
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno
                assert length <= FUNCTION_LINES_MAX, f"{relative(path)}:{node.lineno} {node.name} has {length} lines"


#: pattern -> why not. Words are spelled apart here so that this file passes its own test.
BANNED = {
    r"pypi" r"\.org|files\.python" r"hosted": "registries are the user's choice: name no host",
    r"repo1?\.ma" r"ven|/mav" r"en2/|registry\.np" r"mjs": "registries are the user's choice: name no host",
    r"(?<![\w.])/wo" r"rk/|/tm" r"p/brief|/ro" r"ot/": "no paths of one machine",
    r"\bissue #?\d|\bissu" r"es show|\bCla" r"ude|\bhel" r"per [A-Z]\b|\bAI[- ]gener": "tell what is",
    r"\bTO" r"DO\b|\bFIX" r"ME\b|\bXX" r"X\b": "finish it, or write it down in docs",
}  # fmt: skip


def test_no_banned_words() -> None:
    for path in repository_files():
        if path.suffix not in TEXT or path == Path(__file__):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for pattern, why in BANNED.items():
            found = re.search(pattern, text)
            assert not found, f"{relative(path)} contains {found.group() if found else ''!r}: {why}"


def _calls(path: Path, *names: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node.lineno


def test_the_product_logs_and_answers_instead_of_printing() -> None:
    for path in PRODUCT:
        if relative(path) == "src/cremant/cli/main.py":
            continue
        for line in _calls(path, "print", "pprint"):
            pytest.fail(f"{relative(path)}:{line} prints: use shell.logs.log_event, or cli.console in commands")


#: Sleeps of the product: where, and what bounds them.
SLEEPS = {
    "src/cremant/cli/checks.py": "a fifth of a second, once, to see two clocks run",
    "src/cremant/cli/freshness.py": "between two looks of who watches, a second each, until Ctrl-C",
    "src/cremant/cli/supervisor.py": "ticks of a loop that ends by a deadline or a signal",
    "src/cremant/cli/table_epochs.py": "polls the controller for the end of a rebuild, until --wait is over",
    "src/cremant/controller/tables.py": "polls for servers until servers_grace_ms",
    "src/cremant/log/embedded_partition.py": "an append under way, until SETTLE_S of who asks",
    "src/cremant/log/embedded_state.py": "a lock, until LOCK_TIMEOUT_S",
    "src/cremant/log/embedded_wait.py": "the nap of a wait with a timeout, never longer than what is left of it",
    "src/cremant/log/kafka_admin.py": "asks again until its deadline",
    "src/cremant/log/kafka_fetch.py": "half a millisecond for whoever wants the lock; a thread that rests when idle",
    "src/cremant/log/kafka_reader.py": "tries again until its deadline",
    "src/cremant/log/kafka_wait.py": "the nap of a wait with a timeout, never longer than what is left of it",
    "src/cremant/pipeline/main.py": "a watch thread that lives as long as its process",
    "src/cremant/pipeline/warmup.py": "polls within the deadline of the warm-up",
    "src/cremant/pipeline/java.py": "polls for the JVM's port until its deadline",
    "src/cremant/pipeline/rebuild.py": "pause between rounds of brokers, until SEED_PAGE_DEADLINE_MS",
    "src/cremant/pipeline/registry.py": "backoff between questions, until REGISTRY_DEADLINE_MS",
    "src/cremant/pipeline/run.py": "polls for the query's end until its deadline",
}


def test_nobody_sleeps_without_a_bound() -> None:
    for path in PRODUCT:
        for line in _calls(path, "time.sleep", "sleep"):
            allowed = relative(path) in SLEEPS
            assert allowed, (
                f"{relative(path)}:{line} sleeps: wait on an event with a timeout, or list it with its bound"
            )


def test_no_exception_is_swallowed_whole() -> None:
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                silent = all(isinstance(part, ast.Pass | ast.Continue) for part in node.body)
                assert not (bare and silent), f"{relative(path)}:{node.lineno}: name the exception, or act on it"


def test_shell_scripts_are_strict_and_executable() -> None:
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]:
        if path.is_file():
            assert path.stat().st_mode & 0o111, f"{relative(path)} is not executable"
            text = path.read_text(encoding="utf-8")
            if "bash" in text.splitlines()[0]:
                assert "set -euo pipefail" in text, f"{relative(path)} goes on after errors"
