# SPDX-License-Identifier: Apache-2.0
"""The controller's half of segment completion: named cases, and a small adversary that delivers late, doubled and in
any order, with committers that stall and come back."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from cremant.cluster.partitions import open_partition
from cremant.completion.segment import (
    TRANSITIONS,
    CommitEnded,
    CommitterProgressed,
    CompletionMachine,
    Consumed,
    Effect,
    Event,
    Persist,
    Remember,
    RenewLease,
    Reply,
    Reports,
    Stored,
    lease_ms,
    transition_table,
)
from cremant.model.cluster import PartitionRecord
from cremant.model.limits import (
    COMMIT_LEASE_MAX_MS,
    COMMIT_LEASE_MS,
    WINNER_BEHIND_MS,
    WINNER_BEHIND_ROWS_MAX,
    WINNER_WAIT_MS,
)
from cremant.model.offsets import Position, Watermark
from cremant.model.segments import SegmentMetadata, SegmentStatus, StoreState
from cremant.segment.cuts import FORCE_COMMIT, PRESSED, ROW_LIMIT, SIZE_LIMIT, TIME_LIMIT
from cremant.wire.messages import CommitEnd, CompletionStatus, SegmentStored


def at(offset: int) -> Position:
    return Position(log_offset=offset * 10, epoch=offset, generation=1, next_offset=offset)


class Store:
    """Durable records of one partition, and the machine made anew for each event, as the controller does it."""

    def __init__(self, replicas: tuple[str, ...] = ("s1", "s2", "s3")) -> None:
        self.partition, segment = open_partition("t", 0, 0, replicas, 0)
        self.segments = {segment.name: segment}
        self.renewed: dict[str, int] = {}
        self.reports: dict[str, Reports] = {}
        #: How far replicas that live and consume show rows.
        self.visible: dict[str, int] = {}
        self.rules: set[str] = set()
        self.grants: set[tuple[str, int]] = set()

    @property
    def first(self) -> SegmentMetadata:
        return min(self.segments.values(), key=lambda s: s.sequence)

    def send(self, event: Event, now_ms: int, segment: str | None = None) -> Reply | None:
        name = segment or self.first.name
        machine = CompletionMachine.recover(
            "t", self.segments[name], self.partition, renewed_until_ms=self.renewed.get(name, 0),
            reports=self.reports.get(name), visible=self.visible,
        )  # fmt: skip
        reply: Reply | None = None
        for effect in machine.step(event, now_ms):
            assert reply is None, "nothing may follow the reply"
            reply = self._carry_out(name, effect)
        if reply is not None:
            self.rules.add(reply.rule)
        return reply

    def _carry_out(self, name: str, effect: Effect) -> Reply | None:
        match effect:
            case Persist():
                self._persist(effect)
            case RenewLease(until_ms=until_ms):
                self.renewed[name] = until_ms
            case Remember(reports=reports):
                self.reports[name] = reports
            case Reply():
                return effect
        return None

    def _persist(self, effect: Persist) -> None:
        old, new = self.segments[effect.segment.name], effect.segment
        assert old.end is None or new.end == old.end, "I-1: one end per segment"
        if old.status is SegmentStatus.DONE:
            assert old.store_state is not StoreState.STORED, "what is stored stays as it is"
            upload = {"store_state", "store_url", "store_error", "store_changed_ms", "file_checksum", "size_bytes"}
            changed = {name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)}
            assert changed <= upload, "a sealed segment changes only by what is known of its upload"
            self.segments[new.name] = new
            return
        if new.commit_token != old.commit_token:
            assert (new.name, new.commit_token) not in self.grants, "a token is given once"
            self.grants.add((new.name, new.commit_token))
        self.segments[new.name] = new
        if new.status is SegmentStatus.DONE:
            opened, moved = effect.next_segment, effect.partition
            assert opened is not None
            assert moved is not None
            assert opened.start == new.end, "I-2: the next segment starts exactly at the end"
            assert opened.start_offset == new.end_offset
            assert opened.name not in self.segments
            assert moved == PartitionRecord(
                partition=0, consuming=opened.name, sequence=new.sequence + 1, replicas=self.partition.replicas,
                start_offset=0,
            )  # fmt: skip
            self.segments[opened.name] = opened
            self.partition = moved


def end(store: Store, instance: str, token: int, position: Position, **fields: Any) -> CommitEnded:
    values: dict[str, Any] = {
        "instance": instance, "table": "t", "incarnation": "i", "segment": store.first.name, "token": token,
        "end": position, "rows": 5, "size_bytes": 7, "checksum": "c1", "file_checksum": "f1", "store_url": "file:///x",
        "store_state": StoreState.STORED,
        **fields,
    }  # fmt: skip
    return CommitEnded(CommitEnd(**values))


def stored(store: Store, segment: str | None = None, **fields: Any) -> Stored:
    values: dict[str, Any] = {
        "instance": "s1", "table": "t", "incarnation": "i", "segment": segment or store.first.name, "checksum": "c1",
        "file_checksum": "f1", **fields,
    }  # fmt: skip
    if "error" not in fields:
        values.setdefault("url", "file:///x")
    return Stored(SegmentStored(**values))


def status(reply: Reply | None) -> CompletionStatus:
    assert reply is not None
    return reply.status


@pytest.mark.parametrize("reason", [ROW_LIMIT, SIZE_LIMIT, FORCE_COMMIT])
def test_of_a_cut_that_is_the_same_everywhere_the_first_reporter_commits_at_once(reason: str) -> None:
    store = Store()
    store.visible = {"s1": 100, "s2": 100, "s3": 100}
    reply = store.send(Consumed("s2", at(7), reason), 0)
    assert reply == Reply(CompletionStatus.COMMIT, at(7), 1, "first-wins")
    assert (store.first.status, store.first.committer, store.first.end_offset) == (SegmentStatus.COMMITTING, "s2", 7)


@pytest.mark.parametrize("reason", [TIME_LIMIT, PRESSED])
def test_of_other_cuts_the_largest_offset_wins_once_all_live_replicas_have_reported(reason: str) -> None:
    store = Store()
    store.visible = {"s1": 9, "s2": 9, "s3": 9}
    assert store.send(Consumed("s1", at(5), reason), 0) == Reply(CompletionStatus.HOLD, rule="may-report")
    assert status(store.send(Consumed("s2", at(8), reason), 1)) is CompletionStatus.HOLD
    assert store.first.status is SegmentStatus.IN_PROGRESS
    told = store.send(Consumed("s3", at(6), reason), 2)
    assert told == Reply(CompletionStatus.CATCH_UP, at(8), 1, "other-wins")
    assert (store.first.committer, store.first.end) == ("s2", at(8))
    assert store.send(Consumed("s2", at(9), "decided"), 3) == Reply(CompletionStatus.COMMIT, at(8), 1, "commit-again")


def test_the_caller_goes_before_others_with_the_same_offset() -> None:
    store = Store()
    store.visible = {"s1": 7, "s2": 7, "s3": 7}
    for instance in ("s1", "s2"):
        store.send(Consumed(instance, at(7), TIME_LIMIT), 0)
    assert store.send(Consumed("s3", at(7), TIME_LIMIT), 1) == Reply(CompletionStatus.COMMIT, at(7), 1, "largest-wins")


def test_replicas_that_do_not_report_are_waited_for_a_while_only() -> None:
    store = Store()
    store.visible = {"s1": 7, "s2": 7, "s3": 7}
    assert status(store.send(Consumed("s1", at(7), TIME_LIMIT), 50)) is CompletionStatus.HOLD
    assert status(store.send(Consumed("s1", at(7), TIME_LIMIT), 49 + WINNER_WAIT_MS)) is CompletionStatus.HOLD
    assert status(store.send(Consumed("s1", at(7), TIME_LIMIT), 50 + WINNER_WAIT_MS)) is CompletionStatus.COMMIT


def test_replicas_that_died_or_stopped_are_neither_waited_for_nor_chosen() -> None:
    store = Store()
    store.visible = {"s1": 9, "s2": 9, "s3": 9}
    store.send(Consumed("s2", at(9), TIME_LIMIT), 0)
    store.visible = {"s1": 9}  # s2 stopped after its report, s3 died without one
    assert store.send(Consumed("s1", at(5), TIME_LIMIT), 1) == Reply(CompletionStatus.COMMIT, at(5), 1, "largest-wins")


def test_a_cut_far_behind_what_a_live_replica_shows_is_refused_but_not_for_ever() -> None:
    store = Store()
    store.visible = {"s1": 7, "s2": 8 + WINNER_BEHIND_ROWS_MAX, "s3": 7}
    store.send(Consumed("s1", at(7), TIME_LIMIT), 0)
    store.send(Consumed("s3", at(7), TIME_LIMIT), 0)
    refused = store.send(Consumed("s1", at(7), TIME_LIMIT), WINNER_WAIT_MS)
    assert refused == Reply(CompletionStatus.HOLD, rule="far-behind")
    assert status(store.send(Consumed("s1", at(7), TIME_LIMIT), WINNER_BEHIND_MS)) is CompletionStatus.COMMIT
    other = Store()
    other.visible = dict(store.visible)
    other.send(Consumed("s1", at(7), TIME_LIMIT), 0)
    other.send(Consumed("s3", at(7), TIME_LIMIT), 0)
    ahead = at(8 + WINNER_BEHIND_ROWS_MAX)
    assert other.send(Consumed("s2", ahead, TIME_LIMIT), 1) == Reply(CompletionStatus.COMMIT, ahead, 1, "largest-wins")


def test_a_commit_seals_the_segment_and_opens_the_next_at_its_end() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    assert status(store.send(end(store, "s1", 1, at(7), min_time_ms=3), 60_000)) is CompletionStatus.COMMIT_SUCCESS
    done, opened = sorted(store.segments.values(), key=lambda s: s.sequence)
    assert (done.status, done.rows, done.checksum, done.min_time_ms) == (SegmentStatus.DONE, 5, "c1", 3)
    assert (done.store_state, list(done.copies)) == (StoreState.STORED, ["s1"])
    assert (opened.name, opened.sequence) == ("t__0__1__19700101T0001Z", 1)


def test_how_far_the_partition_was_visible_at_the_cut_is_kept_with_the_segment() -> None:
    store = Store()
    store.visible = {"s1": 100, "s2": 100, "s3": 100}
    store.send(Consumed("s2", at(7), ROW_LIMIT), 0)
    mark = Watermark(next_offset=7, epoch=3, max_ingestion_ms=5, caught_up_at_ms=9, source="logAppend", held_at_ms=4)
    store.send(end(store, "s2", 1, at(7), mark=mark), 1)
    assert (store.first.status, store.first.mark) == (SegmentStatus.DONE, mark)


def test_the_committer_asking_again_gets_the_same_token() -> None:
    store = Store()
    first = store.send(Consumed("s1", at(7)), 0)
    again = store.send(Consumed("s1", at(9)), 10)
    assert first is not None
    assert again is not None
    assert (again.status, again.token, again.end) == (first.status, first.token, first.end)


def test_others_wait_while_the_lease_runs_and_one_takes_over_when_it_lapsed() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    assert status(store.send(Consumed("s2", at(8)), COMMIT_LEASE_MS - 1)) is CompletionStatus.HOLD
    taken = store.send(Consumed("s2", at(8)), COMMIT_LEASE_MS)
    assert taken == Reply(CompletionStatus.COMMIT, at(7), 2, "take-over")
    assert status(store.send(end(store, "s1", 1, at(7)), COMMIT_LEASE_MS + 1)) is CompletionStatus.FAILED
    assert status(store.send(end(store, "s2", 2, at(7)), COMMIT_LEASE_MS + 2)) is CompletionStatus.COMMIT_SUCCESS


def test_a_lapsed_lease_that_nobody_took_still_commits() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    assert status(store.send(end(store, "s1", 1, at(7)), 10 * COMMIT_LEASE_MS)) is CompletionStatus.COMMIT_SUCCESS


def test_a_replica_before_the_cut_is_told_to_catch_up_and_never_to_commit() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    late = store.send(Consumed("s2", at(6)), 10 * COMMIT_LEASE_MS)
    assert late is not None
    assert (late.status, late.end) == (CompletionStatus.CATCH_UP, at(7))


def test_progress_of_the_committer_keeps_its_lease_and_of_others_does_not() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    assert store.send(CommitterProgressed("s1"), COMMIT_LEASE_MS - 1) is None
    assert status(store.send(Consumed("s2", at(7)), 2 * COMMIT_LEASE_MS - 2)) is CompletionStatus.HOLD
    store.send(CommitterProgressed("s2"), 2 * COMMIT_LEASE_MS - 2)
    assert status(store.send(Consumed("s2", at(7)), 2 * COMMIT_LEASE_MS - 1)) is CompletionStatus.COMMIT


def test_every_take_over_doubles_the_lease_up_to_a_bound() -> None:
    assert [lease_ms(token) for token in (1, 2, 3)] == [COMMIT_LEASE_MS, 2 * COMMIT_LEASE_MS, 4 * COMMIT_LEASE_MS]
    assert lease_ms(100) == COMMIT_LEASE_MAX_MS


def test_a_committer_that_only_asks_again_does_not_keep_its_lease() -> None:
    """Its build fails each time, for a full disk: another replica must get its turn."""
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    for now_ms in range(0, COMMIT_LEASE_MS, 1000):
        assert status(store.send(Consumed("s1", at(9)), now_ms)) is CompletionStatus.COMMIT
    assert status(store.send(Consumed("s2", at(9)), COMMIT_LEASE_MS)) is CompletionStatus.COMMIT
    assert store.first.committer == "s2"


def committed(**fields: Any) -> Store:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    store.send(end(store, "s1", 1, at(7), store_url=None, **fields), 1)
    return store


def test_an_upload_that_lands_after_the_commit_is_recorded_once() -> None:
    store = committed(store_state=StoreState.PENDING)
    assert (store.first.store_state, store.first.store_url) == (StoreState.PENDING, None)
    assert store.send(stored(store), 5) == Reply(CompletionStatus.KEEP, rule="stored", store_url="file:///x")
    assert (store.first.store_state, store.first.store_url) == (StoreState.STORED, "file:///x")
    assert store.first.store_changed_ms == 5
    assert status(store.send(stored(store), 6)) is CompletionStatus.KEEP
    other = store.send(stored(store, url="file:///y", instance="s2"), 7)
    assert other == Reply(CompletionStatus.DISCARD, rule="stored-other", store_url="file:///x")
    assert status(store.send(stored(store, error="late", instance="s2"), 8)) is CompletionStatus.DISCARD
    assert store.first.store_state is StoreState.STORED


def test_a_failed_upload_is_recorded_with_its_cause_until_one_lands() -> None:
    store = committed(store_state=StoreState.FAILED, store_error="no route")
    assert (store.first.store_state, store.first.store_error) == (StoreState.FAILED, "no route")
    assert status(store.send(stored(store, error="disk quota"), 5)) is CompletionStatus.KEEP
    assert (store.first.store_error, store.first.store_changed_ms) == ("disk quota", 5)
    assert status(store.send(stored(store, file_checksum="f2", size_bytes=77), 9)) is CompletionStatus.KEEP
    first = store.first
    assert (first.store_error, first.file_checksum, first.size_bytes) == (None, "f2", 77), "those of the object"


def test_an_upload_of_other_content_is_not_wanted() -> None:
    store = committed(store_state=StoreState.PENDING)
    assert status(store.send(stored(store, checksum="c2"), 5)) is CompletionStatus.DISCARD
    assert store.first.store_state is StoreState.PENDING


def test_an_upload_that_lands_before_its_commit_waits_for_it() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    assert status(store.send(stored(store), 1)) is CompletionStatus.HOLD
    assert status(store.send(stored(store, error="no"), 1)) is CompletionStatus.DISCARD
    assert store.first.store_state is StoreState.NONE


def test_the_longer_lease_of_a_committer_that_died_ends_as_if_it_were_the_first() -> None:
    store = Store()
    store.visible = {"s1": 9, "s2": 9, "s3": 9}
    store.send(Consumed("s1", at(7)), 0)
    store.send(Consumed("s2", at(7)), COMMIT_LEASE_MS)
    assert (store.first.committer, store.first.commit_token) == ("s2", 2)
    assert status(store.send(Consumed("s3", at(7)), 2 * COMMIT_LEASE_MS)) is CompletionStatus.HOLD
    del store.visible["s2"]
    assert status(store.send(Consumed("s3", at(7)), 2 * COMMIT_LEASE_MS - 1)) is CompletionStatus.HOLD
    assert status(store.send(Consumed("s3", at(7)), 2 * COMMIT_LEASE_MS)) is CompletionStatus.COMMIT


def test_a_lost_reply_to_a_commit_is_repeated() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    store.send(end(store, "s1", 1, at(7)), 1)
    assert status(store.send(end(store, "s1", 1, at(7)), 2)) is CompletionStatus.COMMIT_SUCCESS
    assert status(store.send(end(store, "s1", 1, at(7), checksum="other"), 3)) is CompletionStatus.FAILED


def test_after_the_commit_replicas_keep_what_they_have() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    store.send(end(store, "s1", 1, at(7)), 1)
    kept = store.send(Consumed("s2", at(9)), 2)
    assert kept == Reply(CompletionStatus.KEEP, at(7), 1, "keep")
    assert status(store.send(Consumed("s3", at(3)), 2)) is CompletionStatus.CATCH_UP


@pytest.mark.parametrize("change", [{"token": 2}, {"position": at(8)}, {"instance": "s2"}])
def test_a_commit_with_another_token_end_or_sender_fails_and_changes_nothing(change: dict[str, Any]) -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    before = store.first
    arguments = {"instance": "s1", "token": 1, "position": at(7), **change}
    assert status(store.send(end(store, **arguments), 1)) is CompletionStatus.FAILED
    assert store.first == before


def test_a_commit_before_any_decision_fails() -> None:
    store = Store()
    assert status(store.send(end(store, "s1", 0, at(7)), 0)) is CompletionStatus.FAILED


def test_an_empty_segment_is_not_cut() -> None:
    assert status(Store().send(Consumed("s1", at(0)), 0)) is CompletionStatus.HOLD


def test_a_server_that_is_no_replica_is_told_to_discard() -> None:
    assert status(Store().send(Consumed("s9", at(7)), 0)) is CompletionStatus.DISCARD


def test_a_step_that_could_not_be_persisted_changed_nothing() -> None:
    """The driver drops the machine when its compare-and-set is lost: the record alone is the state."""
    store = Store()
    machine = CompletionMachine.recover("t", store.first, store.partition)
    machine.step(Consumed("s1", at(7)), 0)
    assert store.first.status is SegmentStatus.IN_PROGRESS
    assert machine.segment == store.first


class Adversary:
    """Three replicas, a network that delays, doubles, reorders and drops, committers that stall past their lease, a
    controller that forgets every volatile lease. Messages in flight may be of any age."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.store = Store()
        self.now_ms = 0
        self.flight: list[tuple[Event, str]] = []
        self.working: dict[str, Reply] = {}
        self.acknowledged: list[tuple[str, Position]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now_ms += self.dice.choice([1, 100, COMMIT_LEASE_MS // 2, COMMIT_LEASE_MS + 1])
            self.dice.choice([self._report, self._report, self._finish, self._deliver, self._deliver, self._restart])()
        self._check_chain()

    def _report(self) -> None:
        segment = self.dice.choice(sorted(self.store.segments))
        offset = self.store.segments[segment].start_offset + self.dice.randint(0, 9)
        sender = self.dice.choice(["s1", "s2", "s3", "s9"])
        self.store.visible = {
            i: self.dice.choice([0, 9, 10**6]) for i in ("s1", "s2", "s3") if self.dice.random() < 0.8
        }
        event: Event = Consumed(sender, at(offset), self.dice.choice([ROW_LIMIT, TIME_LIMIT, TIME_LIMIT, PRESSED]))
        if self.dice.random() < 0.2:
            event = CommitterProgressed(sender)
        if self.dice.random() < 0.05:
            event = end(self.store, sender, self.dice.randint(0, 3), at(offset), segment=segment)
        if self.dice.random() < 0.2:
            said = self.dice.choice([{"url": "file:///x"}, {"url": "file:///y"}, {"error": "down"}, {"checksum": "c2"}])
            event = stored(self.store, segment, **said)
        self._post(event, segment)

    def _finish(self) -> None:
        if not self.working:
            return
        key = self.dice.choice(sorted(self.working))
        instance, segment = key.split("|")
        reply = self.working[key]
        assert reply.end is not None
        state = self.dice.choice([StoreState.STORED, StoreState.PENDING, StoreState.FAILED, StoreState.NONE])
        url = "file:///x" if state is StoreState.STORED else None
        event = end(self.store, instance, reply.token, reply.end, segment=segment, store_state=state, store_url=url)
        self._post(event, segment)

    def _post(self, event: Event, segment: str) -> None:
        for _ in range(self.dice.choice([0, 1, 1, 1, 2])):
            self.flight.insert(self.dice.randint(0, len(self.flight)), (event, segment))

    def _deliver(self) -> None:
        if not self.flight:
            return
        event, segment = self.flight.pop(self.dice.randrange(len(self.flight)))
        reply = self.store.send(event, self.now_ms, segment)
        if reply is None:
            return
        if reply.status is CompletionStatus.COMMIT and isinstance(event, Consumed):
            self.working[f"{event.instance}|{segment}"] = reply
        if reply.status is CompletionStatus.COMMIT_SUCCESS and isinstance(event, CommitEnded):
            self.acknowledged.append((segment, event.message.end))

    def _restart(self) -> None:
        if self.dice.random() < 0.2:
            self.store.renewed.clear()
            self.store.reports.clear()

    def _check_chain(self) -> None:
        chain = sorted(self.store.segments.values(), key=lambda s: s.sequence)
        assert [s.sequence for s in chain] == list(range(len(chain)))
        assert [s.status for s in chain[:-1]] == [SegmentStatus.DONE] * (len(chain) - 1)
        assert chain[-1].status is not SegmentStatus.DONE
        for before, after in itertools.pairwise(chain):
            assert before.end == after.start
        assert self.store.partition.consuming == chain[-1].name
        for segment, position in self.acknowledged:
            assert self.store.segments[segment].end == position
            assert self.store.segments[segment].status is SegmentStatus.DONE


def test_under_an_adversary_ends_are_unique_and_segments_join_without_gap_or_overlap() -> None:
    rules: set[str] = set()
    sealed = 0
    for seed in range(400):
        adversary = Adversary(seed)
        adversary.run(120)
        rules |= adversary.store.rules
        sealed += len(adversary.store.segments) - 1
    assert sealed > 400
    unreached = {row[0] for row in TRANSITIONS} - rules - {"renew", "not-mine"}
    assert unreached == set(), "rows of the table that no seed reached"


def test_the_table_prints_as_markdown() -> None:
    lines = transition_table().splitlines()
    assert len(lines) == len(TRANSITIONS) + 2
    assert lines[0].startswith("| rule | state | event |")


def test_a_record_round_trips_with_everything_the_machine_needs() -> None:
    store = Store()
    store.send(Consumed("s1", at(7)), 0)
    assert msgspec.json.decode(msgspec.json.encode(store.first), type=SegmentMetadata) == store.first
