# SPDX-License-Identifier: Apache-2.0
"""How a table's segments are completed: where sealed bytes must be before a commit, and who builds them.

Read out of `segmentsConfig`: Pinot's `peerSegmentDownloadScheme` and `completionConfig.completionMode`, our own
`completionConfig.storePolicy` and `completionConfig.uploadWaitMs`, and the switch `enableSegmentUploadToController`,
which means STORE_REQUIRED.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cremant.model.errors import InvalidConfig
from cremant.model.limits import COMMIT_LEASE_MS, UPLOAD_WAIT_MS

if TYPE_CHECKING:
    from cremant.model.table import TableConfig

PEER_SCHEMES = ("http", "https")
_TRUE, _FALSE = (True, "true", "TRUE", "True"), (None, False, "false", "FALSE", "False", "")


class StorePolicy(StrEnum):
    """What a commit waits for: the upload; the upload, but not for long; nothing, peers have the copies."""

    STORE_REQUIRED = "STORE_REQUIRED"
    STORE_BEST_EFFORT = "STORE_BEST_EFFORT"
    PEERS_ONLY = "PEERS_ONLY"


class CompletionMode(StrEnum):
    """Pinot's words. DEFAULT: followers build the segment themselves if they can; DOWNLOAD: they fetch it."""

    DEFAULT = "DEFAULT"
    DOWNLOAD = "DOWNLOAD"


class CompletionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`store_policy` as written, None = derived (`policy_of`). `upload_wait_ms`: how long a commit under
    STORE_BEST_EFFORT waits for its upload; below half of the committer's lease. `peer_scheme`: http or https lets
    servers fetch segments from each other, None does not."""

    mode: CompletionMode = CompletionMode.DEFAULT
    store_policy: StorePolicy | None = None
    upload_wait_ms: int = UPLOAD_WAIT_MS
    peer_scheme: str | None = None


def policy_of(config: TableConfig, *, has_store: bool) -> StorePolicy:
    """The policy in force. `has_store`: a store is configured (setting `store_uri`); without one, sealed segments go
    into the embedded directory, unless peers keep them."""
    written, peers = config.completion.store_policy, config.completion.peer_scheme is not None
    if written is not None:
        return written
    if peers and has_store:
        return StorePolicy.STORE_BEST_EFFORT
    return StorePolicy.PEERS_ONLY if peers and config.replication >= 2 else StorePolicy.STORE_REQUIRED


def parse_completion(segments: dict[str, Any], replication: int) -> CompletionConfig:
    """Of a `segmentsConfig`. Raises InvalidConfig for unknown words and for what contradicts itself."""
    section = segments.get("completionConfig") or {}
    if not isinstance(section, dict):
        raise InvalidConfig(f"/segmentsConfig/completionConfig: expected an object, found {type(section).__name__}")
    config = CompletionConfig(
        mode=_word(section, "completionMode", CompletionMode) or CompletionMode.DEFAULT,
        store_policy=_policy(segments, section),
        upload_wait_ms=_upload_wait_ms(section),
        peer_scheme=_peer_scheme(segments),
    )
    _refuse_contradictions(config, replication)
    return config


_Words = TypeVar("_Words", bound=StrEnum)


def _word(section: dict[str, Any], key: str, kind: type[_Words]) -> _Words | None:
    written = section.get(key)
    if written is None or written == "":
        return None
    try:
        return kind(str(written).upper())
    except ValueError:
        raise InvalidConfig(
            f"/segmentsConfig/completionConfig/{key}: expected one of {', '.join(kind)}, found {written!r}"
        ) from None


def _policy(segments: dict[str, Any], section: dict[str, Any]) -> StorePolicy | None:
    policy = _word(section, "storePolicy", StorePolicy)
    switch = segments.get("enableSegmentUploadToController")
    if switch not in (*_TRUE, *_FALSE):
        raise InvalidConfig(
            f"/segmentsConfig/enableSegmentUploadToController: expected true or false, found {switch!r}"
        )
    if switch not in _TRUE:
        if switch not in (None, "") and policy is StorePolicy.STORE_REQUIRED:
            raise InvalidConfig(
                "/segmentsConfig/enableSegmentUploadToController: false means that commits do not wait for the store "
                "and contradicts completionConfig.storePolicy STORE_REQUIRED",
                hint="remove one of the two",
            )
        return policy
    if policy not in (None, StorePolicy.STORE_REQUIRED):
        raise InvalidConfig(
            "/segmentsConfig/enableSegmentUploadToController: true means STORE_REQUIRED and contradicts "
            f"completionConfig.storePolicy {policy}",
            hint="remove one of the two",
        )
    return StorePolicy.STORE_REQUIRED


def _upload_wait_ms(section: dict[str, Any]) -> int:
    written = section.get("uploadWaitMs")
    if written is None:
        return UPLOAD_WAIT_MS
    text = "" if isinstance(written, bool) else str(written).strip()
    if not text.isascii() or not text.isdigit() or int(text) >= COMMIT_LEASE_MS // 2:
        raise InvalidConfig(
            "/segmentsConfig/completionConfig/uploadWaitMs: expected a number of ms from 0 to "
            f"{COMMIT_LEASE_MS // 2 - 1} (below half of the committer's lease), found {written!r}",
            hint="a commit that may wait longer for the store is storePolicy STORE_REQUIRED",
        )
    return int(text)


def _peer_scheme(segments: dict[str, Any]) -> str | None:
    written = segments.get("peerSegmentDownloadScheme")
    if written is None or written == "":
        return None
    scheme = str(written).lower()
    if scheme not in PEER_SCHEMES:
        raise InvalidConfig(
            f"/segmentsConfig/peerSegmentDownloadScheme: Invalid value '{written}' for peerSegmentDownloadScheme. "
            "Must be one of http or https"
        )
    return scheme


def _refuse_contradictions(config: CompletionConfig, replication: int) -> None:
    if config.peer_scheme is not None and replication < 2:
        raise InvalidConfig(
            "/segmentsConfig/peerSegmentDownloadScheme: peerSegmentDownloadScheme can't be used when replication is "
            "< 2: no peer would have a copy",
            hint="set segmentsConfig.replication to 2 or more, or remove peerSegmentDownloadScheme",
        )
    if config.store_policy is StorePolicy.PEERS_ONLY and config.peer_scheme is None:
        raise InvalidConfig(
            "/segmentsConfig/completionConfig/storePolicy: PEERS_ONLY needs servers that fetch from each other",
            hint="set segmentsConfig.peerSegmentDownloadScheme to http, and segmentsConfig.replication to 2 or more",
        )
