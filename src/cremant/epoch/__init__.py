# SPDX-License-Identifier: Apache-2.0
"""The records of the epoch log, their format, and the machines that write, start, close and read epochs."""
