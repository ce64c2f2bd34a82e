# SPDX-License-Identifier: Apache-2.0
"""What every simulated world stands on: one heap of virtual time, dice, a trace, and how a run is told.

Actors are generators: they yield how many ms pass before their next step, and between two yields nothing else happens.
So every yield is a place where the world may interleave, crash or pause them.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

import msgspec

Actor = Iterator[int]
#: Lines of history that a failure shows.
TRACE_LINES = 120


class Violation(Exception):
    """Invariant `rule` does not hold."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class Engine:
    """`faults`: on in the safety phase, off while healing."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.faults = True
        self.now_ms = 0
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        #: Rows of the machines' transition tables that were taken: (machine, state, event).
        self.transitions: set[tuple[str, str, str]] = set()
        #: One stream of dice per concern, so that a new draw in one leaves the others as they were.
        self.schedule = Random(f"{seed}/schedule")
        self.trouble = Random(f"{seed}/trouble")
        self.workload = Random(f"{seed}/workload")
        self._heap: list[tuple[int, int, Actor]] = []
        self._sequence = 0

    def spawn(self, actor: Actor, delay_ms: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._sequence, actor))

    def step(self) -> None:
        """One step of the actor that is next."""
        self.now_ms, _, actor = heapq.heappop(self._heap)
        self.steps += 1
        delay_ms = next(actor, None)
        if delay_ms is not None:
            self.spawn(actor, delay_ms)

    def note(self, line: str) -> None:
        self.trace.append(f"{self.now_ms:6d} ms  {line}")

    def chance(self, probability: float) -> bool:
        return self.faults and probability > 0 and self.trouble.random() < probability


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`rule`: the invariant that did not hold, "" if all did."""

    world: str
    #: "" for a world that its seed drew.
    scenario: str = ""
    seed: int
    options: msgspec.Struct
    steps: int
    checks: int
    transitions: frozenset[tuple[str, str, str]] = frozenset()
    rule: str = ""
    message: str = ""
    trace: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, world: str, engine: Engine, options: msgspec.Struct, checks: int, rule: str, message: str,
        scenario: str = "",
    ) -> Outcome:  # fmt: skip
        return cls(
            world=world, scenario=scenario, seed=engine.seed, options=options, steps=engine.steps, checks=checks,
            transitions=frozenset(engine.transitions), rule=rule, message=message,
            trace=tuple(engine.trace) if rule else (),
        )  # fmt: skip

    @property
    def failed(self) -> bool:
        return bool(self.rule)

    def story(self) -> str:
        named = f" --scenario {self.scenario}" if self.scenario else ""
        return "\n".join(
            [
                f"seed {self.seed} of world {self.world} violates {self.rule}: {self.message}",
                f"options: {self.options}",
                f"the last {len(self.trace)} lines of {self.steps} steps:",
                *self.trace,
                f"replay: cremant sim --seed {self.seed} --world {self.world}{named}",
            ]
        )


def tell(world: str, simulate: Callable[[int], Outcome], first: int, count: int) -> list[Outcome]:
    """Runs seeds, prints what failed and a summary."""
    begun = time.monotonic()
    outcomes = []
    for seed in range(first, first + count):
        outcome = simulate(seed)
        outcomes.append(outcome)
        if outcome.failed:
            sys.stdout.write(outcome.story() + "\n\n")
    took_s = time.monotonic() - begun
    steps, failures = sum(o.steps for o in outcomes), sum(o.failed for o in outcomes)
    sys.stdout.write(
        f"world {world}: {count} seeds, {steps} steps, {failures} violations in {took_s:.1f} s: "
        f"{count / took_s:.1f} seeds/s, {steps / took_s:.0f} steps/s\n"
    )
    return outcomes
