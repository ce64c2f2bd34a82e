# SPDX-License-Identifier: Apache-2.0
"""Message batch to row block: decode, coerce, filter, transform. Columnar and pure."""
