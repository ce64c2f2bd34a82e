# SPDX-License-Identifier: Apache-2.0
"""Read tokens: an answer names the rows it showed, and a later query may ask not to see fewer. Pure.

`readToken` of an answer is opaque for clients (base64url of JSON): table, incarnation, epoch, and, of append tables,
per partition the offset below which every row was part of the answer. `SET notBefore = '<token>'` hands it back.
A token of an epoch that a rewind took back is refused: what it named is not there any more.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from cremant.cluster.lowwater import is_void
from cremant.model.cluster import TableRecord, TableView
from cremant.model.errors import QueryError
from cremant.model.query_codes import QueryCode
from cremant.wire.messages import PartitionAnswer

#: A token of the most partitions a table may have, with 19 digits each, is below this.
_TOKEN_CHARS_MAX = 64 * 1024
_OFFSETS_END = 2**63
NO_FLOORS: Mapping[int, int] = MappingProxyType({})


class _Token(msgspec.Struct, frozen=True):
    t: str
    i: str
    e: int
    o: dict[str, int]


def read_token(
    record: TableRecord, epoch: int, tails: Iterable[PartitionAnswer], floors: Mapping[int, int] = NO_FLOORS
) -> str:
    """Names the rows of the answer: per partition, everything below the offset. `floors` are those of the query: what a
    partial answer does not show its client has seen before, so the next answer must not show less."""
    offsets = dict(floors)
    for tail in tails:
        offsets[tail.partition] = max(tail.covered.next, offsets.get(tail.partition, 0))
    named = {str(partition): offsets[partition] for partition in sorted(offsets)}
    token = _Token(record.config.name, record.incarnation, epoch, named)
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).decode().rstrip("=")


def floors_of(text: str, table: TableView) -> dict[int, int]:
    """Partition -> offset that an answer must reach. Raises QueryError 700 for what is no token of this table."""
    token = _token_of(text, table)
    known = {str(part.record.partition): part.record.partition for part in table.partitions}
    floors: dict[int, int] = {}
    for name, offset in token.o.items():
        if name not in known:
            raise _refused(f"the token names partition {name[:20]}, table {table.name} has {', '.join(known)}")
        if not 0 <= offset < _OFFSETS_END:
            raise _refused(f"the token names an offset of partition {name} that no log has")
        floors[known[name]] = offset
    return floors


def epoch_of(text: str, table: TableView) -> int:
    """The epoch of the answer, upsert tables. Raises QueryError 700 for what is no token of this table."""
    epoch = _token_of(text, table).e
    if not 0 <= epoch < _OFFSETS_END:
        raise _refused("the token names an epoch that no table has")
    return epoch


def _token_of(text: str, table: TableView) -> _Token:
    token = _decoded(text)
    if token.t != table.name:
        raise _refused(f"the token is of table {token.t}, the query asks {table.name}")
    if token.i != table.record.incarnation:
        raise _refused(
            f"the token is of an earlier table {token.t}, which was dropped",
            hint="leave notBefore away once, then use the readToken of that answer",
        )
    void = is_void(token.e, table.pipeline_record.rewinds)
    if void is not None:
        raise _refused(
            f"the token is of epoch {token.e}, which was taken back by a rewind to epoch {void.to_epoch}",
            hint="leave notBefore away once, then use the readToken of that answer",
        )
    return token


def _decoded(text: str) -> _Token:
    if len(text) > _TOKEN_CHARS_MAX:
        raise _refused(f"a text of {len(text)} characters is no token")
    try:
        raw = base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=_Token)
    except (binascii.Error, UnicodeEncodeError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise _refused(f"'{text[:40]}' is no token") from error


def _refused(what: str, hint: str = "give it the readToken of an earlier answer, as it came") -> QueryError:
    return QueryError(QueryCode.QUERY_VALIDATION, f"QueryValidationError: notBefore: {what}", hint=hint)
