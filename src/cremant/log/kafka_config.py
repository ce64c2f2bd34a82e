# SPDX-License-Identifier: Apache-2.0
"""What the clients of a Kafka cluster are told: brokers, the user's properties, and what we decide ourselves.

Properties come in the spelling of Java's client (table configs written for Pinot, files of operators) or of librdkafka.
Those about the connection are taken over: security, SASL, TLS, sockets, names. JKS stores and callback classes of Java
have no counterpart and are refused with what to use instead. How we read and write (offsets, groups, acknowledgements,
buffers) is ours: such properties are ignored, once per log, by name in our own log. Secrets are resolved here, and
nowhere else.
"""

from __future__ import annotations

import logging
import math
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cremant.model.errors import InvalidConfig
from cremant.model.limits import (
    KAFKA_FETCH_WAIT_MS,
    KAFKA_QUEUE_BYTES,
    KAFKA_SOCKET_TIMEOUT_MS,
    MIB,
    RECORD_BYTES_MAX,
)
from cremant.model.secrets import JAAS_OPTION, is_reference, resolve_all

logger = logging.getLogger(__name__)
#: What librdkafka has to say, and where to find it.
client_logger = logging.getLogger("cremant.log.kafka.client")


class _Repeats(logging.Filter):
    """Of what the client says again and again while brokers are away, one of a kind per half a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.args[:2] if isinstance(record.args, tuple) else record.msg
        if self._said_s.get(kind, -math.inf) > record.created - _REPEAT_S:
            return False
        if len(self._said_s) >= _KINDS_MAX:
            self._said_s.clear()
        self._said_s[kind] = record.created
        return True


_REPEAT_S, _KINDS_MAX = 30.0, 1_000
client_logger.addFilter(_Repeats())
# Never to stderr, where the process has not said where its log goes.
client_logger.addHandler(logging.NullHandler())

#: A record of ours with its key, headers and frame.
KAFKA_RECORD_BYTES_MAX = RECORD_BYTES_MAX + MIB

_CONNECTION = re.compile(
    r"(sasl\.|ssl\.|enable\.s[as]sl\.|https\.ca|socket\.|broker\.address\.|reconnect\.backoff\.|retry\.backoff\.)"
    r"|(security\.protocol|client\.(id|rack|dns\.lookup)|metadata\.max\.age\.ms|connections\.max\.idle\.ms"
    r"|api\.version\.request|check\.crcs|compression\.(type|codec|level)|debug|isolation\.level)$"
)
_ISOLATION = ("read_committed", "read_uncommitted")
#: Keys of Java's client that ask for nothing here: TLS and SASL work without.
_JAVA_ONLY = re.compile(
    r"ssl\.(protocol|enabled\.protocols|provider|keymanager\.algorithm|trustmanager\.algorithm|engine\.factory\.class"
    r"|secure\.random\.implementation|truststore\.password|truststore\.type|keystore\.type|server\.\w+|client\.\w+)"
    r"|sasl\.(login\.(?!callback)[\w.]+|kerberos\.(ticket|min)[\w.]+)"
)
_CALLBACK = re.compile(r"sasl\..*callback\.handler\.class$")
_JAAS_KEY = "sasl.jaas.config"
_JAAS = re.compile(r"\s*([\w.$]+)\s+(?:required|requisite|sufficient|optional)\b(.*?);?\s*$", re.DOTALL | re.IGNORECASE)


def resolved(properties: Mapping[str, str]) -> dict[str, str]:
    """With secrets in place of references. Raises InvalidConfig naming the key."""
    return resolve_all(properties, os.environ, lambda path: Path(path).read_text(encoding="utf-8"))


def connection(brokers: str, properties: Mapping[str, str]) -> dict[str, Any]:
    """What all clients of the cluster share, secrets resolved. Raises InvalidConfig, never showing a value."""
    given = {key: value.strip() for key, value in resolved(properties).items() if key != _JAAS_KEY}
    given |= _login(properties.get(_JAAS_KEY, "").strip())
    told = _from_java(given)
    ignored = []
    for key, value in given.items():
        if _JAVA_ONLY.fullmatch(key) or not _CONNECTION.match(key):
            ignored.append(key)
        elif key not in told and key not in _TRANSLATED:
            told[key] = value
    if ignored:
        logger.info("brokers %s: these properties mean nothing here: %s", brokers, ", ".join(sorted(ignored)))
    isolation = told.pop("isolation.level", "read_committed").lower()
    if isolation not in _ISOLATION:
        raise InvalidConfig(f"isolation.level: expected one of {', '.join(_ISOLATION)}, found {isolation!r}")
    return {
        "socket.timeout.ms": KAFKA_SOCKET_TIMEOUT_MS,
        "socket.nagle.disable": True,
        "socket.keepalive.enable": True,
        "socket.connection.setup.timeout.ms": KAFKA_SOCKET_TIMEOUT_MS,
        # A broker that is back is found within a second.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "client.id": "cremant",
        **told,
        "bootstrap.servers": brokers,
        "isolation.level": isolation,
    }


def login(properties: Mapping[str, str]) -> tuple[str, str] | None:
    """User name and password as references give them now. Raises InvalidConfig."""
    keys = ("sasl.username", "sasl.password")
    given = {key: value.strip() for key, value in resolved(properties).items() if key in keys}
    given |= _login(properties.get(_JAAS_KEY, "").strip())
    return (given[keys[0]], given[keys[1]]) if given.keys() >= set(keys) else None


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def admin_config(shared: Mapping[str, Any]) -> dict[str, Any]:
    # It has no logger, and what it says at a level for debugging goes to stderr.
    return {**_without(shared, "isolation.level", "check.crcs", "debug"), "log_level": 0}


def producer_config(shared: Mapping[str, Any], deadline_ms: int) -> dict[str, Any]:
    return {
        **_without(shared, "isolation.level", "check.crcs"),
        "enable.idempotence": True,
        "acks": "all",
        # An append waits for its acknowledgement: whatever is there goes at once, and what comes meanwhile goes next.
        "linger.ms": 0,
        "message.max.bytes": KAFKA_RECORD_BYTES_MAX,
        "message.timeout.ms": deadline_ms,
        "batch.size": MIB,
        "queue.buffering.max.messages": 0,
        "queue.buffering.max.kbytes": 1024 * 1024,
        "logger": client_logger,
    }


def consumer_config(shared: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_without(shared, "compression.type", "compression.codec", "compression.level"),
        # Required, though no group is ever joined and nothing is committed.
        "group.id": f"cremant-{uuid.uuid4().hex}",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "allow.auto.create.topics": False,
        "fetch.wait.max.ms": KAFKA_FETCH_WAIT_MS,
        "fetch.message.max.bytes": MIB,
        "fetch.max.bytes": 16 * MIB,
        "receive.message.max.bytes": 2 * KAFKA_RECORD_BYTES_MAX,
        "queued.max.messages.kbytes": KAFKA_QUEUE_BYTES // 1024,
        "queued.min.messages": 1_000_000,
        # The default, a second, makes a consumer that catches up six times slower.
        "fetch.queue.backoff.ms": 5,
        # Also how long a partition rests that was moved while an answer for it was under way.
        "fetch.error.backoff.ms": 20,
        "logger": client_logger,
    }


# --- Java's spelling ---

_TRANSLATED = {
    "ssl.truststore.location", "ssl.truststore.certificates", "ssl.keystore.location",
    "ssl.keystore.certificate.chain", "ssl.keystore.key",
}  # fmt: skip


def _from_java(given: Mapping[str, str]) -> dict[str, str]:
    told: dict[str, str] = {}
    for key in given:
        if _CALLBACK.match(key):
            raise InvalidConfig(
                f"{key}: a class of Java cannot be called here", hint="use PLAIN, SCRAM, GSSAPI or OIDC"
            )
    told |= _truststore(given) | _keystore(given)
    if given.get("ssl.endpoint.identification.algorithm") == "":
        told["ssl.endpoint.identification.algorithm"] = "none"
    if "security.protocol" in given:
        told["security.protocol"] = given["security.protocol"].lower()
    return told


def _login(jaas: str) -> dict[str, str]:
    """What a `sasl.jaas.config` says, in librdkafka's words. References in it are resolved last: what they stand for
    may hold quotes and backslashes."""
    if is_reference(jaas):
        jaas = resolved({_JAAS_KEY: jaas})[_JAAS_KEY]
    return resolved(_from_jaas(jaas)) if jaas else {}


def _from_jaas(text: str) -> dict[str, str]:
    parsed = _JAAS.match(text)
    if parsed is None:
        raise InvalidConfig('sasl.jaas.config: expected `<login module> required key="value" …;`')
    module = parsed.group(1).rsplit(".", 1)[-1]
    options = {
        key: re.sub(r"\\(.)", r"\1", value[1:-1]) if value[0] in "\"'" else value
        for key, value in JAAS_OPTION.findall(parsed.group(2))
    }
    names = {
        "PlainLoginModule": {"username": "sasl.username", "password": "sasl.password"},
        "ScramLoginModule": {"username": "sasl.username", "password": "sasl.password"},
        "Krb5LoginModule": {
            "keyTab": "sasl.kerberos.keytab", "principal": "sasl.kerberos.principal",
            "serviceName": "sasl.kerberos.service.name",
        },
        "OAuthBearerLoginModule": {
            "clientId": "sasl.oauthbearer.client.id", "clientSecret": "sasl.oauthbearer.client.secret",
            "scope": "sasl.oauthbearer.scope",
        },
    }.get(module)  # fmt: skip
    if names is None:
        raise InvalidConfig(
            f"sasl.jaas.config: login module {module} is not supported",
            hint="PlainLoginModule, ScramLoginModule, Krb5LoginModule or OAuthBearerLoginModule",
        )
    told = {names[key]: value for key, value in options.items() if key in names}
    return {**told, "sasl.oauthbearer.method": "oidc"} if module == "OAuthBearerLoginModule" else told


def _truststore(given: Mapping[str, str]) -> dict[str, str]:
    if given.get("ssl.truststore.certificates"):
        return {"ssl.ca.pem": given["ssl.truststore.certificates"]}
    path = given.get("ssl.truststore.location")
    if not path:
        return {}
    if given.get("ssl.truststore.type", "JKS").upper() != "PEM" and not path.endswith((".pem", ".crt")):
        raise InvalidConfig(
            "ssl.truststore.location: a store of Java cannot be read here",
            hint="export its certificates as PEM (keytool -exportcert -rfc) and name that file in ssl.ca.location",
        )
    return {"ssl.ca.location": path}


def _keystore(given: Mapping[str, str]) -> dict[str, str]:
    told: dict[str, str] = {}
    if given.get("ssl.keystore.certificate.chain"):
        told["ssl.certificate.pem"] = given["ssl.keystore.certificate.chain"]
    if given.get("ssl.keystore.key"):
        told["ssl.key.pem"] = given["ssl.keystore.key"]
    path = given.get("ssl.keystore.location")
    if not path:
        return told
    kind = given.get("ssl.keystore.type", "").upper()
    if kind == "PEM" or path.endswith(".pem"):
        return {**told, "ssl.certificate.location": path, "ssl.key.location": path}
    if kind == "PKCS12" or path.endswith((".p12", ".pfx")):
        return {**told, "ssl.keystore.location": path}
    raise InvalidConfig(
        "ssl.keystore.location: a JKS store cannot be read here",
        hint="convert it to PKCS12 (keytool -importkeystore -deststoretype PKCS12) and set ssl.keystore.type=PKCS12",
    )
