# SPDX-License-Identifier: Apache-2.0
"""Makes the state record of a partition anew from its files: after a power cut, or when the record is damaged.

The last file is checked frame by frame. A damaged end is what a dying writer left: it is not there (the next append
cuts it). Damage with a valid frame after it is not: that is Corrupt, naming file and position. Under the lock.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from cremant.log import embedded_index as index
from cremant.log.embedded_files import File, bases, corrupt, last_header, log_path
from cremant.log.embedded_frame import MAGIC, check_crc, parse_header
from cremant.log.embedded_state import PartitionState
from cremant.model.limits import LOG_INDEX_EVERY_BYTES

logger = logging.getLogger(__name__)


def recover(directory: Path) -> PartitionState:
    """Raises Corrupt; FileNotFoundError if the partition is gone."""
    found = bases(directory)
    if not found:
        return PartitionState()
    base = found[-1]
    path = log_path(directory, base)
    data = path.read_bytes()
    at, offset, timestamp_ms = 0, base, 0
    entries: list[index.Entry] = []
    indexed = -1
    while at < len(data):
        header = parse_header(data, at)
        problem = header if isinstance(header, str) else check_crc(header, data, at)
        if problem is None and not isinstance(header, str) and header.base_offset != offset:
            problem = f"expected offset {offset}, found {header.base_offset}"
        if problem is not None or isinstance(header, str):
            _refuse_damage_inside(path, data, at, str(problem))
            logger.warning("%s: %d bytes of an unfinished append at byte %d are dropped", path, len(data) - at, at)
            break
        if indexed < 0 or at - indexed >= LOG_INDEX_EVERY_BYTES:
            entries.append(index.Entry(header.base_offset, header.timestamp_ms, at))
            indexed = at
        at, offset, timestamp_ms = at + header.frame_bytes, header.next_offset, header.timestamp_ms
    try:
        index.rewrite(path, entries)
    except OSError as error:
        logger.warning("%s: its index could not be made anew: %s", path, error)  # it is advice: searches are longer
    if at == 0 and len(found) > 1:
        timestamp_ms = _last_timestamp_ms(directory, found[-2], base)
    return PartitionState(base, at, offset, timestamp_ms, found[0], indexed)


def _refuse_damage_inside(path: Path, data: bytes, at: int, problem: str) -> None:
    """Raises Corrupt if a valid frame of a later offset comes after the damage at `at`."""
    magic = MAGIC.to_bytes(4, "little")
    later = data.find(magic, at + 8)
    while later >= 0:
        header = None if later % 8 else parse_header(data, later)
        if header is not None and not isinstance(header, str) and check_crc(header, data, later) is None:
            raise corrupt(path, at, f"{problem}; a valid frame follows at byte {later}")
        later = data.find(magic, later + 4)


def _last_timestamp_ms(directory: Path, base: int, next_base: int) -> int:
    path = log_path(directory, base)
    file = File(path, os.O_RDONLY)
    last = last_header(file, path, base, file.size())
    if last is None or last[1].next_offset != next_base:
        found = "no frame" if last is None else f"offset {last[1].next_offset}"
        raise corrupt(path, file.size(), f"expected the file to end at offset {next_base}, found {found}")
    return last[1].timestamp_ms
