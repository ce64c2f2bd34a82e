# SPDX-License-Identifier: Apache-2.0
"""Text to tree to bound tree to a two-phase plan, in Pinot's dialect."""
