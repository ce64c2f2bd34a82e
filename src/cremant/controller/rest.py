# SPDX-License-Identifier: Apache-2.0
"""All endpoints of the controller."""

from __future__ import annotations

import ssl

from starlette.routing import BaseRoute

from cremant.controller.core import Controller
from cremant.controller.rest_cluster import ClusterRest
from cremant.controller.rest_copies import CopiesRest
from cremant.controller.rest_download import DownloadRest
from cremant.controller.rest_freshness import FreshnessRest
from cremant.controller.rest_internal import internal_routes
from cremant.controller.rest_jobs import JobRest
from cremant.controller.rest_schemas import schema_routes
from cremant.controller.rest_segments import SegmentRest
from cremant.controller.rest_story import StoryRest
from cremant.controller.rest_tables import TableRest
from cremant.controller.rest_topics import TopicRest
from cremant.controller.rest_upsert import UpsertRest
from cremant.controller.rest_upsert_ops import UpsertOpsRest


def routes(controller: Controller, authorities: ssl.SSLContext | None = None) -> list[BaseRoute]:
    """`authorities`: who vouches for servers that are asked by HTTPS; those of the system if None."""
    return [
        *internal_routes(controller),
        *schema_routes(controller),
        *ClusterRest(controller).routes(),
        *SegmentRest(controller).routes(),
        *CopiesRest(controller).routes(),
        *DownloadRest(controller, authorities).routes(),
        *StoryRest(controller).routes(),
        *FreshnessRest(controller).routes(),
        *JobRest(controller).routes(),
        *TableRest(controller).routes(),
        *TopicRest(controller).routes(),
        *UpsertRest(controller).routes(),
        *UpsertOpsRest(controller).routes(),
    ]
