# SPDX-License-Identifier: Apache-2.0
"""Low-water marks: what a broker knows of closed epochs, and which epoch L a query is answered at. Pure.

The mark of a (server, partition) pair is the last epoch closed *and applied* there, rows and updates.

Rules:

- L is the minimum over the pairs a query will use, not over others: a replica that stands still holds nobody back who
  does not ask it. It is never below what this broker has answered (the floor), nor below the epoch of a `notBefore`.
- L is never guessed from what was heard of other pairs: a server that has not closed L waits, or says so.
- An answer at L needs all n(L) partitions of the table at L or later. Partitions that came later are ignored: their
  rows are all younger. A partition that has closed nothing yet is waited for by its server, it does not take L to 0.
  Who has not heard of all n(L) partitions does not answer at L (`lacks`): epochs travel faster than views.
- A rewind to R makes the epochs above R, up to the first one that is taken afterwards, void: what was known of them
  counts as R, and whoever asks for one of them is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cremant.model.cluster import Rewind
from cremant.model.upsert import Cut, Visibility
from cremant.wire.messages import EpochsReply, EpochState

#: A replica this many epochs behind the freshest is asked only if nobody better is there.
EPOCH_LAG_MAX = 5

#: (partition, server).
Pair = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Chosen:
    """L, and how many partitions the table had then (0: not known, so all count)."""

    epoch: int
    partitions: int = 0

    def ignores(self, partition: int) -> bool:
        return 0 < self.partitions <= partition

    def count(self, partitions: int) -> int:
        """How many of the table's `partitions` an answer needs."""
        return min(partitions, self.partitions or partitions)


_BEFORE_ALL = Chosen(0)


@dataclass(frozen=True, slots=True)
class Marks:
    """What one query knows when it begins. `timely`: pairs near the freshest of their partition. `least`: floor and
    `notBefore`. `as_of`: the epoch that was asked for; then nothing else counts. `keyed_from`: the epoch that gave the
    table its keys; before it, it was an append table and is shown as that."""

    states: Mapping[Pair, EpochState] = field(default_factory=dict)
    timely: Collection[Pair] = frozenset()
    least: Chosen = _BEFORE_ALL
    as_of: int | None = None
    visibility: Visibility = Visibility.VISIBLE
    keyed_from: int = 0

    def choose(self, pairs: Iterable[Pair]) -> Chosen | None:
        """L for a query that will ask these; None if nothing is known of any of them."""
        if self.as_of is not None:
            return Chosen(self.as_of, self._partitions_at(self.as_of))
        known = {pair: self.states[pair] for pair in pairs if pair in self.states}
        if not known and not self.least.epoch:
            return None
        used = {pair: state for pair, state in known.items() if state.closed > 0}
        best = _BEFORE_ALL
        for state in used.values():
            found = Chosen(state.closed, state.partitions)
            if found.epoch > best.epoch and all(
                other.closed >= found.epoch or found.ignores(partition) for (partition, _), other in used.items()
            ):
                best = found
        # Of the same epoch, what was heard says how many partitions it has; a token does not.
        return best if best.epoch >= self.least.epoch else self.least

    def _partitions_at(self, epoch: int) -> int:
        """Known if some pair stands exactly there."""
        return next((state.partitions for state in self.states.values() if state.closed == epoch), 0)

    def cut(self, chosen: Chosen) -> Cut:
        unkeyed = chosen.epoch < self.keyed_from
        return Cut(epoch=chosen.epoch, visibility=Visibility.ALL if unkeyed else self.visibility, unkeyed=unkeyed)


class LowWater:
    """All upsert tables, as one broker knows them. Tables are named by their incarnation."""

    def __init__(self) -> None:
        #: Grows with each change.
        self.version = 0
        self._states: dict[str, dict[Pair, EpochState]] = {}
        self._floors: dict[str, Chosen] = {}
        self._timely: dict[str, frozenset[Pair]] = {}

    # --- what happened ---

    def told(self, server: str, reply: EpochsReply) -> None:
        """All that `server` has closed now; what it does not name it does not serve."""
        self._drop(server)
        for incarnation, partitions in reply.epochs.items():
            states = self._states.setdefault(incarnation, {})
            for partition, state in partitions.items():
                states[int(partition), server] = state
        self._changed()

    def gone(self, server: str) -> None:
        """It is not alive any more."""
        self._drop(server)
        self._changed()

    def answered(self, incarnation: str, chosen: Chosen) -> None:
        """A client has seen the table at this epoch: no later query of this broker shows an earlier one."""
        if chosen.epoch > self.floor(incarnation).epoch:
            self._floors[incarnation] = chosen

    def keep(self, incarnations: Collection[str]) -> None:
        """Forgets tables that are no more."""
        for known in (self._states, self._floors, self._timely):
            for gone in [name for name in known if name not in incarnations]:
                del known[gone]

    def _drop(self, server: str) -> None:
        for states in self._states.values():
            for pair in [pair for pair in states if pair[1] == server]:
                del states[pair]

    def _changed(self) -> None:
        self.version += 1
        self._timely.clear()

    # --- what follows ---

    def lacks(self, incarnation: str, chosen: Chosen, partitions: int) -> bool:
        """Whether the table had more than these `partitions` at the epoch, or may have had, as far as is known."""
        later = (state.partitions for state in self.states(incarnation).values() if state.closed >= chosen.epoch)
        return (chosen.partitions or min(filter(None, later), default=0)) > partitions

    def knows(self, incarnation: str, partitions: Collection[int]) -> bool:
        """Of each of them, from some server, what is closed."""
        known = {partition for partition, _ in self.states(incarnation)}
        return known.issuperset(partitions)

    def floor(self, incarnation: str) -> Chosen:
        return self._floors.get(incarnation, _BEFORE_ALL)

    def states(self, incarnation: str) -> Mapping[Pair, EpochState]:
        return self._states.get(incarnation, {})

    def timely(self, incarnation: str) -> frozenset[Pair]:
        """Pairs that are near the freshest of their partition, and not below the floor."""
        known = self._timely.get(incarnation)
        floor = self.floor(incarnation).epoch
        if known is None:
            states = self.states(incarnation)
            newest: dict[int, int] = {}
            for (partition, _), state in states.items():
                newest[partition] = max(state.closed, newest.get(partition, 0))
            known = self._timely[incarnation] = frozenset(
                pair for pair, state in states.items() if state.closed >= newest[pair[0]] - EPOCH_LAG_MAX
            )
        return known if floor == 0 else self._past(incarnation, known, floor)

    def _past(self, incarnation: str, known: frozenset[Pair], floor: int) -> frozenset[Pair]:
        """Without those below the floor, unless that leaves a partition to nobody."""
        states = self.states(incarnation)
        past = frozenset(pair for pair in known if states[pair].closed >= floor)
        if len(past) == len(known):
            return known
        served = {partition for partition, _ in past}
        return past | {pair for pair in known if pair[0] not in served}

    def marks(
        self, incarnation: str, rewinds: Iterable[Rewind] = (), *, not_before: int = 0, as_of: int | None = None,
        visibility: Visibility = Visibility.VISIBLE, keyed_from: int = 0,
    ) -> Marks:  # fmt: skip
        """What a query begins with. `not_before`: epoch of its token."""
        void = tuple(rewinds)
        states = self.states(incarnation)
        floor = self.floor(incarnation)
        if void:
            states = {pair: _without_void(state, void) for pair, state in states.items()}
            floor = Chosen(backed(floor.epoch, void), floor.partitions)
            self._floors[incarnation] = floor
        least = floor if floor.epoch >= not_before else Chosen(not_before)
        return Marks(dict(states), self.timely(incarnation), least, as_of, visibility, keyed_from)


def is_void(epoch: int, rewinds: Iterable[Rewind]) -> Rewind | None:
    """The rewind that took `epoch` back, if one did."""
    return next(
        (one for one in rewinds if one.to_epoch < epoch and (one.next_epoch is None or epoch < one.next_epoch)), None
    )


def backed(epoch: int, rewinds: Collection[Rewind]) -> int:
    """The last epoch up to `epoch` that was not taken back."""
    while (void := is_void(epoch, rewinds)) is not None:
        epoch = void.to_epoch
    return epoch


def _without_void(state: EpochState, rewinds: Collection[Rewind]) -> EpochState:
    closed = backed(state.closed, rewinds)
    if closed == state.closed:
        return state
    return EpochState(closed=closed, horizon=state.horizon, partitions=state.partitions)
