# SPDX-License-Identifier: Apache-2.0
"""REST of copies: where the bytes of a table's sealed segments are, what is missing, and having it mended at once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cremant.cluster.states import external_view
from cremant.completion.copies import Safety, misses_store, safety_of, totals
from cremant.controller.core import Controller
from cremant.controller.http import answering, flag, listed, table_record
from cremant.model.cluster import as_json
from cremant.model.completion import StorePolicy
from cremant.model.errors import Conflict, NotFound
from cremant.model.segments import ReplicaState, SegmentMetadata, SegmentStatus


class CopiesRest:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._catalog = controller.catalog

    def routes(self) -> list[BaseRoute]:
        post = ["POST"]
        return [
            Route("/tables/{table}/copies", answering(self.copies), methods=["GET"]),
            Route("/segments/{table}/uploadFromServerToDeepstore", answering(self.upload), methods=post),
            Route("/segments/{table}/reset", answering(self.reset_all), methods=post),
            Route("/segments/{table}/{segment}/reset", answering(self.reset), methods=post),
        ]

    def copies(self, request: Request) -> dict[str, Any]:
        """`unsafe=true`: only segments that are not safe, or not in the store although they should be."""
        record = table_record(request, self._catalog)
        policy = self._controller.policy(record)
        only_unsafe = flag(request, "unsafe", default=False)
        with self._catalog.lock:
            known = self._catalog.segments.get(record.config.name, {}).values()
            done = sorted((s for s in known if s.status is SegmentStatus.DONE), key=lambda s: s.name)
        return {
            "tableName": record.config.name_with_type,
            "storePolicy": str(policy),
            "replication": record.config.replication,
            "totals": as_json(totals(done, policy)),
            "segments": {
                segment.name: self._segment(segment, policy)
                for segment in done
                if not only_unsafe or safety_of(segment) is not Safety.SAFE or misses_store(segment, policy)
            },
        }

    def upload(self, request: Request) -> dict[str, Any]:
        """Repair looks at these segments (`segmentNames`, else all that miss in the store) at once, without backoff.
        Of the others it is looked at once whether the store still has them."""
        record = table_record(request, self._catalog)
        name, policy = record.config.name, self._controller.policy(record)
        if policy is StorePolicy.PEERS_ONLY:
            raise Conflict(f"table {name} keeps no segments in the store: its policy is PEERS_ONLY")
        with self._catalog.lock:
            known = self._catalog.segments.get(name, {})
            names = listed(request, "segmentNames")
            if unknown := [segment for segment in names if segment not in known]:
                raise NotFound(f"Failed to find segments: {unknown} in table: {record.config.name_with_type}")
            if opened := [segment for segment in names if known[segment].status is not SegmentStatus.DONE]:
                raise Conflict(
                    f"not sealed yet: {', '.join(opened)}", hint="POST /tables/{table}/forceCommit seals them"
                )
            wanted = [segment for segment in names or sorted(known) if misses_store(known[segment], policy)]
            asked = self._controller.repair.hurry(name, wanted)
            self._controller.objects.hurry(name, [segment for segment in names or known if segment not in wanted])
        return {"status": f"Upload of {len(asked)} segments asked for", "segments": asked}

    def reset(self, request: Request) -> dict[str, Any]:
        """`targetInstance`: on this server only; else on all replicas that live."""
        record = table_record(request, self._catalog)
        segment, name = request.path_params["segment"], record.config.name_with_type
        with self._catalog.lock:
            replicas = self._catalog.ideal_state(record.config.name).get(segment)
            if replicas is None:
                raise NotFound(f"Failed to find segment: {segment} in table: {name}")
            target = self._check_target(request)
            if target is not None and target not in replicas:
                raise NotFound(f"server {target} has no replica of segment {segment}: {', '.join(sorted(replicas))} do")
            wanted = {server: [segment] for server in self._targets(request, replicas)}
            if not wanted:
                raise Conflict(f"no replica of segment {segment} on {', '.join(sorted(replicas))} is alive")
            self._controller.repair.reset(record.config.name, wanted)
        return {"status": f"Successfully reset segment: {segment} of table: {name}"}

    def reset_all(self, request: Request) -> dict[str, Any]:
        """`errorSegmentsOnly=true`: only replicas that report an error."""
        record = table_record(request, self._catalog)
        only_errors = flag(request, "errorSegmentsOnly", default=False)
        with self._catalog.lock:
            name = record.config.name
            self._check_target(request)
            partitions, segments = self._catalog.partitions.get(name, {}), self._catalog.segments.get(name, {})
            reports = self._controller.instances.reports()
            external = external_view(name, record.incarnation, partitions.values(), segments, reports)
            wanted: dict[str, list[str]] = {}
            for segment, replicas in self._catalog.ideal_state(record.config.name).items():
                states = external.get(segment, {})
                for server in self._targets(request, replicas):
                    if not only_errors or states.get(server) is ReplicaState.ERROR:
                        wanted.setdefault(server, []).append(segment)
            self._controller.repair.reset(name, wanted)
        return {"status": f"Successfully reset segments of table: {record.config.name_with_type}"}

    def _check_target(self, request: Request) -> str | None:
        """The server that is to be asked, if one is named: a live one."""
        target = request.query_params.get("targetInstance")
        if target is not None and not self._controller.instances.is_alive(target):
            raise Conflict(f"server {target} is not alive, or no member", hint="GET /instances lists the members")
        return target

    def _targets(self, request: Request, replicas: Collection[str]) -> list[str]:
        target = request.query_params.get("targetInstance")
        return [s for s in sorted(replicas) if target in (None, s) and self._controller.instances.is_alive(s)]

    def _segment(self, segment: SegmentMetadata, policy: StorePolicy) -> dict[str, Any]:
        now_ms = self._controller.clock.now_ms()
        return {
            "safety": str(safety_of(segment)),
            "checksum": segment.checksum,
            "rows": segment.rows,
            "replicas": list(segment.replicas),
            "holders": {
                name: {
                    "checksum": copy.checksum,
                    "verifiedMsAgo": max(0, now_ms - copy.verified_at_ms),
                    "live": self._controller.instances.is_alive(name),
                }
                for name, copy in sorted(segment.copies.items())
            },
            "store": {
                "wanted": policy is not StorePolicy.PEERS_ONLY,
                "state": str(segment.store_state),
                "url": segment.store_url,
                "error": segment.store_error,
                "changedMsAgo": max(0, now_ms - segment.store_changed_ms) if segment.store_changed_ms else None,
            },
            "lost": as_json(segment.lost) if segment.lost is not None else None,
        }
