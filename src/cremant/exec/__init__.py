# SPDX-License-Identifier: Apache-2.0
"""Plans to Arrow: the only room that imports datafusion."""
