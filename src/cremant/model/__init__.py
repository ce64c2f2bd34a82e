# SPDX-License-Identifier: Apache-2.0
"""The nouns: names, schema, table config, offsets, segments, cluster state, settings, limits, errors. No I/O."""
