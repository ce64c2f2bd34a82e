# SPDX-License-Identifier: Apache-2.0
"""Properties have no deadline: these tests share their machine with others, and the first call of Arrow is slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
