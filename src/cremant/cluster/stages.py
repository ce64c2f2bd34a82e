# SPDX-License-Identifier: Apache-2.0
"""What a replica's lag is spent on, in which state the replica is, and whether a promise is kept. Pure.

States of a replica:

- `paused`: the table's consumption is paused or the table is disabled;
- `unknown`: nothing is known: it does not answer, or has never said anything;
- `idle`: everything is visible, and no message came for IDLE_AFTER_MS;
- `caughtUp`: everything is visible that was in the stream CAUGHT_UP_MS ago, or at its end as read since then;
- `stuck`: it is behind, the stream has more, and nothing became visible for STUCK_AFTER_MS;
- `behind`: it lags otherwise.

The lag is the time from F, up to which everything is visible, until now. It is cut, from F on, where evidence ends:

    F ────────── C ─────────── R ────────────────── now
      server, log   pipeline      stream or pipeline

C: what the pipeline has closed; R: when the stream last answered it. [F, C) was closed and is not visible: the server
holds it back, or the log if it has not answered that server since a time L. [C, R) was there and is not closed: the
pipeline. From R on it is the stream if that does not answer, else the pipeline, dead or alive. What came after the last
word of a server that would answer is nobody's fault and `unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cremant.model.limits import HEARTBEAT_MS
from cremant.wire.freshness import Alert, Stages

#: Everything of so long ago is visible: as good as all of it.
CAUGHT_UP_MS = 2_000
#: Without a message for so long a partition is idle.
IDLE_AFTER_MS = 10_000
#: Behind without a step for so long: stuck.
STUCK_AFTER_MS = 10_000
#: Who says something twice a second and was not heard for so long has stopped, or was stopped.
SILENT_AFTER_MS = 3 * HEARTBEAT_MS
#: A server looks at the end of its log all the time; what is older was not answered.
LOG_SILENT_AFTER_MS = 2_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A replica's word, of `said_ms`; `log_silent_since_ms`: the log has not answered it since."""

    said_ms: int
    answers: bool
    log_silent_since_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """How far a pipeline is with one partition: `closed_ms` is C, `read_ms` R; None: it has not said."""

    closed_ms: int | None
    read_ms: int | None
    stream_silent: bool
    #: It is alive, or known not to be: it, and nobody else, holds back what nobody has taken.
    known: bool


def stages(fresh_ms: int, now_ms: int, server: Server, pipe: Pipe) -> Stages:
    """Shares of the lag now - fresh, which they sum up to; each >= 0."""
    fresh_ms = min(fresh_ms, now_ms)
    said_ms = min(max(server.said_ms, fresh_ms), now_ms)
    closed_ms = min(max(pipe.closed_ms or 0, fresh_ms), now_ms)
    read_ms = min(max(pipe.read_ms or 0, closed_ms), now_ms)
    spans = [("server", fresh_ms, min(closed_ms, said_ms))]
    spans.append(("unknown" if server.answers else "server", min(closed_ms, said_ms), closed_ms))
    if pipe.known:
        spans.append(("pipeline", closed_ms, read_ms))
        spans.append(("stream" if pipe.stream_silent else "pipeline", read_ms, now_ms))
    else:
        spans.append(("unknown", closed_ms, now_ms))
    found = dict.fromkeys(("stream", "pipeline", "log", "server", "unknown"), 0)
    silent_ms = now_ms if server.log_silent_since_ms is None else server.log_silent_since_ms
    for stage, begin_ms, end_ms in spans:
        parted_ms = min(max(silent_ms, begin_ms), end_ms) if stage != "stream" else end_ms
        found[stage] += parted_ms - begin_ms
        found["log"] += end_ms - parted_ms
    return Stages(**found)


def greatest(split: Stages) -> str | None:
    """The stage that most of the lag is spent in; None: there is no lag."""
    shares = msgspec.structs.asdict(split)
    return max(shares, key=shares.__getitem__) if split.total_ms else None


def state_of(
    paused: bool, responds: bool, lag_ms: int | None, event_age_ms: int | None, lag_rows: int | None, quiet_ms: int
) -> str:
    """Of a replica; `lag_rows`: of the stream's end, None if that is not known; `quiet_ms`: since its last step."""
    if paused:
        return "paused"
    if not responds:
        return "unknown"
    if lag_rows == 0 or (lag_ms is not None and lag_ms <= CAUGHT_UP_MS):
        return "idle" if event_age_ms is None or event_age_ms > IDLE_AFTER_MS else "caughtUp"
    if lag_rows is not None and quiet_ms > STUCK_AFTER_MS:
        return "stuck"
    return "unknown" if lag_ms is None and lag_rows is None else "behind"


def promise(
    lag_ms: int | None, age_ms: int | None, now_ms: int, sla_ms: int | None, max_age_ms: int | None, why: str
) -> tuple[str, Alert]:
    """SLA state and alert. A bound is broken by what is above it; what is not known breaks no bound, but fires. As in
    answers to queries (`BrokerResponse.sla_violated`), unknown freshness keeps no promise."""
    if sla_ms is None and max_age_ms is None:
        return "none", Alert(state="ok")
    broken: list[tuple[int, str]] = []
    if sla_ms is not None and lag_ms is not None and lag_ms > sla_ms:
        text = f"fresh as of {lag_ms} ms ago, {sla_ms} ms are promised: {why}"
        broken.append((now_ms - lag_ms + sla_ms, text))
    if max_age_ms is not None and age_ms is not None and age_ms > max_age_ms:
        text = f"the newest event is of {age_ms} ms ago, {max_age_ms} ms are promised: is the producer silent?"
        broken.append((now_ms - age_ms + max_age_ms, text))
    if broken:
        return "violated", Alert(state="firing", reason=broken[0][1], since_ms=min(since for since, _ in broken))
    if lag_ms is None:
        return "unknown", Alert(state="firing", reason=f"it is not known how fresh the table is: {why}")
    if max_age_ms is not None and age_ms is None:
        return "unknown", Alert(state="firing", reason="it is not known of when the newest event is")
    return "ok", Alert(state="ok")
