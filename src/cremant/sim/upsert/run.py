# SPDX-License-Identifier: Apache-2.0
"""One seed of the world of upsert: faults, healing, and everything must be shown at the last epoch, by every broker."""

from __future__ import annotations

from cremant.epoch.safeguards import ALL as ALL_OF_EPOCHS
from cremant.epoch.safeguards import Safeguards as EpochSafeguards
from cremant.model.errors import InvariantViolation
from cremant.sim.engine import Actor, Outcome, Violation
from cremant.sim.run import Supervisor, produce
from cremant.sim.upsert.broker import Broker, Client
from cremant.sim.upsert.compacting import order_compactions
from cremant.sim.upsert.driver import UpsertDriver
from cremant.sim.upsert.options import ALL, Options, Safeguards, draw
from cremant.sim.upsert.server import Server
from cremant.sim.upsert.world import UpsertWorld

WORLD = "upsert"
HEAL_STEPS_MAX = 20_000


def _changes(world: UpsertWorld) -> Actor:
    """What operators and time do."""
    options = world.options
    while world.faults:
        yield 10
        if world.chance(options.config_change):
            world.config_version += 1
            world.note(f"config version {world.config_version}")
        if world.chance(options.growth) and len(world.stream) < 5:
            world.add_partition()
            world.note(f"partition {len(world.stream) - 1} is added")
        if world.chance(options.retention):
            partition = world.trouble.choice(world.stream)
            partition.earliest = world.trouble.randint(partition.earliest, partition.end)
            world.note(f"the stream forgets up to {partition.earliest} in {world.stream.index(partition)}")
        if world.chance(options.trim):
            world.trim()
        if options.compaction_ms:
            order_compactions(world)
        if world.chance(options.rebuild):
            world.rebuilds_asked += 1
        committed = world.observers.committed
        if world.chance(options.rewind) and len(committed) > 1:
            world.rewind(world.trouble.choice(committed[-4:-1]).epoch)


def simulate(
    seed: int,
    safeguards: EpochSafeguards = ALL_OF_EPOCHS,
    guards: Safeguards = ALL,
    options: Options | None = None,
) -> Outcome:
    """Deterministic: the same arguments give the same outcome, step by step."""
    options = options or draw(seed)
    world = UpsertWorld(seed, options, safeguards, guards)
    servers = [Server(world, number) for number in range(options.servers)]
    brokers = [Broker(world, number) for number in range(options.brokers)]
    client = Client(world, brokers)
    supervisor = Supervisor(world, UpsertDriver)
    rule = message = ""
    try:
        actors = [*(server.run() for server in servers), *(broker.run() for broker in brokers)]
        for actor in (*actors, client.run(), supervisor.run(), produce(world), _changes(world)):
            world.spawn(actor)
        while world.now_ms < options.safety_ms:
            world.step()
        world.faults = False
        world.note("faults end")
        _heal(world, supervisor, client)
    except (Violation, InvariantViolation) as violation:
        rule, message = violation.rule, str(violation)
    return Outcome.of(WORLD, world, options, world.observers.checks, rule, message)


def _heal(world: UpsertWorld, supervisor: Supervisor, client: Client) -> None:
    limit = world.steps + HEAL_STEPS_MAX
    while not _settled(world, supervisor, client):
        if world.steps > limit:
            raise Violation("liveness", f"not settled {HEAL_STEPS_MAX} steps after the faults ended")
        world.step()


def _settled(world: UpsertWorld, supervisor: Supervisor, client: Client) -> bool:
    """U-6: everything produced is closed, and a client has seen it."""
    closing = supervisor.driver.closing
    if closing is None or closing.ends != tuple(partition.end for partition in world.stream):
        return False
    committed = world.observers.committed
    return not committed or client.seen == committed[-1].epoch
