# SPDX-License-Identifier: Apache-2.0
"""What the controller serves stands in its document, and what the document names is served."""

from __future__ import annotations

import re
from pathlib import Path

from control import Cluster
from starlette.routing import Route

DOCUMENT = (Path(__file__).parents[3] / "docs" / "controller-rest.md").read_text(encoding="utf-8")


def test_the_document_names_exactly_what_is_served(cluster: Cluster) -> None:
    served = {
        f"{method} {route.path}"
        for route in cluster.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /[^`]*)`", DOCUMENT))
    assert served - documented == set()
    assert documented - served == set()
