# SPDX-License-Identifier: Apache-2.0
"""The safeguards of segment completion, each of which can be taken away (as `cremant.epoch.safeguards`).

Production never passes anything but `ALL`. The simulator takes one away at a time and must notice.
"""

from __future__ import annotations

import msgspec


class Safeguards(msgspec.Struct, frozen=True, kw_only=True):
    """True = the safeguard is in place."""

    #: Controller: a commit counts with the token, committer and end in force only.
    token_checked: bool = True
    #: Controller: a decided cut never changes, whoever reports a later position (I-1).
    cut_fixed: bool = True
    #: Controller: an upload is recorded only for the committed content, and only while no object is named.
    upload_checked: bool = True
    #: Replica: what was built is installed only if it is the committed content (I-3).
    content_compared: bool = True
    #: Replica: under STORE_REQUIRED a commit waits until its upload landed.
    upload_awaited: bool = True
    #: Trimming: the range of a segment that is not safe stays in the epoch log (I-6).
    unsafe_kept: bool = True
    #: Trimming: a single copy is not safe, only two or an object are (I-6).
    two_copies: bool = True
    #: Repair: a replica that is away is given up only when the others that are wanted have verified copies (I-6).
    others_verified: bool = True


ALL = Safeguards()
