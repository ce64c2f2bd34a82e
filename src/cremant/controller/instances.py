# SPDX-License-Identifier: Apache-2.0
"""Instances: who is a member (durable), who lives and what they last said (volatile).

Rules
- A report is *material* when others act on it (which segments and tails are served, which tails have caught up, which
  pipeline runs, errors); progress numbers are not, so heartbeats of a busy, healthy cluster change no view.
- Heartbeats leave segments out that are as they were; what was left out is taken from the last report of that process.
  So a heartbeat that arrives after a later one of its process must not count: its report would stay for long.
- When the controller itself stood still (stopped process, starved machine), that time counts against nobody: a pause
  of its own must not look like everyone's death.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from cremant.cluster.membership import heard, is_live
from cremant.controller.catalog import Catalog
from cremant.controller.clock import Clock
from cremant.model.cluster import (
    CATCHING_UP,
    InstanceRecord,
    InstanceReport,
    LiveInstance,
    PipelineReport,
    Role,
    SegmentReport,
    TailReport,
    instance_key,
)
from cremant.model.errors import Conflict, NotFound
from cremant.model.limits import HEARTBEAT_MS, INSTANCE_DEAD_AFTER_MS
from cremant.wire.messages import Heartbeat

#: No heartbeat and no tick for this long: it was the controller that stood still, not everyone else.
OWN_PAUSE_MS = 4 * HEARTBEAT_MS


#: Segments that are as they were are compared with the records this often all the same: a record may have changed.
LOOK_AGAIN_MS = 10 * HEARTBEAT_MS


@dataclass(slots=True)
class _Heard:
    nonce: str
    number: int
    at_ms: int
    report: InstanceReport
    segments_hash: int
    rest_hash: int
    looked_at_ms: int = 0


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

    def whole_report(self, beat: Heartbeat) -> InstanceReport | None:
        """The report with the segments that were left out; None when they are not known here."""
        if not beat.segments_kept:
            return beat.report
        with self._catalog.lock:
            before = self._heard.get(beat.instance.id)
            if before is None or before.nonce != beat.nonce:
                return None
            return msgspec.structs.replace(beat.report, segments=before.report.segments)

    def is_due_to_be_looked_at(self, instance: str) -> bool:
        """True every LOOK_AGAIN_MS for each instance."""
        with self._catalog.lock:
            heard, now_ms = self._heard[instance], self._clock.now_ms()
            due = now_ms - heard.looked_at_ms >= LOOK_AGAIN_MS
            if due:
                heard.looked_at_ms = now_ms
            return due

    def heartbeat(self, beat: Heartbeat, report: InstanceReport | None = None) -> bool:
        """Takes a heartbeat in (`report`: the whole one); True when something material changed. Raises Fenced for a
        replaced process."""
        report = report or beat.report
        with self._catalog.lock:
            known = self._catalog.members.get(beat.instance.id)
            member = heard(known, beat.instance, beat.nonce)
            if member is not known:
                self._catalog.commit({instance_key(beat.instance.id): member})
            before = self._heard.get(beat.instance.id)
            if before is not None and before.nonce == beat.nonce and beat.number < before.number:
                return False
            kept = beat.segments_kept and before is not None
            heard_now = _Heard(
                beat.nonce, beat.number, self._clock.now_ms(), report,
                segments_hash=before.segments_hash if kept and before is not None else _hash_of_segments(report),
                rest_hash=_hash_of_rest(report),
                looked_at_ms=before.looked_at_ms if kept and before is not None else self._clock.now_ms(),
            )  # fmt: skip
            self._heard[beat.instance.id] = heard_now
            came_alive = self.refresh_liveness()
            if member is not known or came_alive or before is None:
                return True
            return (before.segments_hash, before.rest_hash) != (heard_now.segments_hash, heard_now.rest_hash)

    def is_newest(self, beat: Heartbeat) -> bool:
        """Nothing later was heard of its instance. The lock is held."""
        last = self._heard.get(beat.instance.id)
        return last is not None and (last.nonce, last.number) == (beat.nonce, beat.number)

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
            hosted = self._tables_on(instance)
            if hosted:
                raise Conflict(
                    f"Failed to drop instance {instance} - tables have replicas on it: {', '.join(hosted)}",
                    hint="move them to others first: POST /tables/{table}/rebalance",
                )
            self._heard.pop(instance, None)
            self._catalog.commit({instance_key(instance): None})

    def set_enabled(self, instance: str, *, enabled: bool) -> None:
        """Of any member, dead ones too. Raises NotFound."""
        with self._catalog.lock:
            member = self._catalog.members.get(instance)
            if member is None:
                raise NotFound(f"Instance {instance} not found")
            if member.enabled != enabled:
                self._catalog.commit({instance_key(instance): msgspec.structs.replace(member, enabled=enabled)})

    def _tables_on(self, instance: str) -> list[str]:
        return [
            name
            for name in sorted(self._catalog.tables)
            if any(instance in partition.replicas for partition in self._catalog.partitions.get(name, {}).values())
            or any(instance in segment.replicas for segment in self._catalog.segments.get(name, {}).values())
        ]

    def is_alive(self, instance: str) -> bool:
        return instance in self._live

    def live(self, role: Role) -> list[str]:
        return sorted(name for name in self._live if self._catalog.members[name].record.role is role)

    def is_enabled(self, instance: str) -> bool:
        """It may get more. False of strangers."""
        member = self._catalog.members.get(instance)
        return member is not None and member.enabled

    def usable(self) -> list[str]:
        """Live servers that may get more."""
        return [name for name in self.live(Role.SERVER) if self.is_enabled(name)]

    def reports(self) -> dict[str, InstanceReport]:
        """Last report of each live instance."""
        return {name: self._heard[name].report for name in sorted(self._live)}

    def reports_by_table(self) -> dict[str, dict[str, InstanceReport]]:
        """The same, parted by table: who looks at all tables goes through each report once, not once per table."""
        parted: dict[str, dict[str, InstanceReport]] = {}
        for instance, report in self.reports().items():
            for table, part in _by_table(report).items():
                parted.setdefault(table, {})[instance] = part
        return parted

    def without_tls(self) -> list[str]:
        """Live servers that offer no HTTPS."""
        return [name for name in self.live(Role.SERVER) if not self._catalog.members[name].record.tls_port]

    def heard_ms_ago(self, instance: str) -> int | None:
        last = self._heard.get(instance)
        return None if last is None else self._clock.now_ms() - last.at_ms

    def described(self) -> tuple[LiveInstance, ...]:
        return tuple(
            LiveInstance(
                id=name,
                role=member.record.role,
                url=f"http://{_bracketed(member.record.host)}:{member.record.port}",
                tls_url=_tls_url(member.record),
                live=name in self._live,
                nonce=member.nonce,
            )
            for name, member in sorted(self._catalog.members.items())
        )

    def is_replaced(self, instance: str, nonce: str) -> bool:
        """That process is known to be gone: a newer one runs under its id."""
        member = self._catalog.members.get(instance)
        return member is not None and nonce in member.retired

    def tails(
        self, table: str, incarnation: str, reports: Mapping[str, InstanceReport] | None = None
    ) -> dict[str, dict[str, TailReport]]:
        """partition (as text) -> instance -> report. `reports`: the table's, if they are at hand."""
        found: dict[str, dict[str, TailReport]] = {}
        for name, report in (self.reports() if reports is None else reports).items():
            for tail in report.tails:
                if tail.table == table and tail.incarnation == incarnation:
                    found.setdefault(str(tail.partition), {})[name] = tail
        return found

    def snapshots(self, table: str) -> dict[str, dict[str, int]]:
        """Segment of an upsert table -> live server -> where its snapshot of the versions is to be continued."""
        found: dict[str, dict[str, int]] = {}
        for name, report in self.reports().items():
            for said in report.segments:
                if said.table == table and said.snapshot_log_offset is not None:
                    found.setdefault(said.segment, {})[name] = said.snapshot_log_offset
        return found

    def pipeline(
        self, table: str, incarnation: str, holder: str | None, reports: Mapping[str, InstanceReport] | None = None
    ) -> PipelineReport | None:
        """What the live pipeline says of a table; the lease holder's word goes first. `reports` as of `tails`."""
        found: PipelineReport | None = None
        for name, report in (self.reports() if reports is None else reports).items():
            for said in report.pipelines:
                if said.table == table and said.incarnation == incarnation:
                    if holder is not None and holder.startswith(name):
                        return said
                    found = said
        return found

    def last_tails(self, table: str, incarnation: str) -> dict[str, tuple[list[TailReport], int]]:
        """Server, dead or alive -> its last word of the table's tails, and how many ms ago it said so."""
        now_ms = self._clock.now_ms()
        with self._catalog.lock:
            heard = list(self._heard.items())
        found: dict[str, tuple[list[TailReport], int]] = {}
        for name, last in heard:
            tails = [tail for tail in last.report.tails if (tail.table, tail.incarnation) == (table, incarnation)]
            if tails:
                found[name] = (tails, max(0, now_ms - last.at_ms))
        return found

    def last_pipeline(self, table: str, incarnation: str, holder: str | None) -> tuple[str, PipelineReport, int] | None:
        """The last word of a table's pipeline, dead or alive, with who said it and how many ms ago; of several, that of
        the lease's holder, or else the newest."""
        now_ms = self._clock.now_ms()
        with self._catalog.lock:
            heard = list(self._heard.items())
        known = [
            (holder is not None and holder.startswith(name), last.at_ms, name, said)
            for name, last in heard
            for said in last.report.pipelines
            if (said.table, said.incarnation) == (table, incarnation)
        ]
        if not known:
            return None
        _, at_ms, name, said = max(known, key=lambda one: one[:3])
        return name, said, max(0, now_ms - at_ms)

    def names_incarnation(self, incarnation: str) -> bool:
        """Some live instance still works on this table."""
        return any(
            any(tail.incarnation == incarnation for tail in report.tails)
            or any(pipeline.incarnation == incarnation for pipeline in report.pipelines)
            for report in self.reports().values()
        )


def _by_table(report: InstanceReport) -> dict[str, InstanceReport]:
    segments: dict[str, list[SegmentReport]] = {}
    tails: dict[str, list[TailReport]] = {}
    pipelines: dict[str, list[PipelineReport]] = {}
    for segment in report.segments:
        segments.setdefault(segment.table, []).append(segment)
    for tail in report.tails:
        tails.setdefault(tail.table, []).append(tail)
    for pipeline in report.pipelines:
        pipelines.setdefault(pipeline.table, []).append(pipeline)
    return {
        table: InstanceReport(
            segments=tuple(segments.get(table, ())),
            tails=tuple(tails.get(table, ())),
            pipelines=tuple(pipelines.get(table, ())),
        )
        for table in {**segments, **tails, **pipelines}
    }


def _tls_url(record: InstanceRecord) -> str:
    return f"https://{_bracketed(record.host)}:{record.tls_port}" if record.tls_port else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _hash_of_segments(report: InstanceReport) -> int:
    return hash(tuple((said.table, said.segment, said.state, said.checksum, said.error) for said in report.segments))


def _hash_of_rest(report: InstanceReport) -> int:
    return hash(
        (
            tuple((t.table, t.incarnation, t.partition, t.state == CATCHING_UP, t.error) for t in report.tails),
            tuple((p.table, p.incarnation, p.state, p.generation, p.restarts, p.error) for p in report.pipelines),
        )
    )
