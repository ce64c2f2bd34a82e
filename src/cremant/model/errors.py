# SPDX-License-Identifier: Apache-2.0
"""The error tree. A parent says who has to act, a leaf says why.

    CremantError
    ├── UserError              the request is wrong; the user changes it
    │   ├── InvalidConfig      schema, table config or setting that cannot be
    │   ├── NotFound           names something that does not exist
    │   ├── AlreadyExists      would overwrite something
    │   ├── Conflict           legal by itself, but contradicts the present state
    │   └── QueryError         SQL that cannot be answered; carries Pinot's code
    ├── PeerError              another process did not do its part; retry elsewhere or later
    │   ├── Unavailable        not reachable, not started, shutting down
    │   │   └── StoreFailed    it is there, the deep store behind it is not
    │   ├── DeadlineExceeded   did not answer in time
    │   ├── Behind             alive, but cannot serve exactly this yet
    │   └── Fenced             we are the stale one: stop, do not retry
    ├── WorldError             machine or environment: disk, ports, Java
    │   ├── Corrupt            bytes do not match their checksum
    │   └── NoResource         disk full, port in use, no Java
    └── InvariantViolation     we are wrong: a named rule does not hold

A message says what, where, found, expected; `hint` says how to fix it. Users see both, never a stack trace.
"""

from __future__ import annotations


class CremantError(Exception):
    """Base of all errors raised on purpose. `http_status` is what a REST caller gets."""

    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UserError(CremantError):
    http_status = 400


class InvalidConfig(UserError):
    pass


class NotFound(UserError):
    http_status = 404


class AlreadyExists(UserError):
    http_status = 409


class Conflict(UserError):
    http_status = 409


class QueryError(UserError):
    """SQL that cannot be answered. `code` is one of Pinot's error codes (`cremant.model.query_codes`)."""

    def __init__(self, code: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class PeerError(CremantError):
    http_status = 503


class Unavailable(PeerError):
    pass


class StoreFailed(Unavailable):
    pass


class DeadlineExceeded(PeerError):
    http_status = 504


class Behind(PeerError):
    pass


class Fenced(PeerError):
    http_status = 409


class WorldError(CremantError):
    pass


class Corrupt(WorldError):
    pass


class NoResource(WorldError):
    pass


class InvariantViolation(CremantError):
    """A named rule (E-n, I-n, U-n) does not hold. What it guards stops instead of showing wrong data."""

    def __init__(self, rule: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{rule}: {message}", hint=hint)
        self.rule = rule
