# SPDX-License-Identifier: Apache-2.0
"""Deciding about the cluster: placement, leases, membership, routing, retention, supervision. Pure."""
