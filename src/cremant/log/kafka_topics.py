# SPDX-License-Identifier: Apache-2.0
"""What a process knows of the topics of a Kafka cluster: partitions and incarnations (Kafka's topic ids), and since
when.

Appends and questions about offsets use what is known; a topic or partition that is not known is asked for first.
Readers have what they read confirmed: Kafka's consumers go on in a topic that was deleted and created again as if
nothing had happened, so messages count only if the topic's id is still the old one *after* they came (ids never
return). Epoch logs are exempt, for their names never return either; they and idle readers look once in a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from cremant.log.api import TopicInfo
from cremant.log.columns import no_such_partition, no_such_topic, recreated
from cremant.log.kafka_admin import Admin, Where
from cremant.model.errors import PeerError
from cremant.model.limits import KAFKA_TOPIC_CHECK_MS
from cremant.model.names import is_epoch_topic

#: A glance is not worth more.
_GLANCE_S = 1.0


class Topics:
    """Thread-safe."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._guard = threading.Lock()
        self._known: dict[str, tuple[TopicInfo, float]] = {}
        self._tried_s: dict[str, float] = {}

    def fresh(self, topic: str) -> TopicInfo:
        """As it is now. Raises NotFound."""
        return self.all_fresh([topic])[topic]

    def all_fresh(self, topics: Iterable[str], deadline_s: float | None = None) -> dict[str, TopicInfo]:
        """As they are now. Raises NotFound for the first that is not there."""
        asked_s = time.monotonic()
        wanted = list(topics)
        found = self._admin.describe(wanted, deadline_s)
        with self._guard:
            for topic in wanted:
                if topic in found:
                    self._known[topic] = found[topic], asked_s
                else:
                    self._known.pop(topic, None)
        for topic in wanted:
            if topic not in found:
                raise no_such_topic(topic)
        return found

    def require(self, positions: Iterable[Where]) -> None:
        """Raises NotFound unless all are known or found now."""
        where = list(positions)
        with self._guard:
            doubtful = {
                topic
                for topic, partition in where
                if topic not in self._known or not 0 <= partition < self._known[topic][0].partitions
            }
        found = self.all_fresh(doubtful) if doubtful else {}
        for topic, partition in where:
            if topic in found and not 0 <= partition < found[topic].partitions:
                raise no_such_partition(topic, partition, found[topic].partitions)

    def answered_s(self, topic: str) -> float:
        """When the brokers were last asked for it, and answered; 0.0: never. Of the monotonic clock."""
        with self._guard:
            known = self._known.get(topic)
        return known[1] if known is not None else 0.0

    def forget(self, topic: str) -> None:
        with self._guard:
            self._known.pop(topic, None)

    def confirm(self, topic: str, incarnation: str, came_s: float) -> None:
        """Messages of a reader of this incarnation that came then are its own. Raises NotFound, PeerError."""
        if is_epoch_topic(topic):
            came_s -= KAFKA_TOPIC_CHECK_MS / 1000
        with self._guard:
            known = self._known.get(topic)
        info = known[0] if known is not None and known[1] >= came_s else self.fresh(topic)
        if info.incarnation != incarnation:
            raise recreated(topic, incarnation, info.incarnation)

    def glance(self, topic: str, incarnation: str | None = None) -> None:
        """Finds out now and then whether the topic is still there (and the same); brokers that are away are no news.
        Raises NotFound."""
        now_s = time.monotonic()
        due_s = now_s - KAFKA_TOPIC_CHECK_MS / 1000
        with self._guard:
            known = self._known.get(topic)
            if known is not None and (known[1] > due_s or self._tried_s.get(topic, 0.0) > due_s):
                info = known[0]
            else:
                info = None
                self._tried_s[topic] = now_s
        try:
            info = info or self.all_fresh([topic], _GLANCE_S)[topic]
        except PeerError:
            return
        if incarnation is not None and info.incarnation != incarnation:
            raise recreated(topic, incarnation, info.incarnation)
