# SPDX-License-Identifier: Apache-2.0
"""The deep store's objects: the controller claims the store, looks after what records name, sweeps what none names.

Rules
- A store that was chosen is claimed once, and its id kept: an empty directory in its place is a share that is not
  mounted, not a new store. Nobody else makes one.
- Records go first, objects after; what cannot be deleted now, no record names, so that `sweep` removes it later.
- URLs are whole: what is in a store that was configured before is read and deleted there. It is neither looked after
  nor swept.
- An object that is gone, or has another size than was written, is recorded as a failed upload: repair and the
  committer upload it again.
- Stores are asked outside of the catalog's lock.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cremant.completion.audit import Audit, Stored, without_object
from cremant.controller.catalog import Catalog, Record, StoreRecord, store_key
from cremant.controller.clock import Clock
from cremant.model.cluster import TableRecord, segment_key
from cremant.model.errors import CremantError, NotFound
from cremant.model.limits import COMMIT_LEASE_MAX_MS, STORE_LOOKS_MAX
from cremant.model.segments import SegmentMetadata
from cremant.shell.logs import log_event, log_failure
from cremant.store.deepstore import DeepStore, delete_by_url, is_in, table_prefix
from cremant.store.metadata import StoreConflict

_log = logging.getLogger(__name__)

#: A stored object that no record names is removed once it is this old by the store's clock, and was seen so for a while
#: by ours: no commit takes longer, and no clock that jumps makes a fresh object old.
ORPHAN_OBJECT_AGE_MS = 2 * 3_600_000
ORPHAN_SEEN_MS = COMMIT_LEASE_MAX_MS
#: What `probe` writes. A table may have that name, so the whole of it counts.
_PROBE = re.compile(r"^probe/[0-9a-f]{16}$")


@dataclass(slots=True)
class Looked:
    """Totals for metrics. `gone`: with those that are damaged."""

    objects: int = 0
    gone: int = 0
    swept: int = 0


class Objects:
    def __init__(self, catalog: Catalog, deep_store: DeepStore, clock: Clock) -> None:
        self._catalog = catalog
        self._deep_store = deep_store
        self._clock = clock
        self._claimed = False
        #: Why it could not be claimed last.
        self._unclaimed = ""
        #: Name of a stored object -> when it was first seen without a record.
        self._orphans_since_ms: dict[str, int] = {}
        self._audit = Audit()
        self.looked = Looked()
        with catalog.lock:
            for table, segments in catalog.segments.items():
                for segment in segments.values():
                    self._audit.put(table, segment.name, segment.store_url, clock.now_ms())
            catalog.on_record(self._on_record)

    def _on_record(self, key: str, record: Record | None) -> None:
        _, kind, table, *rest = key.split("/")
        if kind == "segments":
            url = record.store_url if isinstance(record, SegmentMetadata) else None
            self._audit.put(table, rest[0], url, self._clock.now_ms())

    # --- the store ------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Until it was done once. Raises CremantError."""
        if self._claimed:
            return
        uri = self._deep_store.uri
        known = self._catalog.store_id(uri)
        found = self._deep_store.claim(known)
        if found and not known:
            record = StoreRecord(uri=uri, id=found, claimed_ms=self._clock.now_ms())
            self._catalog.commit({store_key(uri): record})
        self._claimed = True
        log_event(_log, "deep store claimed", store=uri, id=found)

    def keep_claimed(self) -> None:
        """The same; a store that is down is told once."""
        try:
            self.claim()
        except StoreConflict:  # of the metadata: another controller took over
            raise
        except CremantError as error:
            if str(error) != self._unclaimed:
                log_failure(_log, "the deep store cannot be used yet", error, store=self._deep_store.uri)
            self._unclaimed = str(error)

    # --- what records name ----------------------------------------------------------------------------------------

    def hurry(self, table: str, segments: Iterable[str]) -> None:
        """Somebody doubts these: they are looked at in the next round."""
        with self._catalog.lock:
            for segment in segments:
                self._audit.hurry(table, segment, self._clock.now_ms())

    def look(self) -> int:
        """Looks whether the objects that are due are there. Returns how many are not. A store that does not answer says
        nothing about them, and ends the round."""
        with self._catalog.lock:
            due = self._audit.take(STORE_LOOKS_MAX, self._clock.now_ms())
        gone, answers, left = 0, True, deque(due)
        try:
            while left and answers:
                answers, is_gone = self._look(left[0])
                gone += is_gone
                if answers:
                    self._looked(left.popleft(), answered=True)
        finally:  # also when a record could not be written: nothing is forgotten
            for stored in left:
                self._looked(stored, answered=False)
        return gone

    def _looked(self, stored: Stored, *, answered: bool) -> None:
        with self._catalog.lock:
            self._audit.looked(stored, self._clock.now_ms(), answered=answered)

    def _look(self, stored: Stored) -> tuple[bool, bool]:
        """Whether the store answered; whether the object is gone."""
        if not is_in(self._deep_store, stored.url):  # in a store that was configured before
            return True, False
        try:
            wrong = self._wrong_with(stored)
        except CremantError as error:
            log_failure(_log, "stored objects are looked at later", error, url=stored.url)
            return False, False
        self.looked.objects += 1
        if wrong:
            self.looked.gone += 1
            self._gone(stored, wrong)
        return True, bool(wrong)

    def _wrong_with(self, stored: Stored) -> str:
        """ "" = it is there as it was written, by its size. What is wrong is believed only of the store that was
        claimed: another one in its place (an empty mount point, another service with a bucket of that name) misses
        everything, and what a record does not name any more is swept when the right one is back."""
        expected = self._size_of(stored)
        try:
            found = self._deep_store.size(self._deep_store.name_of(stored.url))
            if expected in (0, found):
                return ""
            wrong = f"its object is damaged: expected {expected} bytes, found {found}"
        except NotFound as error:
            wrong = f"its object is gone: {error}"
        self.claim()
        self._deep_store.claim(self._catalog.store_id(self._deep_store.uri))
        return wrong

    def _size_of(self, stored: Stored) -> int:
        """0 = nobody knows."""
        with self._catalog.lock:
            known = self._catalog.segments.get(stored.table, {}).get(stored.segment)
            return known.size_bytes if known is not None and known.store_url == stored.url else 0

    def _gone(self, stored: Stored, error: str) -> None:
        with self._catalog.lock:
            known = self._catalog.segments.get(stored.table, {}).get(stored.segment)
            changed = without_object(known, stored.url, error, self._clock.now_ms()) if known is not None else None
            if changed is None:
                return
            self._catalog.commit({segment_key(stored.table, stored.segment): changed})
        log_event(
            _log, "segment not stored", level=logging.WARNING, segment=stored.segment, url=stored.url, error=error
        )

    def delete(self, record: TableRecord, url: str) -> None:
        """Of a segment of this table whose record is gone."""
        try:
            prefix = table_prefix(record.config.name, record.incarnation)
            delete_by_url(self._deep_store, url, prefix, self._catalog.store_id)
        except CremantError as error:
            if is_in(self._deep_store, url):  # nobody names it any more: it is swept once the store answers
                log_failure(_log, "a stored object stays for now", error, url=url)
            else:
                log_failure(_log, "an object of a former store stays: remove it by hand", error, url=url)

    # --- what no record names -------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Removes stored objects of our tables that no record names, once they are old enough, and what probes have
        left. Returns how many. What else is in the store, also of another cluster, is not ours to remove."""
        with self._catalog.lock:
            prefixes = [table_prefix(name, record.incarnation) for name, record in self._catalog.tables.items()]
        stored = [found for prefix in sorted(prefixes) for found in self._deep_store.list(prefix)]
        stored += [found for found in self._deep_store.list("probe/") if _PROBE.match(found.name)]
        seen = {found.name for found in stored if found.age_ms > ORPHAN_OBJECT_AGE_MS} - self._named()
        now_ms = self._clock.now_ms()
        self._orphans_since_ms = {name: self._orphans_since_ms.get(name, now_ms) for name in seen}
        count = 0
        for name in sorted(
            name for name, since_ms in self._orphans_since_ms.items() if now_ms - since_ms >= ORPHAN_SEEN_MS
        ):
            if name not in self._named():  # deleting takes a while: it may have been uploaded again, and recorded
                self._deep_store.delete(name)
                count += 1
        self.looked.swept += count
        return count

    def sweep_unfinished(self) -> int:
        """What writers that died have begun in the store. Returns how many."""
        return self._deep_store.sweep(ORPHAN_OBJECT_AGE_MS)

    def _named(self) -> set[str]:
        """Objects of this store that records name."""
        with self._catalog.lock:
            segments = [one for known in self._catalog.segments.values() for one in known.values()]
        urls = [url for segment in segments for url in segment.objects]
        return {self._deep_store.name_of(url) for url in urls if is_in(self._deep_store, url)}
