# SPDX-License-Identifier: Apache-2.0
"""The controller: keeps the records, serves REST, publishes the view, carries out what the pure rooms decide."""
