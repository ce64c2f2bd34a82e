# SPDX-License-Identifier: Apache-2.0
"""A schema registry as a table's decoder properties name it: what a client needs, parsed and checked. Nothing is opened
here; the pipeline asks the registry (`GET /schemas/ids/{id}`) and hands in what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from cremant.model.errors import InvalidConfig

_PREFIX = "schema.registry."
_URL = f"{_PREFIX}rest.url"
_LOGIN = f"{_PREFIX}basic.auth.user.info"
_TOKEN = f"{_PREFIX}bearer.auth.token"
_AUTHORITY = f"{_PREFIX}ssl.ca.location"
_KNOWN = (_URL, _LOGIN, _TOKEN, _AUTHORITY)
#: Of Pinot's decoder, without a meaning here.
_IGNORED = (f"{_PREFIX}basic.auth.credentials.source", f"{_PREFIX}schema.name")
#: Goes into a header.
_TOKEN_TEXT = re.compile(r"[\x21-\x7e]*")


class Registry(NamedTuple):
    """`urls`: asked one after the other until one answers; `login`: `user:password`; `token`: a bearer's;
    `authority`: path of a PEM file that vouches for the server, instead of the system's."""

    urls: tuple[str, ...]
    login: str = ""
    token: str = ""
    authority: str = ""


def parse_registry(properties: Mapping[str, str]) -> Registry:
    """Values may be references to secrets, or what they stand for. Raises InvalidConfig, never showing a secret."""
    unknown = sorted(key for key in properties if key.startswith(_PREFIX) and key not in (*_KNOWN, *_IGNORED))
    if unknown:
        raise InvalidConfig(
            f"Avro decoder: {', '.join(unknown)} not supported by this version", hint=f"known: {', '.join(_KNOWN)}"
        )
    urls = tuple(url.strip().rstrip("/") for url in properties.get(_URL, "").split(",") if url.strip())
    for url in urls:
        if "${" not in url and not _is_address(url):
            raise InvalidConfig(
                f"Avro decoder: {_URL} must be http://host:port or https://host:port, found {without_login(url)!r}"
            )
    if not urls:
        raise InvalidConfig(f"Avro decoder: {_URL} is missing")
    token = properties.get(_TOKEN, "").strip()
    if "${" not in token and not _TOKEN_TEXT.fullmatch(token):
        raise InvalidConfig(f"Avro decoder: {_TOKEN} must be printable ASCII without spaces")
    return Registry(urls, properties.get(_LOGIN, ""), token, properties.get(_AUTHORITY, ""))


def without_login(url: str) -> str:
    """As it may be shown."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _is_address(url: str) -> bool:
    try:
        split = urlsplit(url)
        return split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:  # brackets that do not close, a port that is none
        return False
