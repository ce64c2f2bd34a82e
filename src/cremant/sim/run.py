# SPDX-License-Identifier: Apache-2.0
"""One seed, one world, one verdict.

    safety phase    faults are on; invariants are checked after every step
    healing         faults stop, what is paused goes on and finds itself fenced
    liveness phase  everything in the stream must be shown and closed everywhere, within a bound

`simulate(seed)` answers an Outcome; a failed one prints seed, options, the end of the trace and the replay command.
"""

from __future__ import annotations

from cremant.epoch.close import CloseState
from cremant.epoch.safeguards import ALL, Safeguards
from cremant.model.errors import InvariantViolation
from cremant.sim.driver import Driver
from cremant.sim.engine import Actor, Outcome, Violation
from cremant.sim.options import Options, draw
from cremant.sim.replica import Replica
from cremant.sim.world import TOPIC, World

WORLD = "epochs"
#: Steps that a healed world may take until everything is shown: three times what the largest of 500 needed.
HEAL_STEPS_MAX = 10_000


class Supervisor:
    """Keeps a driver alive, and is the faults' hand: it crashes and pauses drivers."""

    def __init__(self, world: World, driver: type[Driver] = Driver) -> None:
        self.world = world
        self._kind = driver
        self.driver = driver(world, 0)
        self.started = 0

    def run(self) -> Actor:
        world = self.world
        while True:
            yield world.schedule.choice((1, 5, 20))
            world.damage_checkpoint()
            self.started += 1
            self.driver = self._kind(world, self.started)
            world.lease_holder = self.started
            world.note(f"driver {self.started} starts")
            yield from self._life(self.driver)

    def _life(self, driver: Driver) -> Actor:
        """Until the driver ends, is crashed, or is paused (it goes on later beside its successor)."""
        world, options = self.world, self.world.options
        life = driver.run()
        for delay_ms in life:
            yield delay_ms
            marking = driver.closing is not None and driver.closing.state is CloseState.MARKING_REST
            if world.chance(options.crash_between_marks if marking else options.crash):
                world.note(f"driver {driver.number} is killed")
                for attempt in driver.attempts.values():
                    driver.abandon(attempt)
                return
            if world.chance(options.pause):
                pause_ms = world.trouble.randint(1, options.pause_ms)
                world.note(f"driver {driver.number} stands still for {pause_ms} ms")
                world.spawn(life, pause_ms)
                return


def produce(world: World) -> Actor:
    while world.faults:
        yield world.workload.choice((3, 10, 30))
        partition = world.workload.choice(world.stream)
        partition.produce(world.workload.randint(1, 15), world.now_ms)


def _changes(world: World, replicas: list[Replica]) -> Actor:
    """What operators and time do: config changes, new partitions, retention of the stream and of the epoch log."""
    options = world.options
    while world.faults:
        yield 10
        if world.chance(options.config_change):
            world.config_version += 1
            world.note(f"config version {world.config_version}")
        if world.chance(options.growth) and len(world.stream) < 6:
            world.add_partition()
            world.note(f"partition {len(world.stream) - 1} is added")
            _add_replicas(world, replicas, len(world.stream) - 1)
        if world.chance(options.retention):
            partition = world.trouble.choice(world.stream)
            partition.earliest = world.trouble.randint(partition.earliest, partition.end)
            world.note(f"the stream forgets up to {partition.earliest} in {world.stream.index(partition)}")
        if world.chance(options.trim):
            _trim(world, replicas)


def _trim(world: World, replicas: list[Replica]) -> None:
    """Keeps the mark in front of the oldest position: the start protocol reads it."""
    for partition, cuts in enumerate(world.cuts):
        stored = [replica.stored[0].log_offset for replica in replicas if replica.partition == partition]
        world.log.trim(TOPIC, partition, min([cuts[-1].log_offset, *stored]) - 1)


def _add_replicas(world: World, replicas: list[Replica], partition: int) -> None:
    for number in range(world.options.replicas):
        replica = Replica(world, partition, number)
        replicas.append(replica)
        world.spawn(replica.run())


def simulate(seed: int, safeguards: Safeguards = ALL, options: Options | None = None) -> Outcome:
    """Deterministic: the same arguments give the same outcome, step by step."""
    options = options or draw(seed)
    world = World(seed, options, safeguards)
    replicas: list[Replica] = []
    for partition in range(options.partitions):
        _add_replicas(world, replicas, partition)
    supervisor = Supervisor(world)
    rule = message = ""
    try:
        world.spawn(supervisor.run())
        world.spawn(produce(world))
        world.spawn(_changes(world, replicas))
        while world.now_ms < options.safety_ms:
            world.step()
        world.faults = False
        world.note("faults end")
        _heal(world, supervisor, replicas)
    except (Violation, InvariantViolation) as violation:
        rule, message = violation.rule, str(violation)
    return Outcome.of(WORLD, world, options, world.observers.checks, rule, message)


def _heal(world: World, supervisor: Supervisor, replicas: list[Replica]) -> None:
    limit = world.steps + HEAL_STEPS_MAX
    while not _settled(world, supervisor, replicas):
        if world.steps > limit:
            raise Violation("liveness", f"not settled {HEAL_STEPS_MAX} steps after the faults ended")
        world.step()


def _settled(world: World, supervisor: Supervisor, replicas: list[Replica]) -> bool:
    """Every message is in a closed epoch, every replica shows and closed it."""
    closing = supervisor.driver.closing
    ends = tuple(partition.end for partition in world.stream)
    if closing is None or closing.ends != ends:
        return False
    for replica in replicas:
        partition = replica.partition
        if replica.end != ends[partition]:
            return False
        if replica.reader.epoch != world.observers.oracles[partition].epoch:
            return False
    committed = world.observers.committed
    return all(
        oracle.epoch == committed[-1].epoch for oracle in world.observers.oracles[: committed[-1].partition_count]
    ) if committed else True  # fmt: skip
