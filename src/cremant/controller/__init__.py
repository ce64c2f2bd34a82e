# SPDX-License-Identifier: Apache-2.0
"""The shell of the controller: REST routes, drivers, wiring."""
