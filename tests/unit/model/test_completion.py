# SPDX-License-Identifier: Apache-2.0
"""How a table config says what a commit waits for, and what is refused because it contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from cremant.model.completion import CompletionConfig, CompletionMode, StorePolicy, policy_of
from cremant.model.errors import InvalidConfig
from cremant.model.limits import COMMIT_LEASE_MS, UPLOAD_WAIT_MS
from cremant.model.table import TableConfig
from cremant.model.table_json import parse_table, table_to_json

REQUIRED, BEST_EFFORT, PEERS_ONLY = StorePolicy


def table(replication: int = 1, **segments: Any) -> TableConfig:
    return parse_table(
        {
            "tableName": "gold",
            "tableType": "REALTIME",
            "segmentsConfig": {"timeColumnName": "ts", "replication": str(replication), **segments},
            "tableIndexConfig": {"streamConfigs": {"streamType": "embedded", "stream.embedded.topic.name": "gold"}},
        }
    )


def test_without_a_word_the_store_is_required_and_followers_build() -> None:
    config = table()
    assert config.completion == CompletionConfig()
    assert (config.completion.mode, config.completion.upload_wait_ms) == (CompletionMode.DEFAULT, UPLOAD_WAIT_MS)


@pytest.mark.parametrize(
    ("has_store", "segments", "expected"),
    [
        (True, {"peerSegmentDownloadScheme": "http"}, BEST_EFFORT),
        (True, {}, REQUIRED),
        (False, {"peerSegmentDownloadScheme": "http"}, PEERS_ONLY),
        (False, {}, REQUIRED),
        (True, {"peerSegmentDownloadScheme": "http", "enableSegmentUploadToController": True}, REQUIRED),
        (True, {"peerSegmentDownloadScheme": "http", "enableSegmentUploadToController": "false"}, BEST_EFFORT),
        (True, {"completionConfig": {"storePolicy": "STORE_BEST_EFFORT"}}, BEST_EFFORT),
        (True, {"peerSegmentDownloadScheme": "https", "completionConfig": {"storePolicy": "peers_only"}}, PEERS_ONLY),
    ],
)
def test_the_policy_follows_from_store_and_peers_unless_it_is_written(
    has_store: bool, segments: dict[str, Any], expected: StorePolicy
) -> None:
    assert policy_of(table(replication=2, **segments), has_store=has_store) is expected


def test_pinots_completion_mode_and_our_keys_are_read_and_echoed() -> None:
    written = {"completionMode": "download", "storePolicy": "STORE_BEST_EFFORT", "uploadWaitMs": "2500"}
    config = table(replication=2, peerSegmentDownloadScheme="HTTP", completionConfig=written)
    assert config.completion == CompletionConfig(
        mode=CompletionMode.DOWNLOAD, store_policy=BEST_EFFORT, upload_wait_ms=2500, peer_scheme="http"
    )
    assert config.unrecognized == {}
    assert table_to_json(config)["segmentsConfig"]["completionConfig"] == written


def test_a_misspelt_key_is_listed() -> None:
    config = table(completionConfig={"storePolcy": "PEERS_ONLY"})
    assert config.unrecognized == {"/segmentsConfig/completionConfig/storePolcy": "PEERS_ONLY"}


@pytest.mark.parametrize(
    ("replication", "segments", "message"),
    [
        (1, {"peerSegmentDownloadScheme": "http"}, "replication is < 2.*set segmentsConfig.replication to 2"),
        (2, {"peerSegmentDownloadScheme": "ftp"}, "Invalid value 'ftp'.*Must be one of http or https"),
        (2, {"completionConfig": {"storePolicy": "PEERS_ONLY"}}, "PEERS_ONLY needs servers.*peerSegmentDownloadScheme"),
        (2, {"completionConfig": {"storePolicy": "NEVER"}}, "storePolicy: expected one of STORE_REQUIRED.*'NEVER'"),
        (2, {"completionConfig": {"completionMode": "UPLOAD"}}, "completionMode: expected one of DEFAULT, DOWNLOAD"),
        (2, {"completionConfig": {"uploadWaitMs": COMMIT_LEASE_MS // 2}}, "uploadWaitMs: expected.*0 to 14999"),
        (2, {"completionConfig": {"uploadWaitMs": -1}}, "uploadWaitMs: expected"),
        (2, {"completionConfig": {"uploadWaitMs": True}}, "uploadWaitMs: expected"),
        (2, {"completionConfig": {"uploadWaitMs": "soon"}}, "uploadWaitMs: expected.*found 'soon'"),
        (2, {"completionConfig": "DOWNLOAD"}, "completionConfig: expected an object"),
        (2, {"enableSegmentUploadToController": "perhaps"}, "expected true or false, found 'perhaps'"),
        (
            2,
            {"enableSegmentUploadToController": True, "completionConfig": {"storePolicy": "STORE_BEST_EFFORT"}},
            "true means STORE_REQUIRED and contradicts completionConfig.storePolicy STORE_BEST_EFFORT",
        ),
        (
            2,
            {"enableSegmentUploadToController": "false", "completionConfig": {"storePolicy": "STORE_REQUIRED"}},
            "false means.*contradicts completionConfig.storePolicy STORE_REQUIRED",
        ),
        (
            1,
            {"peerSegmentDownloadScheme": "http", "completionConfig": {"storePolicy": "PEERS_ONLY"}},
            "replication is < 2: no peer would have a copy",
        ),
    ],
)
def test_what_is_unknown_or_contradicts_itself_is_refused_with_the_reason_and_the_fix(
    replication: int, segments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        table(replication=replication, **segments)
