# SPDX-License-Identifier: Apache-2.0
"""Errors of Kafka's client in our words: who has to act, which brokers, what was tried, what to do.

The client reports troubles of connections (refused, wrong password, no TLS) by callback and lets calls time out.
`Faults` keeps the newest of them, so that a call that failed can say why. A login that was refused is looked up again:
its secret may have been changed.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from cremant.model.errors import (
    AlreadyExists,
    Corrupt,
    CremantError,
    DeadlineExceeded,
    InvalidConfig,
    NotFound,
    Unavailable,
    UserError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: User name and password.
Login = tuple[str, str]
OnError = Callable[[KafkaError], None]

UNKNOWN_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
_ACCESS = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)
_LOGIN = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
_DENIED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_INVALID = frozenset(
    {
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_REPLICA_ASSIGNMENT,
        KafkaError.INVALID_CONFIG,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.POLICY_VIOLATION,
        KafkaError._INVALID_ARG,
    }
)
_TIMEOUTS = frozenset({KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})
CORRUPT = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError.INVALID_MSG})
#: After an append that failed with one of these, nothing was written.
NOT_WRITTEN = frozenset({*UNKNOWN_TOPIC, *_DENIED, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD})
#: How long the newest fault explains failures.
_FRESH_S = 30.0


class Faults:
    """What clients of one cluster complained about last. Given to them as `error_cb`. `login`: as it is now; it may
    raise InvalidConfig."""

    def __init__(self, login: Callable[[], Login | None] = lambda: None) -> None:
        self._login = login
        self._guard = threading.Lock()
        self._last: tuple[float, KafkaError] | None = None
        self._access: tuple[float, KafkaError] | None = None

    def __call__(self, error: KafkaError) -> None:
        with self._guard:
            at = time.monotonic(), error
            if _is_access(error):
                self._access = at
            elif error.code() != KafkaError._ALL_BROKERS_DOWN or self._last is None:
                self._last = at

    def denied_since(self, since_s: float) -> KafkaError | None:
        """Login or TLS failed since then: waiting does not help."""
        with self._guard:
            return self._access[1] if self._access is not None and self._access[0] >= since_s else None

    def newest(self) -> KafkaError | None:
        """A failed login is newer than the lost connections it leads to."""
        with self._guard:
            known = [at for at in (self._access, self._last) if at is not None and at[0] > time.monotonic() - _FRESH_S]
        return known[0][1] if known else None

    def login(self) -> Login | None:
        try:
            return self._login()
        except InvalidConfig as error:
            logger.warning("the login cannot be renewed: %s", error.message)
            return None

    def settle(self) -> None:
        """Brokers answered."""
        with self._guard:
            self._last = self._access = None


def make_client(
    kind: Callable[[dict[str, Any]], T],
    config: Mapping[str, Any],
    brokers: str,
    faults: Faults,
    on_error: OnError | None = None,
) -> T:
    """A client of the library, which complains to `on_error`, or else to `faults`. Weak references to a `kind` must be
    possible. Raises InvalidConfig."""
    #: A callback that owned its client would keep it, and its threads, until the next collection of garbage.
    made: weakref.ref[Any] | None = None
    known: Login = (config.get("sasl.username", ""), config.get("sasl.password", ""))

    def complain(error: KafkaError) -> None:
        nonlocal known
        client = made() if made is not None and error.code() in _LOGIN else None
        if client is not None and (login := faults.login()) is not None and login != known:
            logger.info("Kafka at %s: the login was refused and is another one now, which is tried", brokers)
            known = login
            # Within its own callback a client takes no calls.
            threading.Thread(target=_log_in_by, args=(client, login), name="kafka-login", daemon=True).start()
        (on_error or faults)(error)

    try:
        client = kind({**config, "error_cb": complain})
    except KafkaException as error:
        raise InvalidConfig(f"Kafka at {brokers}: {error.args[0].str()}", hint="one of its properties") from None
    made = weakref.ref(client)
    return client


def _log_in_by(client: Any, login: Login) -> None:
    """From the next connection on."""
    try:
        client.set_sasl_credentials(*login)
    except (KafkaException, RuntimeError) as error:
        logger.info("a client of Kafka was closed before its new login: %s", error)


def closed(brokers: str) -> Unavailable:
    return Unavailable(f"the log at {brokers} is closed")


def _is_access(error: KafkaError) -> bool:
    """A TLS handshake that the other side ends looks like any lost connection but for the text."""
    return error.code() in _ACCESS or (error.code() == KafkaError._TRANSPORT and "SSL handshake" in error.str())


def translate(error: KafkaError, what: str, brokers: str, faults: Faults) -> CremantError:
    """`what` was tried, as in "list offsets of topic t"."""
    code = error.code()
    where = f"Kafka at {brokers}: {what}"
    text = f"{where}: {error.str()}"
    if code in UNKNOWN_TOPIC:
        return NotFound(text)
    if code == KafkaError.TOPIC_ALREADY_EXISTS:
        return AlreadyExists(text)
    if code in _INVALID:
        return InvalidConfig(text)
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return UserError(text, hint="the topic's max.message.bytes decides")
    if code in _DENIED:
        return Unavailable(
            f"{where}: not allowed: {error.str()}", hint="these credentials lack the right on the brokers"
        )
    if code in CORRUPT:
        return Corrupt(text)
    if _is_access(error):
        return _no_access(where, error)
    return _away(where, error, faults)


def _no_access(where: str, error: Any) -> CremantError:
    if error.code() in (KafkaError._SSL, KafkaError._TRANSPORT):
        return Unavailable(
            f"{where}: TLS failed: {error.str()}",
            hint="check security.protocol, and ssl.ca.location: it names the authority that signed for the brokers",
        )
    return Unavailable(
        f"{where}: login failed: {error.str()}", hint="check security.protocol, sasl.mechanism, user name and password"
    )


def _away(where: str, error: Any, faults: Faults) -> CremantError:
    fault = faults.newest()
    if fault is not None and _is_access(fault):
        return _no_access(where, fault)
    reason = error.str() if fault is None or fault.code() == error.code() else f"{error.str()}; {fault.str()}"
    if error.code() in _TIMEOUTS and fault is None:
        return DeadlineExceeded(f"{where}: {reason}", hint="the brokers accept connections but do not answer in time")
    return Unavailable(
        f"{where}: {reason}",
        hint="are the brokers up, reachable from here at the names they advertise, and is security.protocol theirs?",
    )
