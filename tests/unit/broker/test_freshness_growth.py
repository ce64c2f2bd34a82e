# SPDX-License-Identifier: Apache-2.0
"""What is known of a stream counts for an answer only where it shows as much: after rewinds, while a table grows."""

from __future__ import annotations

from broker_kit import table_of

from cremant.broker.demand import Demand, settled
from cremant.broker.freshness import empty_until, freshness_of
from cremant.cluster.lowwater import Chosen, Marks
from cremant.cluster.shown import Mark, Shown
from cremant.model.offsets import OffsetRange, Watermark
from cremant.wire.messages import EpochState, PartitionAnswer, ServerAnswer

TABLE = table_of()


def answer(next_offset: int, fresh_ms: int | None, *, partition: int = 0, epoch: int = 10) -> ServerAnswer:
    mark = Watermark(next_offset=next_offset, epoch=epoch, max_ingestion_ms=fresh_ms)
    tail = PartitionAnswer(partition=partition, covered=OffsetRange(0, next_offset), watermark=mark)
    return ServerAnswer(instance="s", partitions=(tail,))


def test_a_proof_of_before_a_rewind_counts_for_no_epoch_after_it_that_shows_less() -> None:
    """Epochs go on, offsets went back: a broker that has not heard of the rewind takes the epoch for a later one."""
    proofs = {0: Mark(1_000, 8, 900)}
    found = freshness_of([answer(600, 500)], TABLE.record, 1, {}, 10, proofs)
    assert (found.fresh_ms, found.partitions[0].offset) == (500, 600)
    found = freshness_of([answer(1_000, 500)], TABLE.record, 1, {}, 10, proofs)
    assert (found.fresh_ms, found.partitions[0].offset) == (900, 1_000)
    # Nor for an earlier epoch, whatever it shows.
    assert freshness_of([answer(1_000, 500, epoch=7)], TABLE.record, 1, {}, 7, proofs).fresh_ms == 500


def test_an_epoch_of_before_a_partition_came_is_fresh_as_far_as_that_one_is_known_to_be_empty() -> None:
    shown = Shown()
    grown = TABLE.partitions[1:]
    cut = {"record": TABLE.record, "partitions_expected": 1, "floors": {}, "cut": 10}
    assert empty_until(grown, shown) == [None]
    assert freshness_of([answer(5, 900)], **cut, empty=[None]).fresh_ms is None

    def says(server: str, next_offset: int, fresh_ms: int) -> list[int | None]:
        mark = Watermark(next_offset=next_offset, epoch=0, caught_up_at_ms=fresh_ms)
        shown.note(1, server, mark, offset=next_offset, now_ms=0.0)
        return empty_until(grown, shown)

    assert says("Server_1", 0, 700) == [700]
    assert freshness_of([answer(5, 900)], **cut, empty=[700]).fresh_ms == 700
    assert says("Server_2", 0, 800) == [800]
    # Rows that one of them shows are not in the answer.
    assert says("Server_2", 3, 950) == [700]
    assert empty_until((), shown) == []


def test_nobody_waits_for_partitions_of_which_nothing_is_demanded() -> None:
    shown, both = Shown(), {0: ("a",), 1: ("a",)}
    shown.note(0, "a", Watermark(next_offset=42, epoch=5), offset=42, now_ms=0.0)
    own = Demand(rows={0: 42})
    assert settled(own, shown, both, 0).unmet == ()
    assert settled(own, shown, both, 900).unmet == (0, 1), "freshness is demanded of all"
    assert settled(Demand(rows={0: 43}), shown, both, 0).unmet == (0,)
    # What a client has seen is not waited for where no replica is alive; its own writes are.
    assert settled(Demand(rows={0: 42}), shown, {0: (), 1: ()}, 0).unmet == (0,)
    assert settled(Demand(rows={0: 42}, seen=True), shown, {0: (), 1: ()}, 0).unmet == ()


def test_a_table_without_partitions_is_not_known_to_be_fresh() -> None:
    assert settled(Demand(max_lag_ms=5), Shown(), {}, 900).unmet == (0,)
    assert settled(Demand(rows={0: 1}), Shown(), {}, 0).unmet == (0,)
    assert settled(Demand(), Shown(), {}, 0).unmet == ()


def test_a_token_of_an_upsert_table_does_not_wait_for_a_partition_that_has_closed_nothing() -> None:
    shown, both = Shown(), {0: ("a",), 1: ("a",)}
    seen = Demand(epoch=5, seen=True)
    shown.note(0, "a", Watermark(next_offset=42, epoch=5), offset=42, now_ms=0.0)
    assert settled(seen, shown, both, 0).unmet == (1,)
    shown.note(1, "a", Watermark(next_offset=0, epoch=0), offset=0, now_ms=0.0)
    assert settled(seen, shown, both, 0).unmet == ()
    shown.note(1, "a", Watermark(next_offset=0, epoch=4), offset=0, now_ms=0.0)
    assert settled(seen, shown, both, 0).unmet == (1,)


def test_of_an_epoch_that_is_asked_for_at_least_what_was_heard_says_which_partitions_it_has() -> None:
    heard = {(0, "a"): EpochState(closed=7, partitions=1), (1, "a"): EpochState(closed=0)}
    found = Marks(heard, least=Chosen(7)).choose(heard)
    assert found == Chosen(7, 1)
    assert found.ignores(1), "it came later, and closes nothing before its first rows"
    assert Marks(heard, least=Chosen(8)).choose(heard) == Chosen(8)
