# SPDX-License-Identifier: Apache-2.0
"""Worker threads of a server."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from cremant.server.pool import DaemonPool


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_threads_of_a_pool_are_as_nice_as_they_should_be_and_nobody_else_is() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    usual, background = DaemonPool(1, "usual"), DaemonPool(1, "background", nice=5)
    before = nice()
    try:
        assert background.submit(nice).result(10) == min(before + 5, 19)
        assert usual.submit(nice).result(10) == before
        assert nice() == before
    finally:
        usual.close()
        background.close()
