# SPDX-License-Identifier: Apache-2.0
"""An ordered, partitioned, replayable log. Streams and the epoch log are both logs."""
