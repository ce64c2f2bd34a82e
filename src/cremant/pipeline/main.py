# SPDX-License-Identifier: Apache-2.0
"""The pipeline process: Java first, everything else beside it; then it follows the cluster view until it is stopped.

If Java dies, the process ends with an error and whoever supervises it starts it again; if this process dies, Java sees
its input end and exits, and what orphaned workers still write is fenced by generation.

On standby it does the same, after its session has run itself warm; only it leaves new tables to the others. Which of
several pipelines runs a table is decided by the table's lease alone.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from cremant.log.open import open_logs
from cremant.model.cluster import Role
from cremant.model.errors import Unavailable
from cremant.model.settings import Settings
from cremant.pipeline.java import Jvm, JvmStart
from cremant.pipeline.metrics import PipelineMetrics
from cremant.pipeline.session import begin_jvm, open_session, remove_socket_directory
from cremant.pipeline.supervisor import Supervisor
from cremant.pipeline.warmup import warm_up
from cremant.shell.app import RunningServer, listen, make_app, serve
from cremant.shell.directory import hold_directory
from cremant.shell.logs import log_event, setup_logging
from cremant.shell.member import Member

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

SESSION_TIMEOUT_S = 180.0
#: All queries together get this long at a stop, then Spark; the whole stop stays under 5 s.
STOP_S = 2.5
SPARK_STOP_S = 1.0


class SessionOnTheWay:
    """The Spark session, made in a thread of its own; calling it waits. A failure is everybody's failure."""

    def __init__(self, settings: Settings, jvm_start: JvmStart, *, standby: bool = False) -> None:
        self._settings = settings
        self._standby = standby
        self._jvm_start = jvm_start
        self._done = threading.Event()
        self._stopping = threading.Event()
        #: Nothing waits for the session yet, so it may run itself warm first.
        self.is_idle: Callable[[], bool] = lambda: False
        self._session: SparkSession | None = None
        self.jvm: Jvm | None = None
        self.error: BaseException | None = None
        #: Java ended without being told to.
        self.died = False
        self._began_s = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._open, name="spark-session", daemon=True).start()

    def _open(self) -> None:
        try:
            import pyspark.sql  # noqa: F401  # a second, which passes while Java starts

            self.jvm = self._jvm_start.wait()
            self._session = open_session(self._settings, self.jvm)
            log_event(_log, "Spark session ready", after_ms=int((time.monotonic() - self._began_s) * 1000))
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()
        if self._session is not None and self.is_idle():
            warm_up(self._session, self._settings, self._stopping, keyed=self._standby)

    @property
    def ready(self) -> bool:
        return self._session is not None

    @property
    def stopping(self) -> bool:
        """`close` has begun; set before Java is told to end."""
        return self._stopping.is_set()

    def __call__(self) -> SparkSession:
        if not self._done.wait(SESSION_TIMEOUT_S):
            raise Unavailable(f"the Spark session did not start in {SESSION_TIMEOUT_S:.0f} s")
        if self._session is None:
            raise Unavailable(f"the Spark session did not start: {self.error}")
        return self._session

    def close(self) -> None:
        """Ends Spark as cleanly as SPARK_STOP_S allows, then Java."""
        self._stopping.set()
        if self._session is not None and not self.died:
            stopping = threading.Thread(target=self._stop_spark, name="spark-stop", daemon=True)
            stopping.start()
            stopping.join(SPARK_STOP_S)
        if self.jvm is not None:
            self.jvm.stop()
        remove_socket_directory(self._settings)

    def _stop_spark(self) -> None:
        assert self._session is not None
        try:
            self._session.stop()
        except Exception as error:  # Java is stopped next, whatever state Spark is in
            _log.debug("Spark did not stop cleanly", exc_info=error)


def run_pipeline(settings: Settings, *, port: int = 8100, insecure: bool = False, standby: bool = False) -> None:
    """Runs until SIGTERM or SIGINT. Raises NoResource (no Java, port in use, directory in use), InvalidConfig."""
    with hold_directory(settings.data_dir, Role.PIPELINE):
        _run(settings, port=port, insecure=insecure, standby=standby)


def _run(settings: Settings, *, port: int, insecure: bool, standby: bool) -> None:
    session = SessionOnTheWay(settings, begin_jvm(settings), standby=standby)
    session.start()
    bound = listen(str(settings.host), port, insecure=insecure)
    host, real_port = bound.getsockname()[:2]
    logs = open_logs(settings)
    supervisors: list[Supervisor] = []
    member = Member(
        Role.PIPELINE, settings.data_dir, host, real_port, str(settings.controller_url),
        lambda: supervisors[0].report(),
    )  # fmt: skip
    setup_logging("pipeline", member.id)
    supervisor = Supervisor(session, logs, settings, member, standby=standby)
    supervisors.append(supervisor)
    session.is_idle = lambda: standby or (member.view is not None and not supervisor.queries())
    registry = CollectorRegistry()
    registry.register(PipelineMetrics(supervisor.queries))

    def ready() -> tuple[bool, str]:
        if session.error is not None:
            return False, f"Spark did not start: {session.error}"
        if not session.ready:
            return False, "Spark is starting"
        return (member.view is not None), "no view of the cluster yet"

    handles: list[RunningServer] = []
    member.on_view(supervisor.on_view)
    member.start()
    watch = threading.Thread(target=_watch, args=(session, member, handles), name="watch", daemon=True)
    watch.start()
    try:
        app = make_app("pipeline", [], ready=ready, registry=registry)
        serve(
            app, host, real_port, insecure=insecure, data_dir=settings.data_dir, bound=bound, on_handle=handles.append
        )
    finally:
        supervisor.stop(STOP_S)
        member.stop()
        session.close()
        logs.close()
    if session.error is not None:
        raise session.error
    if session.jvm is not None and session.died:
        raise Unavailable("the Java process of the pipeline died", hint=f"see {session.jvm.log_path}")


def _watch(session: SessionOnTheWay, member: Member, handles: list[RunningServer]) -> None:
    """Ends the process when Java is gone or another process took its place: half of a pipeline is none."""
    while True:
        time.sleep(0.2)
        gone = session.jvm is not None and not session.jvm.alive()
        if session.stopping:
            return  # Java ends because it was told to
        if gone or session.error is not None or member.fenced:
            session.died = gone
            for handle in handles:
                handle.stop()
            return
