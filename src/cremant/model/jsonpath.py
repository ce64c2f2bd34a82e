# SPDX-License-Identifier: Apache-2.0
"""JSON paths: `$.a.b[0]['c']`, wildcards `.*` and `[*]`, slices `[1:3]`, unions `[0,2]` `['a','b']`, descent `..a`.

A path without wildcards, slices, unions and descent is *definite*: it finds one value or nothing. Any other finds a
list. Filters (`[?(...)]`) and functions are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_STEP = re.compile(
    r"(?P<deep>\.\.)?(?:"
    r"\.?(?P<name>[^\s.\[\]()'\"?*,:@$][^.\[\]()'\"?*,:@]*|\$[^.\[\]()'\"?*,:@]+)"
    r"|\.?(?P<star>\*)"
    r"|\[\s*(?P<inside>\*|-?\d*\s*:\s*-?\d*|-?\d+(?:\s*,\s*-?\d+)*"
    r"|'(?:[^'\\]|\\.)*'(?:\s*,\s*'(?:[^'\\]|\\.)*')*"
    r"|\"(?:[^\"\\]|\\.)*\"(?:\s*,\s*\"(?:[^\"\\]|\\.)*\")*)\s*\])"
)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")

#: A value that a path does not find.
MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Every:
    """`*`."""


@dataclass(frozen=True, slots=True)
class Slice:
    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True)
class OneOf:
    """Several keys or indexes."""

    choices: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Descent:
    """What follows is looked for at every depth."""


Step = str | int | Every | Slice | OneOf | Descent


@dataclass(frozen=True, slots=True)
class JsonPath:
    steps: tuple[Step, ...]

    @property
    def definite(self) -> bool:
        return all(isinstance(step, str | int) for step in self.steps)

    def find(self, value: Any) -> Any:
        """The value (definite paths) or the list of values; MISSING if there is none."""
        if self.definite:
            for step in self.steps:
                value = _child(value, step)
                if value is MISSING:
                    return MISSING
            return value
        return [found for _, found in self.walk(value)]

    def walk(self, value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        """(keys and indexes, value) of everything the path finds, in document order."""
        found: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
        for step in self.steps:
            found = [
                ((*way, *more), child) for way, current in found for more, child in _children(current, step)
            ]  # fmt: skip
        yield from found


def parse_path(text: str) -> JsonPath:
    """Raises ValueError for what is no path of the supported kind."""
    stripped = text.strip()
    if not stripped.startswith("$"):
        raise ValueError(f"JSON path {text!r} does not begin with $")
    at = 1
    steps: list[Step] = []
    while at < len(stripped):
        found = _STEP.match(stripped, at)
        dotted = found is not None and (stripped[at] == "." or stripped[at] == "[")
        if found is None or not dotted:
            raise ValueError(f"JSON path {text!r} is not supported at {stripped[at:][:40]!r}")
        if found["deep"]:
            steps.append(Descent())
        steps.append(_step(found))
        at = found.end()
    return JsonPath(tuple(steps))


def _step(found: re.Match[str]) -> Step:
    if found["name"] is not None:
        return found["name"].strip()
    inside = found["inside"]
    if inside is None or inside == "*":
        return Every()
    if inside[0] in "'\"":
        names = [a or b for a, b in _QUOTED.findall(inside)]
        keys = tuple(re.sub(r"\\(.)", r"\1", name) for name in names)
        return keys[0] if len(keys) == 1 else OneOf(keys)
    if ":" in inside:
        start, _, end = (part.strip() for part in inside.partition(":"))
        return Slice(int(start) if start else None, int(end) if end else None)
    numbers = tuple(int(part) for part in inside.split(","))
    return numbers[0] if len(numbers) == 1 else OneOf(numbers)


def _child(value: Any, step: Step) -> Any:
    if isinstance(step, str):
        return value.get(step, MISSING) if isinstance(value, dict) else MISSING
    assert isinstance(step, int)
    inside = isinstance(value, list) and -len(value) <= step < len(value)
    return value[step] if inside else MISSING


def _children(value: Any, step: Step) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    match step:
        case str() | int():
            child = _child(value, step)
            if child is not MISSING:
                yield (step,), child
        case OneOf(choices):
            for choice in choices:
                yield from _children(value, choice)
        case Every() if isinstance(value, dict):
            yield from (((key,), child) for key, child in value.items())
        case Every() if isinstance(value, list):
            yield from (((index,), child) for index, child in enumerate(value))
        case Slice(start, end) if isinstance(value, list):
            yield from (((index,), value[index]) for index in range(len(value))[start:end])
        case Descent():
            yield from _descend((), value)


def _descend(way: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The value and everything inside it."""
    yield way, value
    for more, child in _children(value, Every()):
        yield from _descend((*way, *more), child)


def canonical(way: tuple[str | int, ...]) -> str:
    """`$['a'][0]`."""
    return "$" + "".join(f"['{step}']" if isinstance(step, str) else f"[{step}]" for step in way)
