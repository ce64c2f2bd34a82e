# SPDX-License-Identifier: Apache-2.0
"""One seed of the world of completion: safety with faults, healing, then everything must settle."""

from __future__ import annotations

import logging

from cremant.model.errors import CremantError, InvariantViolation
from cremant.sim.completion.controller import Controller, controllers
from cremant.sim.completion.options import Options, draw
from cremant.sim.completion.safeguards import ALL, WorldSafeguards
from cremant.sim.completion.server import Server
from cremant.sim.completion.stage import Scenario, Stage
from cremant.sim.completion.world import World
from cremant.sim.engine import Actor, Outcome, Violation

WORLD = "completion"
#: Virtual time that a healed world may take until nothing is missing: repair waits up to five minutes between tries,
#: and leases that were granted again and again are long.
HEAL_MS_MAX = 40 * 60 * 1000
LOOK_EVERY_MS = 5_000


def _producer(world: World) -> Actor:
    while world.faults:
        yield world.workload.choice((200, 1_000, 3_000))
        world.workload.choice(world.logs).close(world.workload.randint(1, world.options.epoch_rows))


def _store_trouble(world: World) -> Actor:
    while world.faults:
        yield 1_000
        if world.chance(world.options.store_trouble):
            world.store.mode = world.trouble.choice(("up", "slow", "failing", "hanging"))
            world.note(f"the deep store is {world.store.mode}")
    world.store.mode = "up"


def simulate(
    seed: int, guards: WorldSafeguards = ALL, options: Options | None = None, scenario: Scenario | None = None
) -> Outcome:
    """Deterministic: the same arguments give the same outcome, step by step."""
    options = scenario.world_options() if scenario is not None else options or draw(seed)
    world = World(seed, options, guards)
    rule = message = ""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the trace tells it
    try:
        world.spawn(controllers(world))
        for number in range(options.servers):
            server = world.servers[f"s{number}"] = Server(world, number)
            world.spawn(server.run(), number)
        world.spawn(_producer(world))
        world.spawn(_store_trouble(world))
        world.spawn(world.network.run())
        _trouble(world, scenario)
        world.faults = False
        world.network.heal()
        for server in world.servers.values():
            server.heal()
        world.note("faults end")
        _heal(world)
        missing = [fact for fact in (scenario.reached if scenario is not None else ()) if fact not in world.happened]
        if missing:
            raise Violation("reached", f"did not happen: {', '.join(missing)}")
    except (Violation, InvariantViolation) as violation:
        rule, message = violation.rule, str(violation)
    finally:
        logging.disable(disabled)
    name = scenario.name if scenario is not None else ""
    return Outcome.of(WORLD, world, options, world.observers.checks, rule, message, name)


def _trouble(world: World, scenario: Scenario | None) -> None:
    stage = Stage(world)
    if scenario is not None:
        world.spawn(stage.play(scenario.script), 1)
    while world.now_ms < world.options.safety_ms and not stage.ended:
        world.step()
        world.observers.look()
    if scenario is not None and not stage.ended:
        raise Violation("reached", f"the script did not end within {world.options.safety_ms} ms")


def _heal(world: World) -> None:
    ends_ms = world.now_ms + HEAL_MS_MAX
    look_ms, unsettled = world.now_ms, "no controller leads"
    while unsettled:
        if world.now_ms > ends_ms:
            raise Violation("liveness", f"not settled {HEAL_MS_MAX} ms after the faults ended: {unsettled}")
        world.step()
        world.observers.look()
        if world.now_ms < look_ms or not world.controllers:
            continue
        look_ms = world.now_ms + LOOK_EVERY_MS
        leader = max(world.controllers, key=lambda controller: controller.catalog.leadership.term)
        unsettled = leader.unsettled()
        if unsettled:
            _force(world, leader)


def _force(world: World, leader: Controller) -> None:
    try:
        leader.force()
    except CremantError as error:
        world.note(f"{leader.name} does not lead: {error}")
