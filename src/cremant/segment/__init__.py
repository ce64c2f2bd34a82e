# SPDX-License-Identifier: Apache-2.0
"""Columnar storage: the mutable tail, the deterministic Parquet build, the mapped reader."""
