# SPDX-License-Identifier: Apache-2.0
"""The topics of an embedded log: which there are, created, grown and deleted at once, also if the process dies.

    <root>/log.json                                  marks the directory as a log, with its format version
    <root>/lock                                      held while topics change
    <root>/topics/<topic>/topic.json                 name, partitions, incarnation
    <root>/topics/<topic>/<incarnation>/<partition>/ files of a partition (`embedded_partition`)
    <root>/making/…, <root>/trash/…                  what is being created and deleted; swept when nobody works on it

A topic comes and goes by one rename of its directory. The incarnation in the path keeps readers and writers of an old
topic out of a new one of the same name.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cremant.log.api import TopicInfo
from cremant.log.columns import check_new_topic, no_such_topic
from cremant.log.embedded_files import File, world_error
from cremant.log.embedded_partition import EmbeddedPartition, PartitionGone, PartitionOptions, state_path
from cremant.log.embedded_state import PartitionState, locked
from cremant.model.errors import AlreadyExists, Conflict, Corrupt, CremantError, InvalidConfig, NotFound

_FORMAT = "cremant embedded log"
_VERSION = 1


class Topics:
    """The directory of topics under `root`. Creates the log if there is none."""

    def __init__(self, root: Path, options: PartitionOptions) -> None:
        self._root = root
        self._options = options
        try:
            self._refuse_foreign()
            for name in ("", "topics", "making", "trash"):
                (root / name).mkdir(parents=True, exist_ok=True)
            with self._changing(f"log directory {root}"):
                if not (root / "log.json").exists():
                    self._write_json(root / "log.json", {"format": _FORMAT, "version": _VERSION})
        except OSError as error:
            raise world_error(error, f"log directory {root}") from error

    def create(self, topic: str, partitions: int) -> TopicInfo:
        check_new_topic(topic, partitions)
        info = TopicInfo(topic, partitions, secrets.token_hex(8))
        with self._changing(f"topic {topic}"):
            if self._topic_path(topic).exists():
                raise AlreadyExists(f"topic {topic!r} exists already")
            making = self._root / "making" / f"{topic}.{info.incarnation}"
            self._make_partitions(making / info.incarnation, range(partitions))
            self._write_info(making, info)
            making.rename(self._topic_path(topic))
            self._sync(self._root / "topics")
        return info

    def grow(self, topic: str, partitions: int) -> TopicInfo:
        check_new_topic(topic, partitions)
        with self._changing(f"topic {topic}"):
            info = self.load(topic)
            if partitions < info.partitions:
                raise Conflict(f"topic {topic} has {info.partitions} partitions and cannot shrink to {partitions}")
            grown = info._replace(partitions=partitions)
            directory = self._topic_path(topic)
            self._make_partitions(directory / info.incarnation, range(info.partitions, partitions))
            self._write_info(directory, grown)
        return grown

    def delete(self, topic: str) -> None:
        with self._changing(f"topic {topic}"):
            info = self.load(topic)
            self._topic_path(topic).rename(self._root / "trash" / f"{topic}.{info.incarnation}")
            self._sync(self._root / "topics")
            self._sweep()

    def load(self, topic: str) -> TopicInfo:
        """Raises NotFound, Corrupt."""
        path = self._topic_path(topic) / "topic.json"
        try:
            found: Any = json.loads(path.read_bytes())
            return TopicInfo(found["name"], int(found["partitions"]), str(found["incarnation"]))
        except (FileNotFoundError, NotADirectoryError):
            raise no_such_topic(topic) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{path}: not the description of a topic: {error!r}") from error
        except OSError as error:
            raise world_error(error, f"topic {topic}") from error

    def list(self) -> list[TopicInfo]:
        found = []
        for name in sorted(os.listdir(self._root / "topics")):
            try:
                found.append(self.load(name))
            except NotFound:
                pass  # deleted since it was listed, or a stray file
        return found

    def partition_directory(self, info: TopicInfo, partition: int) -> Path:
        return self._topic_path(info.name) / info.incarnation / str(partition)

    def _topic_path(self, topic: str) -> Path:
        return self._root / "topics" / topic

    def _refuse_foreign(self) -> None:
        """A directory with something in it that is not a log is left alone."""
        marker = self._root / "log.json"
        if marker.exists():
            try:
                marked: Any = json.loads(marker.read_bytes())
            except ValueError as error:
                raise Corrupt(f"{marker}: expected JSON, found something else: {error}") from error
            if marked != {"format": _FORMAT, "version": _VERSION}:
                raise InvalidConfig(f"{marker}: expected {_FORMAT!r} version {_VERSION}, found {marked!r}")
            return
        if not self._root.exists():
            return
        others = sorted(set(os.listdir(self._root)) - {"lock", "topics", "making", "trash", "lost+found"})
        if [name for name in others if not name.startswith("log.json.")]:
            found = ", ".join(others[:5])
            raise InvalidConfig(
                f"{self._root} is not a log directory: expected log.json or nothing in it, found {found}",
                hint="name an empty or a new directory with the setting log_dir",
            )

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """One change of topics at a time, over all processes."""
        try:
            lock = File(self._root / "lock", os.O_RDWR | os.O_CREAT)
            with locked(lock.fd, what):
                self._sweep()
                yield
        except OSError as error:
            raise world_error(error, what) from error

    def _sweep(self) -> None:
        """Finishes deletions and removes half-made topics, ours and those of processes that died. Under the lock."""
        for directory in (self._root / "trash").iterdir():
            for state in directory.glob(f"*/*/{state_path(Path()).name}"):
                try:
                    EmbeddedPartition(state.parent, f"deleted topic {directory.name}", self._options).mark_deleted()
                except (PartitionGone, CremantError):
                    pass  # already marked, or unreadable: it goes either way
            shutil.rmtree(directory)
        for directory in (self._root / "making").iterdir():
            shutil.rmtree(directory)

    def _make_partitions(self, directory: Path, numbers: range) -> None:
        try:
            for number in numbers:
                partition = directory / str(number)
                partition.mkdir(parents=True, exist_ok=True)
                state_path(partition).write_bytes(PartitionState().pack())
        except OSError:
            for number in numbers:
                shutil.rmtree(directory / str(number), ignore_errors=True)
            raise

    def _write_info(self, directory: Path, info: TopicInfo) -> None:
        self._write_json(directory / "topic.json", info._asdict())

    def _write_json(self, path: Path, value: Any) -> None:
        """Replaces a small file at once."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(json.dumps(value).encode() + b"\n")
                if self._options.fsync:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._sync(path.parent)

    def _sync(self, directory: Path) -> None:
        if self._options.fsync:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
