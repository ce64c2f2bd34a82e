# SPDX-License-Identifier: Apache-2.0
"""The world of segment completion."""
