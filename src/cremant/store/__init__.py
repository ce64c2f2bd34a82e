# SPDX-License-Identifier: Apache-2.0
"""Where things last: the metadata store (records, compare-and-set) and the deep store (sealed segments)."""
