# SPDX-License-Identifier: Apache-2.0
"""Which deep store the settings name: `store_uri` is a directory (a path or `file://`) or `s3://bucket/prefix`; empty
is the directory in our own data directory. Then, and when `embedded:` says that a directory is such a one, no store
counts as configured: it is as safe as the machine that it is on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from cremant.model.errors import InvalidConfig
from cremant.model.properties import read_properties
from cremant.model.secrets import resolve_all
from cremant.model.settings import Settings
from cremant.store.deepstore import DeepStore, DirectoryStore

EMBEDDED = "embedded"


def store_uri(settings: Settings) -> str:
    """The setting with nothing left open: `embedded:/path`, `file:///path` or `s3://bucket/prefix`. Raises
    InvalidConfig."""
    text = str(settings.store_uri).strip()
    if not text:
        return f"{EMBEDDED}:{Path(settings.data_dir, 'store').absolute()}"
    scheme = urlsplit(text).scheme.lower() if "://" in text or text.startswith(f"{EMBEDDED}:") else ""
    if scheme == EMBEDDED:
        return text
    if scheme in ("", "file"):
        return f"file://{_directory(text)}"
    if scheme == "s3" and urlsplit(text).netloc:
        return text.rstrip("/")
    raise InvalidConfig(
        f"setting store_uri: {text!r} is no deep store", hint="a path, file:///path or s3://bucket/prefix"
    )


def has_store(settings: Settings) -> bool:
    """A store was chosen: tables may then rely on it."""
    return not store_uri(settings).startswith(f"{EMBEDDED}:")


def store_directory(settings: Settings) -> Path | None:
    """Where a store of files is; None of any other."""
    uri = store_uri(settings)
    return None if uri.startswith("s3:") else _directory(uri)


def open_unguarded(settings: Settings) -> DeepStore:
    """Opens it without asking it anything: a store that is down is no reason not to start. Raises InvalidConfig."""
    directory = store_directory(settings)
    properties = store_properties(settings)
    if directory is not None:
        return DirectoryStore(directory, marked=has_store(settings))
    return _s3(store_uri(settings), properties)


def open_former(settings: Settings, url: str) -> DeepStore:
    """The store that a segment's URL is in, when it is not the one in use: one that was configured before. S3 is asked
    with the properties of now. Raises InvalidConfig."""
    uri, scheme = url.rsplit("/", 3)[0], urlsplit(url).scheme  # an object's name is table/incarnation/file
    if scheme == "file" and uri.startswith("file:///"):
        return DirectoryStore(_directory(uri))
    if scheme == "s3" and urlsplit(uri).netloc:
        return _s3(uri, store_properties(settings))
    raise InvalidConfig(f"{url!r} is no object of a deep store")


def _s3(uri: str, properties: Mapping[str, str]) -> DeepStore:
    try:
        from cremant.store.s3 import S3Store
    except ImportError as error:
        raise InvalidConfig(
            f"{uri}: the client for S3 is not installed: {error}", hint="install cremant[s3]"
        ) from error
    return S3Store(uri, properties)


def store_properties(settings: Settings) -> Mapping[str, str]:
    """The file of `store_properties`, secrets in place of references. Raises InvalidConfig, never showing a value."""
    path = str(settings.store_properties)
    if not path:
        return {}
    try:
        given = read_properties(Path(path).read_text(encoding="utf-8"))
        return resolve_all(given, os.environ, lambda name: Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"setting store_properties: {path} cannot be read: {error}") from error
    except InvalidConfig as error:
        raise InvalidConfig(f"setting store_properties: {path}: {error.message}", hint=error.hint) from None


def _directory(text: str) -> Path:
    for prefix in (f"{EMBEDDED}:", "file://"):
        if text.lower().startswith(prefix):
            text = text[len(prefix) :]
    return Path(text).absolute()
