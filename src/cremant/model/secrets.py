# SPDX-License-Identifier: Apache-2.0
"""Secrets in configs: referred to as `${env:NAME}` or `${file:PATH}`, resolved where a client is made, never shown.

A reference is stored and shown as written. A literal value under a sensitive key (password, secret, token, …) is
stored, but shown as `*****`; a document that comes back with `*****` keeps what is stored there (`restore`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cremant.model.errors import InvalidConfig

HIDDEN = "*****"

_REFERENCE = re.compile(r"\$\{(env|file):([^}]*)\}")
_SENSITIVE = re.compile(
    r"passw(or)?d|pwd|passphrase|secret|token|credential|jaas\.?config|user\.?info|private\.?key|api\.?key|access\.?key|account\.?key"
    r"|ssl\.key(\.pem)?$|keystore\.key$|sas\.?key"
)
#: Where something is or how it is made, not the thing itself.
_HARMLESS = re.compile(r"(url|uri|location|type|mechanism|class|class\.?name|endpoint|timeout\.?ms|protocol)$")
#: `http://user:password@host`, under any key; up to the last `@`, as clients take it.
_URL_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):([^/\s]+)@")
_JAAS = re.compile(r"jaas\.?config$", re.IGNORECASE)
#: `password="…"` and the like within a sasl.jaas.config.
JAAS_OPTION = re.compile(r"""(\w+)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s;]+)""")


def resolve(text: str, environ: Mapping[str, str], read_file: Callable[[str], str]) -> str:
    """`text` with its references replaced; a file's value ends before its last line break. What a reference gives is
    not looked into again. Raises InvalidConfig naming the reference, never a value."""

    def value(match: re.Match[str]) -> str:
        kind, name = match.group(1), match.group(2).strip()
        if not name:
            raise InvalidConfig(f"{match.group(0)} names nothing", hint="${env:NAME} or ${file:PATH}")
        if kind == "env":
            if name not in environ:
                raise InvalidConfig(
                    f"{match.group(0)}: the environment has no {name}", hint=f"set {name} where this process starts"
                )
            return environ[name]
        try:
            return re.sub(r"\r?\n\Z", "", read_file(name))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"{match.group(0)} cannot be read: {error}") from None

    return _REFERENCE.sub(value, text)


def resolve_all(
    properties: Mapping[str, str], environ: Mapping[str, str], read_file: Callable[[str], str]
) -> dict[str, str]:
    """Raises InvalidConfig naming the key."""
    resolved: dict[str, str] = {}
    for key, value in properties.items():
        try:
            resolved[key] = resolve(value, environ, read_file)
        except InvalidConfig as error:
            raise InvalidConfig(f"{key}: {error.message}", hint=error.hint) from None
    return resolved


def is_sensitive(key: str) -> bool:
    lowered = key.lower()
    return _SENSITIVE.search(lowered) is not None and _HARMLESS.search(lowered) is None


def shown(key: str, value: str) -> str:
    """What may be shown of a value."""
    if is_sensitive(key) and value and not _only_references(key, value):
        return HIDDEN
    return _URL_PASSWORD.sub(_shown_login, value)


def _shown_login(match: re.Match[str]) -> str:
    return match.group(0) if _REFERENCE.fullmatch(match.group(2)) else f"{match.group(1)}:{HIDDEN}@"


def is_reference(value: str) -> bool:
    """The value is one reference and nothing else."""
    return _REFERENCE.fullmatch(value.strip()) is not None


def _only_references(key: str, value: str) -> bool:
    """The value is one reference, or a login module whose sensitive options are."""
    if is_reference(value):
        return True
    options = JAAS_OPTION.findall(value) if _JAAS.search(key) and _REFERENCE.search(value) else []
    return bool(options) and all(
        _REFERENCE.fullmatch(given.strip("\"'")) for name, given in options if is_sensitive(name)
    )


def redact(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties as they may be shown."""
    return {key: shown(key, value) for key, value in properties.items()}


def redact_document(document: Any, key: str = "") -> Any:
    """A JSON document as it may be shown; everything else is as it was."""
    if isinstance(document, dict):
        return {name: redact_document(value, str(name)) for name, value in document.items()}
    if isinstance(document, list):
        return [redact_document(value, key) for value in document]
    if isinstance(document, str):
        return shown(key, document)
    is_number = isinstance(document, (int, float)) and not isinstance(document, bool)
    return HIDDEN if is_number and is_sensitive(key) else document


def restore(document: Any, stored: Any, key: str = "", where: str = "") -> Any:
    """`document` with the values that were hidden from its author taken from `stored`, the document before. Raises
    InvalidConfig where nothing is stored that was shown so."""
    if isinstance(document, dict):
        before = stored if isinstance(stored, dict) else {}
        return {
            name: restore(value, before.get(name), str(name), f"{where}/{name}") for name, value in document.items()
        }
    if isinstance(document, list):
        old = stored if isinstance(stored, list) else []
        padded = old + [None] * (len(document) - len(old))
        return [restore(value, padded[at], key, f"{where}/{at}") for at, value in enumerate(document)]
    if not isinstance(document, str) or HIDDEN not in document or document == stored:
        return document
    if stored is not None and redact_document(stored, key) == document:
        return stored
    if document != HIDDEN and not _hides_login(document):
        return document
    raise InvalidConfig(
        f"{where}: the value is hidden ({HIDDEN}) and none is stored",
        hint="write the value, or a reference ${env:NAME}",
    )


def _hides_login(text: str) -> bool:
    return f":{HIDDEN}@" in text
