# SPDX-License-Identifier: Apache-2.0
"""TLS between servers: what a server's HTTPS listener shows, and what a client holds certificates of others against.

Rules: files are PEM, read at the start, so that what is wrong with them is told there; a renewed certificate takes a
restart. Clients always check the authority, the dates and the host's name.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cremant.model.errors import InvalidConfig
from cremant.model.secrets import is_reference, resolve
from cremant.model.settings import Settings


def listener_context(settings: Settings) -> ssl.SSLContext | None:
    """Of the settings `tls_cert`, `tls_key`, `tls_key_password`; None when there is no certificate. Raises
    InvalidConfig."""
    certificate, key, password = settings.tls_cert, settings.tls_key, _password(settings.tls_key_password)
    if not certificate:
        if key or settings.tls_port:
            raise InvalidConfig("settings tls_key and tls_port mean nothing without tls_cert", hint="set tls_cert, too")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Always a password, or OpenSSL asks for it at the terminal.
        context.load_cert_chain(certificate, key or None, password=lambda: password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidConfig(
            f"settings tls_cert {certificate}, tls_key {key or certificate}: they cannot be used: {error}",
            hint="PEM files: the certificate with those between it and the authority, and its key (tls_key_password, "
            "if it has one)",
        ) from error
    return context


def client_context(settings: Settings) -> ssl.SSLContext:
    """Of the setting `tls_ca`; the system's authorities when it is empty. Raises InvalidConfig."""
    authority = settings.tls_ca
    try:
        return ssl.create_default_context(cafile=authority or None)
    except OSError as error:
        raise InvalidConfig(
            f"setting tls_ca: {authority} cannot be used: {error}", hint="a PEM file of the certificates of authorities"
        ) from error


def failure_of_tls(error: BaseException) -> ssl.SSLError | None:
    """What TLS said, somewhere behind the error of a client."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, ssl.SSLError):
        behind = behind.__cause__ or behind.__context__
    return behind


def _password(written: str) -> str:
    if not written:
        return ""
    if not is_reference(written):
        raise InvalidConfig(
            "setting tls_key_password: expected a reference to the password, found something else",
            hint="${env:NAME} or ${file:PATH}",
        )
    try:
        return resolve(written, os.environ, lambda name: Path(name).read_text(encoding="utf-8"))
    except InvalidConfig as error:
        raise InvalidConfig(f"setting tls_key_password: {error.message}", hint=error.hint) from None
