# SPDX-License-Identifier: Apache-2.0
"""The Spark session of a pipeline process: one per process, several tables in it (facts: settings that worked).

Spark's own checkpoint writes cost an epoch about 100 ms on the stock local file system, because it starts a process
per file; the small jar beside this module has one that does not. With the setting `pipeline_quick_files` 0, or without
the jar, everything works the same, slower.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cremant.model.errors import NoResource
from cremant.model.settings import Settings
from cremant.pipeline.java import QUICK_JAR, Jvm, JvmStart
from cremant.shell.leftovers import make_held, remove_held, remove_stale_directories, temporary_path
from cremant.shell.logs import log_event

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def session_conf(settings: Settings) -> dict[str, str]:
    """Every Spark setting that is not Spark's default, with why."""
    conf = {
        "spark.app.name": "cremant-pipeline",
        "spark.master": str(settings.spark_master),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        # Several tables share the task slots fairly.
        "spark.scheduler.mode": "FAIR",
        # A worker process imports pyarrow once, in the process that all workers are forked from.
        "spark.python.daemon.module": "cremant.pipeline.daemon",
        "spark.python.worker.reuse": "true",
        # Over TCP each hand-over to a worker waits for a delayed acknowledgement: 100 ms per epoch become 60.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(socket_directory(settings)),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000000",
        # An epoch is the latency: look for new messages often, never run an empty batch.
        "spark.sql.streaming.pollingDelay": "20ms",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "10",
        "spark.sql.streaming.minBatchesToRetain": "100",
        "spark.sql.adaptive.enabled": "false",
        # The key coordinators of upsert tables: state on disk, and per epoch only what changed. They count keys
        # themselves; the store would look each one up again.
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.cleaner.periodicGC.interval": "10min",
        "spark.sql.warehouse.dir": str(Path(settings.data_dir).absolute() / "spark-warehouse"),
        "spark.local.dir": str(Path(settings.data_dir).absolute() / "spark-local"),
        "spark.sql.catalogImplementation": "in-memory",
    }
    if settings.pipeline_quick_files and QUICK_JAR.exists():
        conf["spark.hadoop.fs.file.impl"] = "dev.cremant.fs.QuickLocalFileSystem"
        conf["spark.hadoop.fs.AbstractFileSystem.file.impl"] = "dev.cremant.fs.QuickLocalFs"
    return conf


def socket_directory(settings: Settings) -> Path:
    """Where JVM and Python workers meet: only this user may enter, and short, because socket paths are limited to about
    100 characters. One per data directory, so that what a killed process left is cleaned up by the next."""
    return temporary_path(hashlib.sha256(str(Path(settings.data_dir).absolute()).encode()).hexdigest()[:12])


def _make_socket_directory(settings: Settings) -> None:
    directory = socket_directory(settings)
    try:
        make_held(directory)
    except OSError as error:
        raise NoResource(f"cannot make {directory} for the sockets of Spark's Python workers: {error}") from error


def remove_socket_directory(settings: Settings) -> None:
    remove_held(socket_directory(settings))


def begin_jvm(settings: Settings) -> JvmStart:
    """First thing a pipeline process does: Java needs seconds, everything else can happen beside it."""
    data_dir = Path(settings.data_dir).absolute()
    scratch = data_dir / "spark-local"
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left: the directory is ours alone
    scratch.mkdir(parents=True, exist_ok=True)
    remove_stale_directories()
    _make_socket_directory(settings)
    memory = str(settings.spark_driver_memory)
    return JvmStart.begin(driver_memory=memory, log_path=data_dir / "spark.log", scratch=scratch)


def open_session(settings: Settings, jvm: Jvm) -> SparkSession:
    """The session, in the JVM that was begun. Once per process. Raises NoResource."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_GATEWAY_PORT"] = str(jvm.port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = jvm.secret
    # Spark's remark about the version of pandas, which is not used here, is nothing a user could act on.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise NoResource("PySpark is not installed", hint="pip install 'cremant[pipeline]'") from error
    try:
        conf = SparkConf(loadDefaults=False)
        for name, value in session_conf(settings).items():
            conf.set(name, value)
        session = SparkSession.builder.config(conf=conf).getOrCreate()
        know_no_other_sources(session)
        return session
    finally:
        del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]


def know_no_other_sources(session: SparkSession) -> None:
    """Before the first data source is registered Spark starts two Python processes that look for others in packages
    whose name begins with `pyspark_`: seconds of every start, for nothing that is used here. It remembers what they
    found; we say that it was nothing. This is not part of Spark's interface: without it everything works the same."""
    from py4j.protocol import Py4JError

    jvm: Any = session._jvm
    try:
        manager = getattr(jvm.org.apache.spark.sql.execution.datasources, "DataSourceManager$")
        nothing = getattr(getattr(jvm.scala.collection.immutable, "Map$"), "MODULE$").empty()
        getattr(getattr(manager, "MODULE$"), "dataSourceBuilders_$eq")(jvm.scala.Option.apply(nothing))
    except (Py4JError, TypeError) as error:
        log_event(_log, "Spark looks for data sources in packages", level=logging.WARNING, because=str(error))
