# SPDX-License-Identifier: Apache-2.0
"""Each client of httpx reads the certificates of the machine, also if it speaks nothing but plain HTTP, as nearly all
of them do in tests: 35 ms of a core, often for a single request. Here they share what the first one has read."""

from __future__ import annotations

import functools
import ssl
from typing import Any

import httpx._transports.default as transport


def share_certificates() -> None:
    """From now on, in this process. Clients with other certificates than those of the machine read them as before."""
    read = transport.create_ssl_context

    @functools.cache
    def usual(trust_env: bool) -> ssl.SSLContext:
        return read(trust_env=trust_env)

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None:
            return usual(trust_env)
        return read(verify=verify, cert=cert, trust_env=trust_env)

    transport.create_ssl_context = shared
