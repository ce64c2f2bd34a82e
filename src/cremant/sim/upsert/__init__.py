# SPDX-License-Identifier: Apache-2.0
"""The simulated world of upsert: keys, versions, cuts."""
