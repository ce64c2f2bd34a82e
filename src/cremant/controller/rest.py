# SPDX-License-Identifier: Apache-2.0
"""All endpoints of the controller."""

from __future__ import annotations

from starlette.routing import BaseRoute

from cremant.controller.core import Controller
from cremant.controller.rest_cluster import ClusterRest
from cremant.controller.rest_internal import internal_routes
from cremant.controller.rest_schemas import schema_routes
from cremant.controller.rest_segments import SegmentRest
from cremant.controller.rest_tables import TableRest
from cremant.controller.rest_topics import TopicRest


def routes(controller: Controller) -> list[BaseRoute]:
    return [
        *internal_routes(controller),
        *schema_routes(controller),
        *ClusterRest(controller).routes(),
        *SegmentRest(controller).routes(),
        *TableRest(controller).routes(),
        *TopicRest(controller).routes(),
    ]
