# SPDX-License-Identifier: Apache-2.0
"""The embedded log under death and damage: killed writers, flipped bits, cut files, a full disk."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cremant.log import embedded_partition
from cremant.log.api import Message
from cremant.log.embedded import EmbeddedLog
from cremant.log.embedded_frame import encode
from cremant.model.errors import Corrupt, NoResource, Unavailable

BIG = 1 << 30
FORK = multiprocessing.get_context("fork")


def write_until_killed(directory: Path, writer: int, seed: int, output: Path) -> None:
    """Runs in a forked process: appends of known content; says what was acknowledged before the next append."""
    dice = random.Random(seed)
    log = EmbeddedLog(directory, segment_bytes=256 * 1024)
    acknowledged = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in itertools.count():
        count = dice.choice([1, 1, 1, 5, 100])
        size = dice.choice([10, 100, 100, 3000]) if count < 100 else 50
        messages = [
            Message(b"%d %d %d %d %s" % (writer, seed, number, part, b"x" * size), b"%d" % count)
            for part in range(count)
        ]
        first = log.append("t", 0, messages).first_offset
        os.write(acknowledged, b"%d %d %d\n" % (first, number, count))


def read_all(log: EmbeddedLog, topic: str = "t", partition: int = 0) -> list[tuple[bytes | None, bytes | None]]:
    reader = log.reader(topic, partition, log.earliest(topic, partition))
    found: list[tuple[bytes | None, bytes | None]] = []
    while (batch := reader.read(max_messages=5000, max_bytes=BIG)) is not None:
        found += zip(batch.values.to_pylist(), batch.keys.to_pylist(), strict=True)
    return found


def test_killed_writers_lose_nothing_acknowledged_and_show_nothing_torn(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    log = EmbeddedLog(directory, segment_bytes=256 * 1024)
    log.create_topic("t", 1)
    dice = random.Random(1)
    runs: list[tuple[int, int, Path]] = []

    def start(writer: int, seed: int) -> multiprocessing.process.BaseProcess:
        runs.append((writer, seed, tmp_path / f"{writer}-{seed}"))
        process = FORK.Process(target=write_until_killed, args=(directory, *runs[-1]))
        process.start()
        return process

    writers = [start(writer, 0) for writer in range(3)]
    reader = log.reader("t", 0, 0)
    seen: list[bytes] = []
    for kill in range(1, 31):
        deadline_s = time.monotonic() + 0.05 + dice.random() * 0.05
        while time.monotonic() < deadline_s:
            log.wait({("t", 0): reader.position}, 0.02)
            batch = reader.read(max_messages=5000, max_bytes=BIG)
            seen += batch.values.to_pylist() if batch is not None else []
        victim = kill % 3
        writers[victim].kill()
        writers[victim].join(10)
        writers[victim] = start(victim, kill)
    for process in writers:
        process.kill()
        process.join(10)

    found = read_all(EmbeddedLog(directory))
    assert [value for value, _ in found][: len(seen)] == seen
    acknowledged = [line.split() for _, _, path in runs if path.exists() for line in path.read_bytes().splitlines()]
    assert len(acknowledged) > 100
    check_appends_are_whole(found)
    for writer, seed, path in runs:
        for line in path.read_bytes().splitlines() if path.exists() else ():
            first, number, count = map(int, line.split())
            for part in range(count):
                assert (found[first + part][0] or b"").startswith(b"%d %d %d %d x" % (writer, seed, number, part))


def check_appends_are_whole(found: list[tuple[bytes | None, bytes | None]]) -> None:
    """Every append is there with all its messages in a row, and each writer's appends are in order, without holes."""
    at = 0
    next_number: dict[tuple[int, int], int] = {}
    while at < len(found):
        value, key = found[at]
        writer, seed, number, part = map(int, (value or b"").split()[:4])
        count = int(key or b"")
        assert part == 0
        for offset in range(count):
            assert (found[at + offset][0] or b"").startswith(b"%d %d %d %d x" % (writer, seed, number, offset))
        assert number == next_number.get((writer, seed), 0)
        next_number[writer, seed] = number + 1
        at += count


def die_in_append(log: EmbeddedLog, step: str, after_bytes: int) -> None:
    """Runs in a forked process: appends, and is killed after so many bytes of the frame, or just before a step."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_some(fd: int, parts: tuple[bytes, ...], at: int) -> None:
        os.pwrite(fd, b"".join(bytes(part) for part in parts)[:after_bytes], at)
        die()

    if step == "write":
        embedded_partition._write_all = write_some
    else:
        setattr(embedded_partition.EmbeddedPartition, step, die)
    log.append("t", 0, [Message(b"never acknowledged"), Message(b"neither")])


def test_a_writer_that_dies_at_any_byte_of_a_frame_leaves_nothing_visible(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    frame_bytes = encode([Message(b"never acknowledged"), Message(b"neither")]).frame_bytes
    expected: list[bytes] = []
    points = [("write", size) for size in range(0, frame_bytes + 1)] + [("_commit", 0)]
    for number, (step, size) in enumerate(points):
        run_to_death(log, step, size)
        assert log.latest("t", 0) == number
        assert [value for value, _ in read_all(EmbeddedLog(tmp_path))] == expected
        expected.append(b"%d" % number * (1 + number % 40))
        assert log.append("t", 0, [Message(expected[-1])]).first_offset == number
        assert [value for value, _ in read_all(log)] == expected


def test_a_writer_that_dies_after_its_commit_has_appended(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    run_to_death(log, "_index", 0)
    assert [value for value, _ in read_all(log)] == [b"never acknowledged", b"neither"]
    assert log.append("t", 0, [Message(b"more")]).first_offset == 2
    assert log.offset_at("t", 0, 0) == 0


def test_a_writer_that_dies_while_it_rolls_leaves_a_log_that_goes_on(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path, segment_bytes=4096)
    log.create_topic("t", 1)
    expected = [b"%d" % number * 1000 for number in range(20)]
    for number, value in enumerate(expected):
        for step, size in (("_commit", 0), ("write", 0), ("write", 50)):
            run_to_death(log, step, size)
        assert log.append("t", 0, [Message(value)]).first_offset == number
        assert [value for value, _ in read_all(EmbeddedLog(tmp_path))] == expected[: number + 1]
    assert [value for value, _ in read_all(log)] == expected


def run_to_death(log: EmbeddedLog, step: str, after_bytes: int) -> None:
    child = FORK.Process(target=die_in_append, args=(log, step, after_bytes))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


# --- damage ---


def prepared(directory: Path) -> tuple[EmbeddedLog, Path, int, list[bytes]]:
    """A partition of three appends: (log, its file, position of the last frame, values)."""
    log = EmbeddedLog(directory)
    log.create_topic("t", 1)
    log.append("t", 0, [Message(b"one"), Message(b"two")])
    log.append("t", 0, [Message(b"three")])
    path = next(directory.glob("topics/t/*/0/*.log"))
    last = path.stat().st_size
    log.append("t", 0, [Message(b"four"), Message(b"five", b"key")])
    return log, path, last, [b"one", b"two", b"three", b"four", b"five"]


def values_until_corrupt(log: EmbeddedLog) -> tuple[list[bytes], str]:
    reader = log.reader("t", 0, 0)
    found: list[bytes] = []
    try:
        while (batch := reader.read(max_messages=1, max_bytes=BIG)) is not None:
            found += batch.values.to_pylist()
    except Corrupt as error:
        return found, str(error)
    return found, ""


def test_damage_of_a_committed_frame_is_reported_with_file_and_position(tmp_path: Path) -> None:
    log, path, last, values = prepared(tmp_path)
    whole = path.read_bytes()
    damaged = [bytes([*whole[:at], whole[at] ^ 0x40, *whole[at + 1 :]]) for at in range(last, len(whole))]
    truncated = [whole[:at] for at in range(last, len(whole))]
    for data in damaged + truncated:
        path.write_bytes(data)
        found, error = values_until_corrupt(log)
        assert found == values[:3]
        assert f"{path} at byte {last}: expected" in error
    path.write_bytes(whole)
    assert values_until_corrupt(log) == (values, "")


def test_what_comes_before_damage_is_read_whatever_the_size_of_the_batch(tmp_path: Path) -> None:
    log, path, last, values = prepared(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: last + 60] + b"?" + whole[last + 61 :])
    reader = log.reader("t", 0, 0)
    batch = reader.read(max_messages=100, max_bytes=BIG)
    assert batch is not None
    assert batch.values.to_pylist() == values[:3]
    for _ in range(2):
        with pytest.raises(Corrupt, match="checksum"):
            reader.read(max_messages=100, max_bytes=BIG)
        assert reader.position == 3
    path.write_bytes(whole)
    batch = reader.read(max_messages=100, max_bytes=BIG)
    assert batch is not None
    assert batch.values.to_pylist() == values[3:]


def test_after_a_power_cut_a_damaged_last_append_is_not_there_and_the_log_goes_on(tmp_path: Path) -> None:
    _, path, last, values = prepared(tmp_path / "log")
    whole = path.read_bytes()
    state = path.parent / "state"
    for at in range(last, len(whole)):
        for data in (bytes([*whole[:at], whole[at] ^ 0x40, *whole[at + 1 :]]), whole[:at]):
            path.write_bytes(data)
            path.with_suffix(".idx").unlink(missing_ok=True)
            state.unlink()
            log = EmbeddedLog(tmp_path / "log")
            assert log.latest("t", 0) == 3
            assert values_until_corrupt(log) == (values[:3], "")
            assert log.append("t", 0, [Message(b"again")]).first_offset == 3
            assert values_until_corrupt(log) == ([*values[:3], b"again"], "")


def test_after_a_power_cut_damage_before_a_valid_frame_is_reported(tmp_path: Path) -> None:
    _, path, last, _ = prepared(tmp_path)
    whole = path.read_bytes()
    state = path.parent / "state"
    for at in range(last):
        path.write_bytes(bytes([*whole[:at], whole[at] ^ 0x40, *whole[at + 1 :]]))
        state.unlink(missing_ok=True)
        log = EmbeddedLog(tmp_path)
        for act in (lambda log=log: log.latest("t", 0), lambda log=log: log.append("t", 0, [Message(b"x")])):
            with pytest.raises(Corrupt, match="a valid frame follows at byte"):
                act()


def test_damage_in_an_older_file_is_reported_and_later_offsets_stay_readable(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path, segment_bytes=4096)
    log.create_topic("t", 1)
    for number in range(100):
        log.append("t", 0, [Message(b"%0100d" % number)])
    paths = sorted(tmp_path.glob("topics/t/*/0/*.log"))
    assert len(paths) > 3
    with paths[1].open("r+b") as file:
        file.truncate(paths[1].stat().st_size - 8)
    later = int(paths[2].stem)
    found, error = values_until_corrupt(log)
    assert found == [b"%0100d" % number for number in range(later - 1)]
    assert str(paths[1]) in error
    batch = log.reader("t", 0, later).read(max_messages=1, max_bytes=1)
    assert batch is not None
    assert batch.values.to_pylist() == [b"%0100d" % later]


@pytest.mark.parametrize("damage", ["flip", "empty", "short", "of another boot"])
def test_a_damaged_state_record_is_made_anew_from_the_files(tmp_path: Path, damage: str) -> None:
    log, path, _, values = prepared(tmp_path)
    state = path.parent / "state"
    record = bytearray(state.read_bytes())
    if damage == "flip":
        record[20] ^= 1
    elif damage == "of another boot":
        record[8] ^= 1
    else:
        del record[0 if damage == "empty" else 30 :]
    with state.open("r+b") as file:
        file.truncate(0)
        file.write(record)
    assert log.latest("t", 0) == 5
    assert values_until_corrupt(EmbeddedLog(tmp_path)) == (values, "")
    assert log.append("t", 0, [Message(b"six")]).first_offset == 5


def test_timestamps_do_not_decrease_over_a_power_cut_either(tmp_path: Path) -> None:
    now_ms = 5_000
    log = EmbeddedLog(tmp_path, segment_bytes=4096, clock=lambda: now_ms)
    log.create_topic("t", 1)
    log.append("t", 0, [Message(bytes(4000))])
    next(tmp_path.glob("topics/t/*/0/state")).unlink()
    now_ms = 1_000
    assert EmbeddedLog(tmp_path, segment_bytes=4096, clock=lambda: now_ms).append("t", 0, [Message(b"")])[1] == 5_000


def test_a_file_that_is_missing_is_reported(tmp_path: Path) -> None:
    log, path, _, _ = prepared(tmp_path)
    path.unlink()
    with pytest.raises(Corrupt, match="expected a file, found none"):
        log.reader("t", 0, 0).read(max_messages=1, max_bytes=1)
    with pytest.raises(Corrupt, match="found no file"):
        EmbeddedLog(tmp_path).append("t", 0, [Message(b"x")])


# --- a full disk ---

FILL = """
    import json, resource, signal, sys
    from cremant.log.api import Message
    from cremant.log.embedded import EmbeddedLog
    from cremant.model.errors import NoResource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    log = EmbeddedLog(sys.argv[1])
    appended, refused = 0, []
    for size in (30_000, 30_000, 30_000, 30_000, 1_000, 50_000, 1_000):
        try:
            log.append("t", 0, [Message(bytes([65 + appended]) * size)])
            appended += 1
        except NoResource as error:
            refused.append(str(error))
    batch = log.reader("t", 0, 0).read(max_messages=100, max_bytes=1 << 30)
    print(json.dumps([appended, refused, [len(value) for value in batch.values.to_pylist()], log.latest("t", 0)]))
"""


def test_an_append_over_the_limit_of_file_sizes_is_refused_whole_and_smaller_ones_go_on(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILL), str(tmp_path)], capture_output=True, timeout=60, check=True
    )
    appended, refused, sizes, latest = json.loads(result.stdout)
    assert (appended, sizes, latest) == (5, [30_000] * 3 + [1_000] * 2, 5)
    assert len(refused) == 2
    assert all("free disk space" in message for message in refused)
    assert len(read_all(log)) == 5
    assert log.append("t", 0, [Message(bytes(30_000))]).first_offset == 5


def test_a_full_disk_refuses_appends_and_the_log_goes_on_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        log = EmbeddedLog(disk / "log", segment_bytes=64 * 1024)
        log.create_topic("t", 2)
        (disk / "ballast").write_bytes(bytes(200_000))
        expected: list[bytes] = []
        with pytest.raises(NoResource, match="No space left"):
            append_until_refused(log, expected)
        assert [value for value, _ in read_all(log)] == expected
        with pytest.raises(NoResource, match="topic big: No space left"):
            log.create_topic("big", 1000)
        assert [info.name for info in log.topics()] == ["t"]
        (disk / "ballast").unlink()
        assert log.append("t", 0, [Message(b"again")]).first_offset == len(expected)
        assert [value for value, _ in read_all(EmbeddedLog(disk / "log"))] == [*expected, b"again"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def append_until_refused(log: EmbeddedLog, expected: list[bytes]) -> None:
    for number in range(10_000):
        value = b"%d" % number * (1 + number % 3000)
        log.append("t", 0, [Message(value)])
        expected.append(value)


# --- other processes ---


def hold_lock(path: str, ready: multiprocessing.synchronize.Event) -> None:
    import fcntl

    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    ready.set()
    time.sleep(60)


def test_a_stopped_writer_that_has_the_lock_is_named_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cremant.log.embedded_state.LOCK_TIMEOUT_S", 0.2)
    log, path, _, values = prepared(tmp_path)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold_lock, args=(str(path.parent / "state"), ready))
    holder.start()
    try:
        assert ready.wait(30)
        with pytest.raises(Unavailable, match=f"process {holder.pid} has it"):
            log.append("t", 0, [Message(b"x")])
        assert log.latest("t", 0) == 5
        assert values_until_corrupt(log) == (values, "")
    finally:
        holder.kill()
        holder.join()
    assert log.append("t", 0, [Message(b"x")]).first_offset == 5


def append_many(log: EmbeddedLog, name: bytes) -> None:
    for number in range(300):
        log.append("t", 0, [Message(b"%s %d" % (name, number))])


def test_a_log_object_inherited_by_a_fork_excludes_its_parent(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path, segment_bytes=4096)
    log.create_topic("t", 1)
    log.append("t", 0, [Message(b"parent first")])
    children = [FORK.Process(target=append_many, args=(log, b"%d" % n)) for n in (0, 1)]
    for child in children:
        child.start()
    append_many(log, b"parent")
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    found = [value for value, _ in read_all(log)]
    assert len(found) == 901
    for name in (b"0", b"1", b"parent"):
        assert [value for value in found if value.startswith(name + b" ")][-300:] == [
            b"%s %d" % (name, number) for number in range(300)
        ]


def test_a_deletion_that_was_interrupted_is_finished_by_the_next_process(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    info = log.create_topic("t", 1)
    log.append("t", 0, [Message(b"x")])
    reader = log.reader("t", 0, 0)
    shutil.move(tmp_path / "topics" / "t", tmp_path / "trash" / f"t.{info.incarnation}")
    (tmp_path / "making" / "u.123" / "123" / "0").mkdir(parents=True)
    other = EmbeddedLog(tmp_path)
    assert other.topics() == []
    assert list((tmp_path / "trash").iterdir()) == list((tmp_path / "making").iterdir()) == []
    with pytest.raises(Exception, match="does not exist"):
        reader.read(max_messages=1, max_bytes=1)
    with pytest.raises(Exception, match="does not exist"):
        log.append("t", 0, [Message(b"x")])
