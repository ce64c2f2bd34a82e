# SPDX-License-Identifier: Apache-2.0
"""Leader lease in a metadata store: at most one holder leads, and a former leader can no longer write.

Two records: the lease (holder, until when; renewed) and the *term* (grows when the holder changes). The lease only
keeps others from trying; safety comes from the term: a leader requires the term's version in every commit, so what a
deposed leader still wants to write fails as a whole. Time is the caller's argument.
"""

from __future__ import annotations

import msgspec

from cremant.store.metadata import Expect, MetadataStore, Put, StoreConflict


class LeaseRecord(msgspec.Struct, frozen=True):
    holder: str
    until_ms: int


class Leadership(msgspec.Struct, frozen=True):
    """`fence` is to be required in every commit of the leader."""

    name: str
    holder: str
    term: int
    until_ms: int
    fence: Expect


def lease_key(name: str) -> str:
    return f"/leases/{name}"


def term_key(name: str) -> str:
    return f"/terms/{name}"


def last_lease(store: MetadataStore, name: str) -> LeaseRecord | None:
    """The lease as it was last written, by whomever."""
    entry = store.get(lease_key(name))
    return msgspec.json.decode(entry.value, type=LeaseRecord) if entry else None


def lead(
    store: MetadataStore, name: str, holder: str, *, now_ms: int, lease_ms: int, take_over: bool = False
) -> Leadership | None:
    """Takes or renews the leadership `name`; None while another holder's lease runs, or when the race was lost.
    `take_over`: the caller has proven that the present holder's process is gone."""
    lease_entry, term_entry = store.get(lease_key(name)), store.get(term_key(name))
    lease = msgspec.json.decode(lease_entry.value, type=LeaseRecord) if lease_entry else None
    term = int(term_entry.value) if term_entry else 0
    if lease is not None and lease.holder != holder and lease.until_ms > now_ms and not take_over:
        return None
    renewing = lease is not None and lease.holder == holder and term_entry is not None
    until_ms = now_ms + lease_ms
    updates = [Put(lease_key(name), msgspec.json.encode(LeaseRecord(holder, until_ms)))]
    if not renewing:
        term += 1
        updates.append(Put(term_key(name), str(term).encode()))
    requirements = [
        Expect(lease_key(name), lease_entry.version if lease_entry else None),
        Expect(term_key(name), term_entry.version if term_entry else None),
    ]
    try:
        revision = store.commit(requirements, updates)
    except StoreConflict:
        return None
    version = term_entry.version if renewing and term_entry else revision
    return Leadership(name, holder, term, until_ms, Expect(term_key(name), version))
