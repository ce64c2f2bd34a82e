# SPDX-License-Identifier: Apache-2.0
"""The shell of the broker: scatter, gather, reduce, Pinot's answer."""
