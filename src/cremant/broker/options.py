# SPDX-License-Identifier: Apache-2.0
"""Options of a query that the broker acts on (`SET key = value`, `OPTION(...)`, `queryOptions`). Pure.

timeoutMs                                     how long it may take (default: the table's, then 10 s)
notBefore                                     a readToken: no older rows than that answer had
asOfEpoch                                     upsert tables: what was visible when this epoch was closed
skipUpsert, skipUpsertDelete                  upsert tables: superseded rows, too; deleted keys, too
useFixedReplica                               always the same replicas, whatever their load
numReplicaGroupsToQuery                       1: as few servers as possible; more: spread over all replicas
maxQueryResponseSizeBytes,
maxServerResponseSizeBytes                    the query fails rather than receive more from servers (all, one)
trace, clientQueryId, dropResults             as in Pinot
"""

from __future__ import annotations

from collections.abc import Mapping

from cremant.broker.tokens import floors_of
from cremant.cluster.routing import Wishes
from cremant.model.cluster import TableView
from cremant.model.errors import QueryError, UserError
from cremant.model.limits import QUERY_ANSWER_BYTES_MAX, QUERY_TIMEOUT_MS
from cremant.model.query_codes import QueryCode
from cremant.model.upsert import Visibility
from cremant.sql.planner import flag

#: Longer waits are cut to an hour: nothing a broker does takes longer, and deadlines stay finite.
_TIMEOUT_MS_MAX = 3_600_000
_LONG_END = 2**63
_LONG_DIGITS = 19


def timeout_ms(options: Mapping[str, str], of_table: int | None) -> int:
    """Milliseconds that a query may take. Raises UserError for an option that is no such number."""
    given = _number(options, "timeoutms", "timeoutMs")
    return (of_table or QUERY_TIMEOUT_MS) if given is None else min(given, _TIMEOUT_MS_MAX)


def answer_bytes_max(options: Mapping[str, str]) -> int:
    """Of all servers together."""
    given = _number(options, "maxqueryresponsesizebytes", "maxQueryResponseSizeBytes")
    return QUERY_ANSWER_BYTES_MAX if given is None else min(given, QUERY_ANSWER_BYTES_MAX)


def server_answer_bytes_max(options: Mapping[str, str]) -> int:
    """Of one server."""
    given = _number(options, "maxserverresponsesizebytes", "maxServerResponseSizeBytes")
    return QUERY_ANSWER_BYTES_MAX if given is None else min(given, QUERY_ANSWER_BYTES_MAX)


def as_of_epoch(options: Mapping[str, str]) -> int | None:
    """Raises UserError for an option that is no epoch."""
    if options.get("asofepoch") == "0":
        return 0
    return _number(options, "asofepoch", "asOfEpoch")


def visibility_of(options: dict[str, str]) -> Visibility:
    if flag(options, "skipupsert"):
        return Visibility.ALL
    return Visibility.IN_FORCE if flag(options, "skipupsertdelete") else Visibility.VISIBLE


def wishes_of(options: dict[str, str], table: TableView, known: Mapping[tuple[int, str], int]) -> Wishes:
    """Raises QueryError 700 for a token that is none, or for a wish that only upsert tables can fulfil; UserError for
    numbers that are none."""
    is_upsert = table.record.config.upsert is not None
    if as_of_epoch(options) is not None and not is_upsert:
        raise QueryError(
            QueryCode.QUERY_VALIDATION, f"QueryValidationError: asOfEpoch: {table.name} is not an upsert table",
            hint="leave asOfEpoch away: rows of an append table never change",
        )  # fmt: skip
    token = options.get("notbefore")
    floors = floors_of(token, table) if token is not None and not is_upsert else {}
    groups = _number(options, "numreplicagroupstoquery", "numReplicaGroupsToQuery")
    return Wishes(
        floors=floors,
        known=known if floors else {},
        fixed=flag(options, "usefixedreplica"),
        together=None if groups is None else groups == 1,
    )


def _number(options: Mapping[str, str], key: str, shown: str) -> int | None:
    given = options.get(key)
    if given is None:
        return None
    if not given.isdecimal() or len(given) > _LONG_DIGITS or not 0 < int(given) < _LONG_END:
        raise UserError(f"{shown} must be a number between 1 and 2^63-1, got: {given[:40]}")
    return int(given)
