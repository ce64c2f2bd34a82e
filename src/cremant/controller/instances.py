# SPDX-License-Identifier: Apache-2.0
"""Instances: who is a member (durable), who lives and what they last said (volatile).

Rules
- A report is *material* when others act on it (which segments and tails are served, which pipeline runs, errors);
  progress numbers are not, so heartbeats of a busy, healthy cluster change no view.
- When the controller itself stood still (stopped process, starved machine), that time counts against nobody: a pause
  of its own must not look like everyone's death.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cremant.cluster.membership import heard, is_live
from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.model.cluster import InstanceReport, LiveInstance, PipelineReport, Role, TailReport, instance_key
from cremant.model.errors import Conflict, NotFound
from cremant.model.limits import HEARTBEAT_MS, INSTANCE_DEAD_AFTER_MS
from cremant.wire.messages import Heartbeat

#: No heartbeat and no tick for this long: it was the controller that stood still, not everyone else.
OWN_PAUSE_MS = 4 * HEARTBEAT_MS


@dataclass(slots=True)
class _Heard:
    at_ms: int
    report: InstanceReport
    signature: int


class Instances:
    """Guarded by the catalog's lock."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._heard: dict[str, _Heard] = {}
        self._live: frozenset[str] = frozenset()
        self._started_ms = clock.now_ms()
        self._looked_at_ms = self._started_ms
        self._liveness_changed = threading.Condition(catalog.lock)

    def heartbeat(self, beat: Heartbeat) -> bool:
        """Takes a heartbeat in; True when something material changed. Raises Fenced for a replaced process."""
        with self._catalog.lock:
            known = self._catalog.members.get(beat.instance.id)
            member = heard(known, beat.instance, beat.nonce)
            if member is not known:
                self._catalog.commit({instance_key(beat.instance.id): member})
            before = self._heard.get(beat.instance.id)
            signature = _signature(beat.report)
            self._heard[beat.instance.id] = _Heard(self._clock.now_ms(), beat.report, signature)
            came_alive = self.refresh_liveness()
            return member is not known or came_alive or before is None or before.signature != signature

    def refresh_liveness(self) -> bool:
        """True when an instance died or came back since the last look. Called by every heartbeat and every tick."""
        with self._catalog.lock:
            now_ms = self._clock.now_ms()
            stood_still_ms = now_ms - self._looked_at_ms
            self._looked_at_ms = now_ms
            if stood_still_ms > OWN_PAUSE_MS:
                for last in self._heard.values():
                    last.at_ms = min(now_ms, last.at_ms + stood_still_ms)
            live = frozenset(name for name, last in self._heard.items() if is_live(last.at_ms, now_ms))
            changed = live != self._live
            self._live = live
            if changed:
                self._liveness_changed.notify_all()
            return changed

    def wait_for_live(self, role: Role, count: int, timeout_s: float) -> bool:
        """Waits until `count` members of `role` live; the lock must not be held."""
        with self._liveness_changed:
            return self._liveness_changed.wait_for(lambda: len(self.live(role)) >= count, timeout_s)

    def is_settled(self) -> bool:
        """After a restart: every known member was heard again, or had the time to be. Before that, a view would call
        everyone dead."""
        if self._clock.now_ms() - self._started_ms > INSTANCE_DEAD_AFTER_MS:
            return True
        return self._live >= set(self._catalog.members)

    def forget(self, instance: str) -> None:
        """Drops a dead member that hosts nothing. Raises NotFound, Conflict."""
        with self._catalog.lock:
            if instance not in self._catalog.members:
                raise NotFound(f"Instance {instance} not found")
            if self.is_alive(instance):
                raise Conflict(f"Failed to drop instance {instance} - it is alive", hint="stop it first")
            hosts = any(
                instance in partition.replicas
                for partitions in self._catalog.partitions.values()
                for partition in partitions.values()
            )
            if hosts or any(
                instance in segment.replicas
                for segments in self._catalog.segments.values()
                for segment in segments.values()
            ):
                raise Conflict(f"Failed to drop instance {instance} - tables have replicas on it")
            self._heard.pop(instance, None)
            self._catalog.commit({instance_key(instance): None})

    def is_alive(self, instance: str) -> bool:
        return instance in self._live

    def live(self, role: Role) -> list[str]:
        return sorted(name for name in self._live if self._catalog.members[name].record.role is role)

    def reports(self) -> dict[str, InstanceReport]:
        """Last report of each live instance."""
        return {name: self._heard[name].report for name in sorted(self._live)}

    def heard_ms_ago(self, instance: str) -> int | None:
        last = self._heard.get(instance)
        return None if last is None else self._clock.now_ms() - last.at_ms

    def described(self) -> tuple[LiveInstance, ...]:
        return tuple(
            LiveInstance(
                id=name,
                role=member.record.role,
                url=f"http://{_bracketed(member.record.host)}:{member.record.port}",
                live=name in self._live,
                nonce=member.nonce,
            )
            for name, member in sorted(self._catalog.members.items())
        )

    def is_replaced(self, instance: str, nonce: str) -> bool:
        """That process is known to be gone: a newer one runs under its id."""
        member = self._catalog.members.get(instance)
        return member is not None and nonce in member.retired

    def tails(self, table: str, incarnation: str) -> dict[str, dict[str, TailReport]]:
        """partition (as text) -> instance -> report."""
        found: dict[str, dict[str, TailReport]] = {}
        for name, report in self.reports().items():
            for tail in report.tails:
                if tail.table == table and tail.incarnation == incarnation:
                    found.setdefault(str(tail.partition), {})[name] = tail
        return found

    def pipeline(self, table: str, incarnation: str, holder: str | None) -> PipelineReport | None:
        """What the live pipeline says of a table; the lease holder's word goes first."""
        found: PipelineReport | None = None
        for name, report in self.reports().items():
            for said in report.pipelines:
                if said.table == table and said.incarnation == incarnation:
                    if holder is not None and holder.startswith(name):
                        return said
                    found = said
        return found

    def names_incarnation(self, incarnation: str) -> bool:
        """Some live instance still works on this table."""
        return any(
            any(tail.incarnation == incarnation for tail in report.tails)
            or any(pipeline.incarnation == incarnation for pipeline in report.pipelines)
            for report in self.reports().values()
        )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _signature(report: InstanceReport) -> int:
    return hash(
        (
            tuple((said.table, said.segment, said.state, said.checksum, said.error) for said in report.segments),
            tuple((tail.table, tail.incarnation, tail.partition, tail.error) for tail in report.tails),
            tuple((p.table, p.incarnation, p.state, p.generation, p.restarts, p.error) for p in report.pipelines),
        )
    )
