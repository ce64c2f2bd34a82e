# SPDX-License-Identifier: Apache-2.0
"""Functions of our own inside DataFusion: by name, made once, registered for the sessions whose SQL names them.

Rules:

- Scalars are called `fn_<name>`, aggregations `agg_<name>`: a text without `fn_` and `agg_` costs two searches.
- Kernels take and give Arrow arrays (literals arrive as arrays, too), are pure, and may be called from any thread.
- What a kernel raises ends the query with code 200; `raised` finds its message inside DataFusion's.

A module of kernels has a table `FUNCTIONS: dict[name, factory]` and a row in `_MODULES`. Modules are imported when
the first query names such a function.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from datafusion import AggregateUDF, ScalarUDF, SessionContext

#: A factory makes the function that DataFusion calls.
Factory = Callable[[], ScalarUDF | AggregateUDF]

_MODULES: tuple[str, ...] = (
    "cremant.exec.scalar_text",
    "cremant.exec.scalar_number",
    "cremant.exec.scalar_decimal",
    "cremant.exec.scalar_time",
    "cremant.exec.scalar_json",
    "cremant.exec.scalar_array",
    "cremant.exec.agg_decimal",
    "cremant.exec.agg_lists",
    "cremant.exec.agg_hll",
    "cremant.exec.agg_theta",
    "cremant.exec.agg_quantiles",
    "cremant.exec.agg_moments",
    "cremant.exec.agg_streams",
)

_NAME = re.compile(r"\b(?:fn|agg)_[a-z0-9_]+")
#: How DataFusion prints what a Python function raised.
_RAISED = re.compile(r"PyErr \{ type: <class '[^']+'>, value: \w+\((.*?)\), traceback", re.DOTALL)


def register(session: SessionContext, sql: str) -> None:
    """Makes the functions that `sql` names known to the session."""
    if "fn_" not in sql and "agg_" not in sql:
        return
    for name in dict.fromkeys(_NAME.findall(sql)):
        function = _function(name)
        if isinstance(function, ScalarUDF):
            session.register_udf(function)
        elif function is not None:
            session.register_udaf(function)


@functools.cache
def _factories() -> dict[str, Factory]:
    return {name: factory for module in _MODULES for name, factory in importlib.import_module(module).FUNCTIONS.items()}


@functools.lru_cache(maxsize=1024)
def _function(name: str) -> ScalarUDF | AggregateUDF | None:
    """None: no function of ours (a literal may look like one)."""
    factory = _factories().get(name)
    return factory() if factory is not None else None


def raised(text: str) -> str | None:
    """The message of what a kernel raised, from DataFusion's error text; None if no kernel did."""
    found = _RAISED.search(text)
    if found is None:
        return None
    try:
        message: Any = ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return found[1]
    return str(message)
