# SPDX-License-Identifier: Apache-2.0
"""Where bytes and metadata rest: deep store and metadata store."""
