# SPDX-License-Identifier: Apache-2.0
"""Cremant: a realtime OLAP store. Events stream in, SQL answers include them a moment later."""

__version__ = "0.1.0"
