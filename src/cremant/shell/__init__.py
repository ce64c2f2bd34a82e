# SPDX-License-Identifier: Apache-2.0
"""What the shells of all roles share: HTTP app and server, membership, logs, backoff."""
