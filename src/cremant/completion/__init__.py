# SPDX-License-Identifier: Apache-2.0
"""Deciding how a segment ends: the controller's half as a pure machine."""
