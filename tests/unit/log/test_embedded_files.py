# SPDX-License-Identifier: Apache-2.0
"""Files of the embedded log: retention, the index, the directory itself, waiting across processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import threading
import time
from pathlib import Path

import pytest

from cremant.log import embedded_files, embedded_index, embedded_wait
from cremant.log.api import Bounds, Message, OffsetExpired
from cremant.log.embedded import EmbeddedLog
from cremant.log.open import log_directory, open_logs
from cremant.model.errors import Corrupt, InvalidConfig, NoResource, NotFound, Unavailable
from cremant.model.limits import LOG_INDEX_EVERY_BYTES, LOG_RETENTION_CHECK_MS, MIB
from cremant.model.settings import Settings

BIG = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def files(path: Path, topic: str = "t") -> list[Path]:
    return sorted(path.glob(f"topics/{topic}/*/0/*.log"))


def fill(log: EmbeddedLog, topic: str, count: int, size: int = 1000) -> None:
    for number in range(count):
        log.append(topic, 0, [Message(b"%0*d" % (size, number))])


def test_an_append_that_has_its_timestamp_and_is_not_there_yet_is_not_overlooked(tmp_path: Path) -> None:
    """Else somebody could say at 1,001 that everything before is in the log up to here, and a message of 1,000 came."""
    seen: list[Bounds] = []
    reading = EmbeddedLog(tmp_path)

    def clock() -> int:
        seen.extend(reading.bounds("t", [0, 1]))
        return 1_000

    writing = EmbeddedLog(tmp_path, clock=clock)
    writing.create_topic("t", 2)
    writing.append("t", 0, [Message(b"a")])
    assert seen == [Bounds(0, 0, settled=False), Bounds(0, 0)]
    assert reading.bounds("t", [0, 1]) == [Bounds(0, 1), Bounds(0, 0)]
    assert writing.bounds("t", [0]) == [Bounds(0, 1)], "a process does not wait for itself"


def test_whatever_is_stamped_before_the_question_is_in_the_bounds_or_they_are_not_settled(tmp_path: Path) -> None:
    log, asking = EmbeddedLog(tmp_path), EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    answers: list[tuple[int, Bounds]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            at_ms = time.time_ns() // 1_000_000
            answers.extend((at_ms, bounds) for bounds in asking.bounds("t", [0]))

    thread = threading.Thread(target=ask)
    thread.start()
    stamps = [log.append("t", 0, [Message(b"a")]).timestamp_ms for _ in range(1_000)]
    done.set()
    thread.join()
    assert any(bounds.settled for _, bounds in answers)
    for at_ms, bounds in answers:
        if bounds.settled and bounds.latest < len(stamps):
            assert stamps[bounds.latest] >= at_ms, (
                f"a message of {stamps[bounds.latest]} came behind {bounds} of {at_ms}"
            )


# --- retention ---


def test_files_are_rolled_at_their_size(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path, segment_bytes=4096)
    log.create_topic("t", 1)
    fill(log, "t", 10)
    assert [int(path.stem) for path in files(tmp_path)] == [0, 3, 6, 9]
    log.append("t", 0, [Message(bytes(10_000))])
    log.append("t", 0, [Message(b"")])
    assert [int(path.stem) for path in files(tmp_path)] == [0, 3, 6, 9, 10, 11]
    assert all(path.stat().st_size <= 4096 for path in files(tmp_path) if path.stem != f"{10:020d}")


def test_retention_by_time_drops_whole_files_but_never_the_active_one(tmp_path: Path) -> None:
    clock = Clock()
    log = EmbeddedLog(tmp_path, segment_bytes=4096, retention_ms=60_000, clock=clock)
    log.create_topic("t", 1)
    fill(log, "t", 6)
    clock.now_ms += 30_000
    fill(log, "t", 6)
    log.expire()
    assert log.earliest("t", 0) == 0
    clock.now_ms += 31_000
    log.expire()
    assert log.earliest("t", 0) == 6
    assert [int(path.stem) for path in files(tmp_path)] == [6, 9]
    clock.now_ms += 1_000_000
    log.expire()
    assert (log.earliest("t", 0), log.latest("t", 0)) == (9, 12)
    assert len(list(tmp_path.glob("topics/t/*/0/*.idx"))) == len(files(tmp_path)) == 1
    assert log.append("t", 0, [Message(b"")]).first_offset == 12


def test_appends_apply_retention_now_and_then(tmp_path: Path) -> None:
    clock = Clock()
    log = EmbeddedLog(tmp_path, segment_bytes=4096, retention_ms=1_000, clock=clock)
    log.create_topic("t", 1)
    fill(log, "t", 10)
    clock.now_ms += LOG_RETENTION_CHECK_MS
    fill(log, "t", 1, size=10)
    assert len(files(tmp_path)) <= 2


def test_an_append_succeeds_although_retention_cannot_read_an_old_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    log = EmbeddedLog(tmp_path, segment_bytes=4096, retention_ms=1_000, clock=clock)
    log.create_topic("t", 1)
    fill(log, "t", 10)
    files(tmp_path)[0].write_bytes(bytes(100))
    clock.now_ms += LOG_RETENTION_CHECK_MS
    fill(log, "t", 1, size=10)
    assert log.latest("t", 0) == 11
    assert "retention failed" in caplog.text


def test_retention_by_size_keeps_the_newest_files(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path, segment_bytes=4096, retention_bytes=10_000)
    log.create_topic("t", 1)
    fill(log, "t", 100)
    log.expire()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10_000
    assert len(files(tmp_path)) >= 2
    assert log.earliest("t", 0) == int(files(tmp_path)[0].stem)


def test_epoch_logs_are_only_trimmed(tmp_path: Path) -> None:
    clock = Clock()
    log = EmbeddedLog(tmp_path, segment_bytes=4096, retention_ms=1, retention_bytes=1, clock=clock)
    topic = "epochs.gold.0123456789abcdef"
    log.create_topic(topic, 1)
    fill(log, topic, 10)
    clock.now_ms += 1_000_000
    fill(log, topic, 1)
    log.expire()
    assert log.earliest(topic, 0) == 0
    log.trim(topic, 0, 7)
    assert log.earliest(topic, 0) == 6


def test_other_processes_see_what_retention_dropped(tmp_path: Path) -> None:
    log, other = (EmbeddedLog(tmp_path, segment_bytes=4096) for _ in range(2))
    log.create_topic("t", 1)
    fill(log, "t", 10)
    reader = other.reader("t", 0, 0)
    reader.read(max_messages=1, max_bytes=1)
    log.trim("t", 0, 10)
    assert other.earliest("t", 0) == 9
    with pytest.raises(OffsetExpired):
        reader.read(max_messages=1, max_bytes=1)


# --- the index ---


@pytest.mark.parametrize("damage", ["none", "gone", "garbage", "first half", "shuffled", "of another file"])
def test_offsets_and_times_are_found_whatever_the_index_looks_like(tmp_path: Path, damage: str) -> None:
    clock = Clock()
    log = EmbeddedLog(tmp_path, segment_bytes=1 * MIB, clock=clock)
    log.create_topic("t", 1)
    for number in range(3000):
        clock.now_ms = 1_000_000 + number
        log.append("t", 0, [Message(b"%01000d" % number)])
    for path in tmp_path.glob("topics/t/*/0/*.idx"):
        data = path.read_bytes()
        changed = {
            "none": data,
            "gone": b"",
            "garbage": os.urandom(len(data)),
            "first half": data[: len(data) // 2 + 7],
            "of another file": b"".join(
                embedded_index.Entry(int(path.stem) + 10 * n, 1_000_000 + int(path.stem) + 10 * n, 10_000 * n).pack()
                for n in range(60)
            ),
            "shuffled": b"".join(data[at : at + 32] for at in reversed(range(0, len(data), 32))),
        }
        path.write_bytes(changed[damage])
    opened = EmbeddedLog(tmp_path)
    for offset in range(0, 3000, 97):
        batch = opened.reader("t", 0, offset).read(max_messages=1, max_bytes=BIG)
        assert batch is not None
        assert batch.values.to_pylist() == [b"%01000d" % offset]
        assert opened.offset_at("t", 0, 1_000_000 + offset) == offset


def test_opening_a_reader_reads_a_bounded_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    for first in range(0, 20_000, 10):
        log.append("t", 0, [Message(b"%01000d" % number) for number in range(first, first + 10)])
    assert files(tmp_path)[0].stat().st_size > 18 * MIB
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(embedded_files.os, "pread", lambda fd, size, at: read.append(size) or pread(fd, size, at))
    for offset in (19_999, 12_345, 0):
        read.clear()
        batch = log.reader("t", 0, offset).read(max_messages=1, max_bytes=1)
        assert batch is not None
        assert batch.offsets.tolist() == [offset]
        assert sum(read) < 4 * LOG_INDEX_EVERY_BYTES
    read.clear()
    log.offset_at("t", 0, int(batch.timestamps_ms[0]) + 1)
    assert sum(read) < 4 * LOG_INDEX_EVERY_BYTES


# --- the directory ---


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(InvalidConfig, match=r"not a log directory: .*found thesis.txt"):
        EmbeddedLog(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_the_directory_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("words")
    with pytest.raises(Exception, match="log directory") as caught:
        EmbeddedLog(tmp_path / "log")
    assert "Not a directory" in str(caught.value) or "File exists" in str(caught.value)


def test_a_log_of_another_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    EmbeddedLog(tmp_path).close()
    (tmp_path / "log.json").write_text('{"format": "cremant embedded log", "version": 7}')
    with pytest.raises(InvalidConfig, match=r"version 1, found .*7"):
        EmbeddedLog(tmp_path)
    (tmp_path / "log.json").write_text("{")
    with pytest.raises(Corrupt, match=r"log\.json"):
        EmbeddedLog(tmp_path)


def test_a_damaged_topic_description_names_its_file(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    (tmp_path / "topics/t/topic.json").write_text('{"name": "t"}')
    with pytest.raises(Corrupt, match=r"topics/t/topic\.json"):
        log.topic("t")


@pytest.mark.parametrize("wrong", [{"fsync": "sometimes"}, {"segment_bytes": 10}])
def test_a_setting_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="setting log_"):
        EmbeddedLog(tmp_path, **wrong)  # type: ignore[arg-type]


def test_settings_say_where_the_log_is(tmp_path: Path) -> None:
    beside = Settings(("test", {"data_dir": str(tmp_path)}))
    assert log_directory(beside) == tmp_path / "log"
    elsewhere = Settings(("test", {"data_dir": str(tmp_path), "log_dir": str(tmp_path / "other")}))
    log = open_logs(elsewhere).epoch
    log.create_topic("t", 1)
    assert (tmp_path / "other" / "topics" / "t").is_dir()
    assert open_logs(elsewhere).epoch.topics() == log.topics()


def test_a_closed_log_says_so_and_its_readers_stay_usable(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    fill(log, "t", 3)
    reader = log.reader("t", 0, 0)
    log.close()
    with pytest.raises(Unavailable, match="is closed"):
        log.latest("t", 0)
    assert reader.read(max_messages=10, max_bytes=BIG) is not None


def test_no_file_stays_open_after_close(tmp_path: Path) -> None:
    def open_files() -> int:
        return sum(str(tmp_path) in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))

    log = EmbeddedLog(tmp_path, segment_bytes=4096)
    log.create_topic("t", 8)
    for partition in range(8):
        for _ in range(10):
            log.append("t", partition, [Message(bytes(1000))])
        reader = log.reader("t", partition, 0)
        assert reader.read(max_messages=100, max_bytes=BIG) is not None
    assert 0 < open_files() <= 8 * 2 + 1
    reader.close()
    del reader
    log.close()
    assert open_files() == 0


def test_running_out_of_open_files_is_an_error_with_a_hint(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(NoResource, match="ulimit"):
            log.append("t", 0, [Message(b"x")])
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert log.append("t", 0, [Message(b"x")]).first_offset == 0


# --- waiting ---


def append_later(path: Path, delay_s: float) -> None:
    log = EmbeddedLog(path)
    time.sleep(delay_s)
    log.append("t", 0, [Message(b"%d" % time.monotonic_ns())])


@pytest.mark.parametrize("inotify", [True, False])
def test_waiting_ends_soon_after_another_process_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inotify: bool
) -> None:
    if not inotify:
        monkeypatch.setattr(embedded_wait, "_libc", None)
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    delays_ms = []
    for number in range(5):
        child = multiprocessing.get_context("fork").Process(target=append_later, args=(tmp_path, 0.1))
        child.start()
        assert log.wait({("t", 0): number}, 30.0)
        woken_ns = time.monotonic_ns()
        child.join(30)
        batch = log.reader("t", 0, number).read(max_messages=1, max_bytes=BIG)
        assert batch is not None
        delays_ms.append((woken_ns - int(batch.values[0].as_py())) / 1e6)
    assert min(delays_ms) < 50


def test_waiting_for_nothing_costs_next_to_no_processor_time(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 64)
    positions = {("t", partition): 0 for partition in range(64)}
    log.wait(positions, 0.01)
    started_s = time.thread_time()
    assert not log.wait(positions, 1.0)
    assert time.thread_time() - started_s < 0.05


def test_waiting_on_a_topic_that_is_deleted_meanwhile_ends(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 1)
    timer = threading.Timer(0.1, lambda: EmbeddedLog(tmp_path).delete_topic("t"))
    timer.start()
    with pytest.raises(NotFound):
        log.wait({("t", 0): 0}, 30.0)
    timer.join()


def test_a_waiter_follows_the_positions_it_is_asked_for(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path)
    log.create_topic("t", 3)
    assert not log.wait({("t", 0): 0, ("t", 1): 0}, 0.01)
    assert not log.wait({("t", 2): 0}, 0.01)
    for partition in (2, 0, 1):
        timer = threading.Timer(0.02, lambda partition=partition: log.append("t", partition, [Message(b"")]))
        timer.start()
        assert log.wait({("t", partition): 0}, 30.0)
        timer.join()
