# SPDX-License-Identifier: Apache-2.0
"""Segments from server to server by HTTPS: a real authority, real certificates, and what is wrong with some of them."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from authority import Authority
from peer_kit import Follower, PeerServer

from cremant.cli.preflight import check_tls
from cremant.completion.fetch import Cause, Source
from cremant.model.errors import InvalidConfig, Unavailable
from cremant.model.settings import Settings
from cremant.shell.tls import client_context, listener_context


def settings(**values: object) -> Settings:
    return Settings(("test", {name: str(value) for name, value in values.items()}))


def shown(certificate: Path, key: Path, **more: object) -> ssl.SSLContext:
    context = listener_context(settings(tls_cert=certificate, tls_key=key, **more))
    assert context is not None
    return context


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def trusting(authority: Authority) -> ssl.SSLContext:
    return client_context(settings(tls_ca=authority.certificate))


def test_a_segment_comes_by_https_from_a_holder_that_the_authority_vouches_for(
    ours: Authority, peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer(tls=shown(*ours.sign("server")))
    follower = follow(server, by_tls=trusting(ours), Server_a=server.tls_url)
    assert follower.fetched_right()
    assert follower.fetcher.totals.segments == {Source.PEER: 1}
    assert httpx.get(server.path).status_code == 200  # tools, and tables with http, go on
    named = f"{server.tls_url}/segments/trips/{server.sealed.name}"
    assert httpx.get(named, verify=trusting(ours), headers={"Range": "bytes=0-9"}).content == server.archive[:10]


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ({"ends_in_days": -1}, "certificate has expired"),
        ({"host": "127.0.0.9"}, "IP address mismatch"),
        ({"authority": "theirs"}, "unable to get local issuer certificate"),
        ({"plain": True}, "TLS failed"),
    ],
    ids=["expired", "another host's", "another authority's", "no TLS at all"],
)
def test_a_peer_with_a_wrong_certificate_is_named_and_asked_again_and_another_one_gives_the_segment(
    flaw: dict[str, object], said: str, ours: Authority, tmp_path: Path, peer: Callable[..., PeerServer],
    follow: Callable[..., Follower],
) -> None:  # fmt: skip
    signer = Authority(tmp_path, "theirs") if flaw.pop("authority", None) else ours
    plain = flaw.pop("plain", False)
    wrong = peer(tls=shown(*signer.sign("wrong", **flaw)))  # type: ignore[arg-type]
    url = wrong.url.replace("http:", "https:") if plain else wrong.tls_url
    follower = follow(wrong, by_tls=trusting(ours), Server_a=url)
    with pytest.raises(Unavailable, match=r"Server_a: TLS failed: .*\(tls\)") as raised:
        follower.fetch()
    assert said in str(raised.value)
    assert follower.fetcher.totals.failures[Source.PEER, Cause.TLS] >= 3  # in every round
    assert follower.fetcher.totals.bytes[Source.PEER] == 0
    right = peer(tls=shown(*ours.sign("right")))
    follower.urls["Server_b"] = right.tls_url
    copies = dict.fromkeys(follower.urls, right.metadata.copies["Server_a"])
    follower.metadata = msgspec.structs.replace(follower.metadata, copies=copies)
    assert follower.fetched_right()


def test_a_holder_without_https_is_no_source_for_a_table_that_asks_for_it(
    ours: Authority, peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer()
    follower = follow(server, by_tls=trusting(ours), Server_a=server.tls_url)
    with pytest.raises(Unavailable, match=r"Server_a: offers no HTTPS.*tls_cert.*\(refused\)"):
        follower.fetch()
    assert server.service.sent.transfers == 0


def test_a_connection_that_says_nothing_keeps_nobody_from_the_listener_nor_from_a_stop(
    ours: Authority, peer: Callable[..., PeerServer], follow: Callable[..., Follower]
) -> None:
    server = peer(tls=shown(*ours.sign("server")))
    host, port = server.tls_url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port))):
        follower = follow(server, by_tls=trusting(ours), Server_a=server.tls_url)
        assert follower.fetched_right()
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < 5


def test_a_key_may_have_a_password_that_is_referred_to(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = ours.sign("server", password="of-the-key")
    (tmp_path / "password").write_text("of-the-key\n")
    monkeypatch.setenv("KEY_PASSWORD", "of-the-key")
    shown(certificate, key, tls_key_password="${env:KEY_PASSWORD}")
    shown(certificate, key, tls_key_password=f"${{file:{tmp_path / 'password'}}}")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    assert listener_context(settings(tls_cert=both, tls_key_password="${env:KEY_PASSWORD}")) is not None
    assert listener_context(settings()) is None
    for wrong, said in (
        ({"tls_key_password": "of-the-key"}, "tls_key_password: expected a reference"),
        ({"tls_key_password": "${env:NOT_THERE}"}, "tls_key_password: .*NOT_THERE"),
        ({}, f"tls_key {key}: they cannot be used"),
        ({"tls_key": ours.certificate}, "they cannot be used"),
        ({"tls_cert": tmp_path / "nowhere"}, "nowhere.*No such file"),
        ({"tls_cert": ""}, "mean nothing without tls_cert"),
    ):
        with pytest.raises(InvalidConfig, match=said) as raised:
            listener_context(settings(**{"tls_cert": certificate, "tls_key": key, **wrong}))
        assert "of-the-key" not in str(raised.value)
        assert raised.value.hint
    for authority in (tmp_path / "nowhere", tmp_path / "password"):
        with pytest.raises(InvalidConfig, match=r"setting tls_ca: .* cannot be used"):
            client_context(settings(tls_ca=authority))


def test_what_servers_could_not_start_with_is_told_before_anything_starts(ours: Authority, tmp_path: Path) -> None:
    certificate, key = ours.sign("server")
    whole = {"tls_cert": certificate, "tls_key": key, "tls_ca": ours.certificate}
    check_tls(settings(**whole), 3)
    check_tls(settings(**whole, tls_port=9443), 1)
    with pytest.raises(InvalidConfig, match="3 servers of one machine cannot share port 9443"):
        check_tls(settings(**whole, tls_port=9443), 3)
    for missing in whole:
        with pytest.raises(InvalidConfig, match="nowhere"):
            check_tls(settings(**{**whole, missing: tmp_path / "nowhere"}), 1)
