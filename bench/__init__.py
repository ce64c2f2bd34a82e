# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: one file per question. A benchmark reports; it asserts nothing."""
