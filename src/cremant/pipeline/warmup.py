# SPDX-License-Identifier: Apache-2.0
"""Runs a scratch table through the whole path once, so that the first epochs of real tables are quick.

The first epoch of a JVM takes seconds (classes, code generation, Python daemons), the tenth a tenth of one. A pipeline
that has no table yet uses the time: same code, a log of its own in a directory that is thrown away.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cremant.epoch.protocol import RunPlan
from cremant.log.api import Message
from cremant.log.open import open_logs
from cremant.model.cluster import TableRecord, TableView
from cremant.model.names import epoch_topic
from cremant.model.schema import DataType, FieldSpec, FieldType, Schema
from cremant.model.settings import Settings
from cremant.model.table import FlushConfig, StreamConfig, TableConfig
from cremant.model.upsert import UpsertConfig
from cremant.pipeline.run import Run, Totals
from cremant.shell.logs import log_event, log_failure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

EPOCHS = 3
TIMEOUT_S = 60.0
_NAME = "warmup"
_INCARNATION = "0" * 16


def warm_up(spark: SparkSession, settings: Settings, stopping: threading.Event, *, keyed: bool = False) -> None:
    """Takes a few seconds, beside tables that come meanwhile; ends early when `stopping` is set. A failure is logged
    and means nothing for the tables. `keyed`: the way of upsert tables, too, which is another few seconds."""
    scratch = Path(settings.data_dir).absolute() / "warmup"
    shutil.rmtree(scratch, ignore_errors=True)
    began_s = time.monotonic()
    try:
        for upsert in (None, UpsertConfig(comparison_columns=("id",)))[: 2 if keyed else 1]:
            _run(spark, scratch / ("keyed" if upsert else "plain"), stopping, upsert)
        log_event(_log, "warmed up", after_ms=int((time.monotonic() - began_s) * 1000))
    except Exception as error:
        if not stopping.is_set():
            log_failure(_log, "warm-up failed", error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(spark: SparkSession, scratch: Path, stopping: threading.Event, upsert: UpsertConfig | None) -> None:
    settings = Settings(("warm-up", {"data_dir": str(scratch), "log_dir": str(scratch / "log")}))
    logs = open_logs(settings)
    log = logs.epoch
    try:
        incarnation = log.create_topic(_NAME, 1).incarnation
        log.create_topic(epoch_topic(_NAME, _INCARNATION), 1)
        plan = RunPlan(
            generation=1, base=1, checkpoint="warmup", fresh=True, first_batch=0, replay=None, start=(0,), previous=0,
            config_version=1, fence_offset=0,
        )  # fmt: skip
        totals = Totals()
        run = Run(spark, log, log, settings, _table(incarnation, upsert), plan, scratch / "run", totals)
        run.start()
        try:
            deadline = time.monotonic() + TIMEOUT_S
            for epoch in range(EPOCHS):
                log.append(_NAME, 0, [Message(b'{"id": %d, "name": "warm"}' % number) for number in range(100)])
                while totals.epochs <= epoch and not run.finished() and time.monotonic() < deadline:
                    if stopping.wait(0.02):
                        return
        finally:
            run.stop()
        outcome = run.outcome()
        if outcome is not None:
            raise outcome
    finally:
        logs.close()


def _table(topic_incarnation: str, upsert: UpsertConfig | None) -> TableView:
    fields = (
        FieldSpec(name="id", data_type=DataType.LONG, field_type=FieldType.DIMENSION),
        FieldSpec(name="name", data_type=DataType.STRING, field_type=FieldType.DIMENSION),
    )
    config = TableConfig(
        name=_NAME, time_column="id", replication=1, stream=StreamConfig(stream_type="embedded", topic=_NAME),
        flush=FlushConfig(), upsert=upsert,
    )  # fmt: skip
    record = TableRecord(
        config=config, table_schema=Schema(name=_NAME, fields=fields, primary_key_columns=("name",)),
        incarnation=_INCARNATION, topic_incarnation=topic_incarnation,
    )  # fmt: skip
    return TableView(record=record, partitions=(), segments=())
