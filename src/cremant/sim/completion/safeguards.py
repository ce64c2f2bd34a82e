# SPDX-License-Identifier: Apache-2.0
"""Safeguards of segment completion that lie in drivers and stores, which this world models; with those of the
machines."""

from __future__ import annotations

import msgspec

from cremant.completion.safeguards import ALL as ALL_OF_MACHINES
from cremant.completion.safeguards import Safeguards


class WorldSafeguards(msgspec.Struct, frozen=True, kw_only=True):
    """True = the safeguard is in place."""

    machines: Safeguards = ALL_OF_MACHINES
    #: Controller: what an answer says is durable before it is given.
    persisted_first: bool = True
    #: Metadata store: a write counts only if the records, and the leader's term, are as the writer knows them.
    compared_and_set: bool = True
    #: Store: names of objects say attempt and content.
    names_say_content: bool = True
    #: Server: what was fetched is installed only if it is the committed content.
    fetch_verified: bool = True
    #: Server: what it is about to delete it does not report as a copy.
    leaving_uncounted: bool = True
    #: Server: who is to delete its own copy relies on holders that serve the segment, not on those that only live.
    serving_counted: bool = True
    #: Rebalance: who has the only copies stays a replica until another one has them.
    last_copy_kept: bool = True
    #: Rebalance: old replicas leave when the new ones are able.
    break_waits: bool = True
    #: Controller: repair of consumption, and of copies, runs.
    consumption_repaired: bool = True
    copies_repaired: bool = True


ALL = WorldSafeguards()
