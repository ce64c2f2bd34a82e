# SPDX-License-Identifier: Apache-2.0
"""The Spark side: source, row-block tasks, drivers of the epoch protocol, supervisor. Only here is pyspark imported."""
