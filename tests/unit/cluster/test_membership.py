# SPDX-License-Identifier: Apache-2.0
"""Which process speaks for an instance, and which instances live."""

from __future__ import annotations

import msgspec
import pytest

from cremant.cluster.membership import RETIRED_MAX, heard, is_live
from cremant.model.cluster import InstanceRecord, Role
from cremant.model.errors import Fenced
from cremant.model.limits import INSTANCE_DEAD_AFTER_MS

RECORD = InstanceRecord(id="Server_x_1", role=Role.SERVER, host="127.0.0.1", port=1)


def test_a_heartbeat_of_the_same_process_changes_nothing_durable() -> None:
    member = heard(None, RECORD, "n1")
    assert heard(member, RECORD, "n1") is member


def test_a_restarted_process_replaces_the_old_one_for_good() -> None:
    member = heard(heard(None, RECORD, "n1"), RECORD, "n2")
    assert (member.nonce, member.retired) == ("n2", ("n1",))
    with pytest.raises(Fenced):
        heard(member, RECORD, "n1")


def test_a_new_address_is_taken_over() -> None:
    moved = msgspec.structs.replace(RECORD, port=2)
    for nonce in ("n1", "n2"):
        assert heard(heard(None, RECORD, "n1"), moved, nonce).record == moved


def test_only_the_last_replaced_processes_are_remembered() -> None:
    member = heard(None, RECORD, "n0")
    for number in range(1, 50):
        member = heard(member, RECORD, f"n{number}")
    assert len(member.retired) == RETIRED_MAX
    assert member.retired[-1] == "n48"


def test_an_instance_lives_while_its_last_heartbeat_is_young() -> None:
    assert not is_live(None, 0)
    assert is_live(0, INSTANCE_DEAD_AFTER_MS - 1)
    assert not is_live(0, INSTANCE_DEAD_AFTER_MS)
