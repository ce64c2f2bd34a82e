# SPDX-License-Identifier: Apache-2.0
"""`cremant start ROLE`: one role in this process.

Brokers and servers leave without the interpreter's teardown, once everything is closed and written: queries that were
cancelled or abandoned may still be inside our functions on DataFusion's threads, and a thread of Rust that asks for an
interpreter that is being taken down aborts the process.
"""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from typing import Never, assert_never

from cremant.cli.child import die_with_parent
from cremant.model.errors import UserError
from cremant.model.settings import Settings


class RoleName(StrEnum):
    CONTROLLER = "controller"
    BROKER = "broker"
    SERVER = "server"
    PIPELINE = "pipeline"


def start(role: RoleName, settings: Settings, *, port: int, insecure: bool, standby: bool = False) -> None:
    """Imports only what the role needs: a broker must start without Spark, a controller without DataFusion."""
    if standby and role is not RoleName.PIPELINE:
        raise UserError(
            f"--standby is for the pipeline, not for a {role}", hint="of the other roles several work beside each other"
        )
    die_with_parent()
    match role:
        case RoleName.CONTROLLER:
            from cremant.controller.main import run_controller

            run_controller(settings, port=port, insecure=insecure)
        case RoleName.BROKER:
            from cremant.broker.main import run_broker

            run_broker(settings, port=port, insecure=insecure)
            _leave()
        case RoleName.SERVER:
            from cremant.server.main import run_server

            run_server(settings, port=port, insecure=insecure)
            _leave()
        case RoleName.PIPELINE:
            from cremant.pipeline.main import run_pipeline

            run_pipeline(settings, port=port, insecure=insecure, standby=standby)
        case _:
            assert_never(role)


def _leave() -> Never:
    """Ends the process with status 0; what was logged and printed is out."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
