# SPDX-License-Identifier: Apache-2.0
"""The safeguards of the epoch protocol, each of which can be taken away (design: epoch-log.md, Reading).

Production never passes anything but `ALL`. The simulator takes one away at a time and must notice: a simulator that
cannot see a missing safeguard proves nothing about the ones that are there.
"""

from __future__ import annotations

import msgspec


class Safeguards(msgspec.Struct, frozen=True, kw_only=True):
    """True = the safeguard is in place."""

    #: Close: read partition 0 back up to one's own mark before any other mark is written.
    read_back: bool = True
    #: Start: partition 0 is fenced, and the fence acknowledged, before any other partition.
    first_partition_fenced_first: bool = True
    #: Start: the epoch base is chosen from a scan that ends at one's own Fences.
    base_after_scan: bool = True
    #: Start: a mark rolled forward names the generation that wrote the blocks.
    blocks_generation: bool = True
    #: Start: the Spark checkpoint is compared with the vector of the committed epoch.
    checkpoint_compared: bool = True
    #: Supervisor: a new partition enters with a new start, and so gets a Fence before its first epoch (E-7).
    growth_fenced: bool = True
    #: Close: a batch must begin where the last epoch ended (behind `checkpoint_compared`).
    plan_checked: bool = True
    #: Source: a planned batch runs with the config version of its plan, however often it runs.
    config_pinned: bool = True
    #: Reader: records of a generation that a Fence has ended are ignored (E-1).
    fenced_ignored: bool = True
    #: Reader: rows of an epoch are counted as a set.
    distinct_counts: bool = True
    #: Reader: a stored position restores the generation in force.
    position_generation: bool = True
    #: Reader, upsert tables: blocks are staged and taken at the mark that names them (E-6).
    taken_at_mark: bool = True


ALL = Safeguards()
