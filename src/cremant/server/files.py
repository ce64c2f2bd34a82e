# SPDX-License-Identifier: Apache-2.0
"""Directories of one server.

    <data_dir>/segments/<table>.<incarnation>/<segment>/   complete sealed segments (see segment/reader.py)
    <data_dir>/scratch/<n>/                                builds and downloads in progress; emptied at start
    <data_dir>/tails/<table>.<incarnation>/<partition>/    spilled tails; emptied at start

A segment's directory appears by one rename, complete. Only one process works in a data directory at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from pathlib import Path

from cremant.model.cluster import Role
from cremant.segment.reader import SealedSegment
from cremant.server.partition import PartitionId
from cremant.shell.directory import hold_directory

#: A segment whose successor is about to take its place.
_ASIDE = ".replaced"


class ServerFiles:
    def __init__(self, data_dir: str | Path) -> None:
        self.root = Path(data_dir).absolute()
        self._segments = self.root / "segments"
        self._scratch = self.root / "scratch"
        self._tails = self.root / "tails"
        self._numbers = itertools.count(1)
        self._lock = hold_directory(self.root, Role.SERVER)
        for scratch in (self._scratch, self._tails):
            shutil.rmtree(scratch, ignore_errors=True)
        self._segments.mkdir(exist_ok=True)
        for aside in self._segments.glob(f"*/*{_ASIDE}"):
            target = aside.with_name(aside.name.removesuffix(_ASIDE))
            if target.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:  # its successor did not get the name any more
                os.replace(aside, target)

    def close(self) -> None:
        self._lock.close()

    def tail_directory(self, partition: PartitionId) -> Path:
        return self._tails / f"{partition.table}.{partition.incarnation}" / str(partition.partition)

    def segment_directory(self, table: str, incarnation: str, segment: str) -> Path:
        return self._segments / f"{table}.{incarnation}" / segment

    def new_scratch(self) -> Path:
        path = self._scratch / str(next(self._numbers))
        path.mkdir(parents=True)
        return path

    def adopt(self, sealed: SealedSegment, target: Path) -> SealedSegment:
        """Moves the directory of an open segment to its place, replacing what is there. Reads nothing. Whenever it
        ends, one of the two is there, whole, after the next start."""
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(target.name + _ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        if target.exists():
            os.replace(target, aside)
        try:
            os.replace(sealed.directory, target)
        except OSError:
            if aside.exists():
                os.replace(aside, target)
            raise
        shutil.rmtree(aside, ignore_errors=True)
        return dataclasses.replace(sealed, directory=target)

    def remove(self, directory: Path) -> None:
        """Queries that still read the files keep their mappings."""
        shutil.rmtree(directory, ignore_errors=True)

    def remove_segment(self, table: str, incarnation: str, segment: str) -> None:
        self.remove(self.segment_directory(table, incarnation, segment))

    def remove_table(self, table: str, incarnation: str) -> None:
        """Its tails are closed."""
        for directory in (self._segments, self._tails):
            self.remove(directory / f"{table}.{incarnation}")

    def tables_on_disk(self) -> list[tuple[str, str]]:
        """(table, incarnation) of every directory there is."""
        names = (path.name for path in self._segments.iterdir() if path.is_dir())
        return [(table, incarnation) for table, _, incarnation in (name.rpartition(".") for name in names)]

    def segments_on_disk(self, table: str, incarnation: str) -> list[str]:
        directory = self._segments / f"{table}.{incarnation}"
        found = directory.iterdir() if directory.is_dir() else ()
        return sorted(path.name for path in found if not path.name.endswith(_ASIDE))
