# SPDX-License-Identifier: Apache-2.0
"""Deciding for the cluster: placement, leases, membership, derived states, retention. Pure functions, no clock."""
