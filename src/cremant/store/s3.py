# SPDX-License-Identifier: Apache-2.0
"""A deep store in S3, or in what speaks its protocol, by object_store's client.

Put-if-absent is S3's conditional put (`If-None-Match: *`); objects too large for one request are sent in parts after a
look whether the name is taken: their names tell their content, so the rare loser of that race wrote the same bytes.
An object carries the checksum of its bytes, so that a name that is taken is compared without a download.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import S3Store as Client

from cremant.model.errors import AlreadyExists, Corrupt, InvalidConfig, NotFound, Unavailable
from cremant.model.limits import STORE_CALL_MS, STORE_PUT_ONCE_BYTES_MAX
from cremant.store.deepstore import (
    MARKER,
    DeepStore,
    StoredObject,
    check_object_name,
    check_readable,
    checksum_of,
)
from cremant.store.files import writing

#: What `store_properties` may have.
PROPERTIES = (
    "endpoint", "region", "access_key_id", "secret_access_key", "session_token", "virtual_hosted_style_request",
    "skip_signature",
)  # fmt: skip
#: The client says it in either way.
_MISSING = (NotFoundError, FileNotFoundError)
_CHECKSUM = "cremant-checksum"
_READ_BYTES = 4 * 1024 * 1024
#: A connection on which nothing comes for so long is given up by the client itself.
_SILENCE_S = 10


class S3Store:
    """See DeepStore. `uri` is s3://bucket/prefix; `properties` have their secrets already. Opening asks nothing."""

    def __init__(self, uri: str, properties: Mapping[str, str]) -> None:
        unknown = sorted(set(properties) - set(PROPERTIES))
        if unknown:
            raise InvalidConfig(
                f"store_properties: unknown {', '.join(unknown)}", hint=f"known: {', '.join(PROPERTIES)}"
            )
        parts = urlsplit(uri)
        self._prefix = parts.path.strip("/")
        self._uri = f"s3://{parts.netloc}" + (f"/{self._prefix}" if self._prefix else "")
        config: Any = {key: value.strip() for key, value in properties.items()}
        try:
            self._client = Client(
                parts.netloc,
                prefix=self._prefix or None,
                config=config,
                client_options={
                    "allow_http": config.get("endpoint", "").startswith("http://"),
                    "connect_timeout": f"{STORE_CALL_MS // 1000}s",
                    "read_timeout": f"{_SILENCE_S}s",
                    "timeout": "1h",  # of a whole transfer; the caller knows the size, and has its own
                },
                retry_config={"max_retries": 2, "retry_timeout": datetime.timedelta(milliseconds=STORE_CALL_MS)},
            )
        except (BaseError, ValueError, TypeError) as error:
            raise InvalidConfig(
                f"deep store {self._uri}: {_first_line(error)}", hint="look at store_properties"
            ) from error

    def put(self, name: str, source: Path) -> str:
        path = check_object_name(name)
        check_readable(source)
        checksum = checksum_of(source)
        with self._errors(name):
            once = source.stat().st_size <= STORE_PUT_ONCE_BYTES_MAX
            try:
                if not once:
                    self._refuse_taken(path)
                obstore.put(
                    self._client, path, source, attributes={_CHECKSUM: checksum},
                    mode="create" if once else "overwrite", use_multipart=not once,
                )  # fmt: skip
            except AlreadyExistsError:
                if self._checksum(path) != checksum:
                    raise AlreadyExists(f"deep store object {name} exists with other bytes") from None
        return f"{self._uri}/{name}"

    def get(self, name: str, target: Path, *, checksum: str | None) -> None:
        temporary = target.with_name(f".tmp-{secrets.token_hex(8)}")
        digest = hashlib.sha256()
        try:
            with self._errors(name):
                chunks = obstore.get(self._client, check_object_name(name)).stream(min_chunk_size=_READ_BYTES)
                with writing(temporary) as write:
                    for chunk in chunks:
                        digest.update(chunk)
                        write(chunk)
            if checksum is not None and (found := f"sha256:{digest.hexdigest()}") != checksum:
                raise Corrupt(f"deep store object {name}: expected {checksum}, found {found}")
            temporary.replace(target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def size(self, name: str) -> int:
        with self._errors(name):
            return int(obstore.head(self._client, check_object_name(name))["size"])

    def delete(self, name: str) -> None:
        with self._errors(name), contextlib.suppress(*_MISSING):
            obstore.delete(self._client, check_object_name(name))

    def list(self, prefix: str) -> list[StoredObject]:
        now = datetime.datetime.now(tz=datetime.UTC)
        found: list[StoredObject] = []
        with self._errors(prefix):
            # The service lists by whole directories; the rest of the prefix is ours to compare.
            for batch in obstore.list(self._client, prefix.rpartition("/")[0] or None):
                for meta in batch:
                    age_ms = max(0, int((now - meta["last_modified"]).total_seconds() * 1000))
                    if meta["path"].startswith(prefix) and meta["path"] != MARKER:
                        found.append(StoredObject(meta["path"], int(meta["size"]), age_ms))
        return sorted(found)

    @property
    def uri(self) -> str:
        return self._uri

    def claim(self, known: str) -> str:
        """The marker is an object. It is asked for by whoever is to believe that objects are gone: another service, or
        a bucket that was made anew, has none of them."""
        found = self._marker() if known else self._mark()
        if known and found != known:
            raise Unavailable(
                f"deep store {self._uri} is not the one that it was: expected id {known} in its object {MARKER}, found "
                f"{found or 'none'}",
                hint=f"look at endpoint in store_properties; if all objects moved there, write {known} into {MARKER}",
            )
        return found

    def _mark(self) -> str:
        with self._errors(MARKER), contextlib.suppress(AlreadyExistsError):
            obstore.put(self._client, MARKER, f"{secrets.token_hex(16)}\n".encode(), mode="create")
        return self._marker()

    def _marker(self) -> str:
        """Its id; "" = there is no marker, or no bucket."""
        with self._errors(MARKER), contextlib.suppress(*_MISSING):
            return bytes(obstore.get(self._client, MARKER).bytes()).decode(errors="replace").strip()
        return ""

    def sweep(self, older_than_ms: int) -> int:
        return 0  # parts of uploads that ended half-way are the service's: it has rules for their age

    def by_url(self, url: str) -> tuple[DeepStore, str]:
        return self, self.name_of(url)

    def name_of(self, url: str) -> str:
        prefix = f"{self._uri}/"
        if not url.startswith(prefix):
            raise InvalidConfig(f"{url!r} is not in the deep store {self._uri}")
        return check_object_name(url.removeprefix(prefix))

    def _refuse_taken(self, path: str) -> None:
        with contextlib.suppress(*_MISSING):
            obstore.head(self._client, path)
            raise AlreadyExistsError(path)

    def _checksum(self, path: str) -> str:
        """Of an object that exists: what it carries, else what its bytes say."""
        found = obstore.get(self._client, path)
        carried = found.attributes.get(_CHECKSUM)
        if carried is not None:
            return str(carried)
        digest = hashlib.sha256()
        for chunk in found.stream(min_chunk_size=_READ_BYTES):
            digest.update(chunk)
        return f"sha256:{digest.hexdigest()}"

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except _MISSING:
            raise NotFound(f"deep store {self._uri} has no object {name}") from None
        except (BaseError, OSError) as error:
            raise Unavailable(f"deep store {self._uri} failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The client's text goes on with its own innards."""
    return str(error).partition("\n")[0][:500]
