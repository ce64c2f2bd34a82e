# SPDX-License-Identifier: Apache-2.0
"""The shell of the server: tails, sealing, serving scans."""
