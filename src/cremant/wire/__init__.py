# SPDX-License-Identifier: Apache-2.0
"""The sentences: every message that crosses a process, and their codec."""
