# SPDX-License-Identifier: Apache-2.0
"""What live servers report of segments, found by segment: who wants to know of a few does not go through all."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cremant.completion.orders import Key
from cremant.model.cluster import InstanceReport, SegmentReport


class Said:
    """A report is gone through once: what is as it was keeps its place. For one thread; it needs no lock, reports never
    change."""

    def __init__(self) -> None:
        self._by_server: dict[str, tuple[tuple[SegmentReport, ...], dict[Key, SegmentReport]]] = {}

    def take(self, reports: Mapping[str, InstanceReport]) -> int:
        """The last reports of those that live. Returns how many segments' reports had to be gone through."""
        before, read = self._by_server, 0
        self._by_server = {}
        for server, report in reports.items():
            known = before.get(server)
            if known is None or known[0] is not report.segments:
                known = report.segments, {Key(said.table, said.segment): said for said in report.segments}
                read += len(report.segments)
            self._by_server[server] = known
        return read

    def of(self, wanted: Collection[Key]) -> dict[Key, dict[str, SegmentReport]]:
        found: dict[Key, dict[str, SegmentReport]] = {}
        for key in wanted:
            for server, (_, said) in self._by_server.items():
                if key in said:
                    found.setdefault(key, {})[server] = said[key]
        return found
