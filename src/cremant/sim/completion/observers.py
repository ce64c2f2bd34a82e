# SPDX-License-Identifier: Apache-2.0
"""What must hold in the world of completion: of each write to the metadata store, and of everything after each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from cremant.completion.copies import holders_of, is_safe
from cremant.model.cluster import TableRecord
from cremant.model.completion import StorePolicy, policy_of
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.sim.engine import Violation
from cremant.store.metadata import Delete, Put, Update
from cremant.wire.messages import CommitEnd

if TYPE_CHECKING:
    from cremant.sim.completion.world import World

_ORDER = (SegmentStatus.IN_PROGRESS, SegmentStatus.COMMITTING, SegmentStatus.DONE)


class Observers:
    """`segments`: the durable record of each segment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.segments: dict[str, SegmentMetadata] = {}
        #: (segment, token) -> who was told to commit with it.
        self._granted: dict[tuple[str, int], str] = {}
        #: Segments that were on a disk that was lost.
        self._wiped: set[str] = set()
        #: Policies that were ever in force.
        self._policies: set[StorePolicy] = set()
        #: Segments that a scenario lost on purpose: their loss must be recorded.
        self.given_up: set[str] = set()
        self._dirty = True
        self.checks = 0

    def changed(self) -> None:
        self._dirty = True

    # --- writes ---

    def committed(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if isinstance(update, Put) and update.key.startswith("/tables/"):
                record = msgspec.json.decode(update.value, type=TableRecord)
                self._policies.add(policy_of(record.config, has_store=True))
            elif isinstance(update, Delete) and update.key.startswith("/segments/"):
                self.segments.pop(update.key.rpartition("/")[2])
        written = _segments(updates)
        self._dirty = self._dirty or bool(written)
        opened = {one.partition: one for one in written if one.status is SegmentStatus.IN_PROGRESS}
        for new in written:
            old = self.segments.get(new.name)
            self.segments[new.name] = new
            if old is not None:
                self._changed(old, new, opened.get(new.partition))

    def steps_of(self, updates: Sequence[Update]) -> frozenset[str]:
        """What a write does to segments, in a word each."""
        steps = set()
        for new in _segments(updates):
            old = self.segments.get(new.name)
            if old is None:
                continue
            if new.status is not old.status:
                steps.add("decide" if new.status is SegmentStatus.COMMITTING else "commit")
            elif new.commit_token != old.commit_token:
                steps.add("take over")
            elif new.store_state is not old.store_state:
                steps.add("store")
            elif new.replicas != old.replicas:
                steps.add("replicas")
            elif new.copies != old.copies:
                steps.add("copies")
            elif new.lost != old.lost:
                steps.add("loss")
        return frozenset(steps)

    def _changed(self, old: SegmentMetadata, new: SegmentMetadata, following: SegmentMetadata | None) -> None:
        self.checks += 1
        if old.end is not None and old.end != new.end:
            raise Violation("I-1", f"{new.name} ended at {old.end_offset}, and now at {new.end_offset}")
        if _ORDER.index(new.status) < _ORDER.index(old.status):
            raise Violation("I-1", f"{new.name} was {old.status}, and is {new.status} again")
        if old.status is SegmentStatus.DONE and old.checksum != new.checksum:
            raise Violation("I-3", f"{new.name} had content {old.checksum}, and now {new.checksum}")
        if new.commit_token < old.commit_token:
            raise Violation("token", f"{new.name}: token {new.commit_token} after {old.commit_token}")
        if new.commit_token == old.commit_token and new.committer != old.committer:
            raise Violation("token", f"{new.name}: token {new.commit_token} of {old.committer} and of {new.committer}")
        if new.status is SegmentStatus.DONE and old.status is not SegmentStatus.DONE:
            self._done(new, following)
        if new.replicas != old.replicas and new.status is SegmentStatus.DONE:
            self._moved(old, new)

    def _done(self, done: SegmentMetadata, following: SegmentMetadata | None) -> None:
        if following is None or following.start != done.end or following.sequence != done.sequence + 1:
            raise Violation("I-2", f"{done.name} ends at {done.end}, the next begins at {following}")
        if self._policies == {StorePolicy.STORE_REQUIRED} and done.store_state is not StoreState.STORED:
            raise Violation("policy", f"{done.name} is DONE and {done.store_state}, the store is required")
        if self._policies == {StorePolicy.PEERS_ONLY} and done.store_state is not StoreState.NONE:
            raise Violation("policy", f"{done.name} is {done.store_state}, only peers are wanted")

    def _moved(self, old: SegmentMetadata, new: SegmentMetadata) -> None:
        """The last verified copy stays, wherever the others are."""
        held = {holder for holder in holders_of(old) if self._world.servers[holder].read(old.name) == old.checksum}
        if held and held.isdisjoint(new.replicas) and new.store_state is not StoreState.STORED:
            raise Violation("last copy", f"{new.name} is on {sorted(held)}, and moves to {new.replicas}")

    # --- messages ---

    def told_to_commit(self, segment: str, token: int, instance: str) -> None:
        self.checks += 1
        before = self._granted.setdefault((segment, token), instance)
        if before != instance:
            raise Violation("token", f"{segment}: token {token} was given to {before} and to {instance}")

    def commit_accepted(self, message: CommitEnd) -> None:
        self.checks += 1
        record = self.segments[message.segment]
        said = (message.token, message.instance, message.end, message.checksum)
        if (record.commit_token, record.committer, record.end, record.checksum) != said:
            raise Violation(
                "fencing", f"{message.segment}: a commit of {message.instance} with token {message.token} counts, in "
                f"force is {record.commit_token} of {record.committer}",
            )  # fmt: skip

    def installed(self, server: str, segment: str, content: str) -> None:
        """I-3: what a replica serves is what was committed."""
        self.checks += 1
        record = self.segments.get(segment)
        if record is None:
            return  # it was deleted meanwhile, and is removed again
        if record.status is not SegmentStatus.DONE or record.checksum != content:
            raise Violation("I-3", f"{server} installs {content} of {segment}, committed is {record.checksum}")

    # --- everything ---

    def look(self) -> None:
        """After each step that changed anything."""
        if not self._dirty:
            return
        self._dirty = False
        world = self._world
        held: dict[str, set[str]] = {}
        for server in world.servers.values():
            for name in server.disk:
                held.setdefault(name, set()).add(server.read(name))
        if self._policies == {StorePolicy.PEERS_ONLY} and world.store.objects:
            raise Violation("policy", f"{next(iter(world.store.objects))} was uploaded, only peers are wanted")
        for segment in self.segments.values():
            self.checks += 1
            if segment.name in self.given_up:
                continue
            stored = segment.store_state is StoreState.STORED
            rotten = segment.store_url in world.store.rotten
            if stored and not rotten and world.store.objects.get(segment.store_url or "") != segment.checksum:
                found = world.store.objects.get(segment.store_url or "")
                raise Violation("store", f"{segment.name} is stored as {segment.store_url}, which is {found}")
            copied = segment.checksum is not None and segment.checksum in held.get(segment.name, ())
            earliest = world.logs[segment.partition].earliest
            if (rotten or not stored) and not copied and earliest > segment.start.log_offset:
                raise Violation(
                    "I-6", f"{segment.name} ({segment.status}) is in no store, on no disk, and the log begins at "
                    f"{earliest} behind {segment.start.log_offset}",
                )  # fmt: skip

    def wiped(self, names: Iterable[str]) -> None:
        self._wiped.update(names)

    def is_mended(self, server: str, *, whole: bool = False) -> bool:
        """Whether this disk may fail, one fault at a time: what the metadata says of copies is so, what was
        on lost disks survives the next loss, and no copy on this one is alone (operators may have wanted it so). Of one
        that is lost as a `whole` others may have copies that the metadata does not name."""
        servers, logs = self._world.servers, self._world.logs
        believed = all(
            servers[holder].read(segment.name) == segment.checksum
            for segment in self.segments.values()
            if segment.status is SegmentStatus.DONE
            for holder in holders_of(segment)
        )
        concerned = self._wiped.union(servers[server].disk)
        found = [self.segments[name] for name in concerned if name in self.segments]
        alone = [one for one in found if not is_safe(one) and logs[one.partition].earliest > one.start.log_offset]
        kept = whole and all(one.name not in self._wiped and self._is_kept(one, server) for one in alone)
        if not believed or (alone and not kept):
            return False
        self._wiped.clear()
        return True

    def _is_kept(self, segment: SegmentMetadata, without: str) -> bool:
        """Another server has it, and does not rely on that one: it is down, or knows that the other is away."""
        others = (one for one in self._world.servers.values() if one.id != without)
        return any(
            one.read(segment.name) == segment.checksum
            and (one.process is None or (one.process.view is not None and without not in one.process.view.live))
            for one in others
        )


def _segments(updates: Sequence[Update]) -> list[SegmentMetadata]:
    return [
        msgspec.json.decode(update.value, type=SegmentMetadata)
        for update in updates
        if isinstance(update, Put) and update.key.startswith("/segments/")
    ]
