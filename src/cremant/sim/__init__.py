# SPDX-License-Identifier: Apache-2.0
"""The simulated world: one heap of virtual time that drives the real machines."""
