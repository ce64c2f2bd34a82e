# SPDX-License-Identifier: Apache-2.0
"""Deciding how a consuming segment ends. Pure machines."""
