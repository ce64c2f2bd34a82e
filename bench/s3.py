# SPDX-License-Identifier: Apache-2.0
"""A deep store that speaks S3, in a process of its own (of moto): it answers, hangs, or is gone."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from bench.cluster import ClusterError
from cremant.store.deepstore import MARKER

LOGIN = {"access_key_id": "who", "secret_access_key": "cares", "region": "us-east-1"}
_START_DEADLINE_S = 120.0


class S3Server:
    """A context manager, with a bucket. `nice`: a real one is on another machine and takes no core, so this one may be
    left with what the cluster under test does not use."""

    def __init__(self, *, nice: int = 0) -> None:
        if importlib.util.find_spec("moto") is None:
            raise ClusterError("a store that speaks S3 is needed: install moto[server]")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.bucket = f"bucket-{secrets.token_hex(6)}"
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Answers when this returns, and has an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, self._nice)
        until_s = time.monotonic() + _START_DEADLINE_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                self.make_bucket(self.bucket)
                return
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise ClusterError(f"the S3 server on port {self._port} did not start within {_START_DEADLINE_S:.0f} s")
            time.sleep(0.1)

    def hang(self) -> None:
        """Connections are accepted by the kernel, and nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        """After `hang`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self.hang()
        try:
            yield
        finally:
            self.answer()

    def kill(self) -> None:
        """Connections are refused, and what it had is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def make_bucket(self, name: str) -> None:
        # Behind an address that is no name of Amazon's, the path names the bucket.
        host = {"Host": f"127.0.0.1:{self._port}"}
        httpx.put(f"{self.endpoint}/{name}", headers=host, trust_env=False, timeout=5.0).raise_for_status()

    def settings(self, directory: Path, *, prefix: str) -> dict[str, str]:
        """Of a cluster whose deep store is in the bucket; its properties file goes into `directory`."""
        properties = directory / "s3.properties"
        lines = [f"{key}={value}\n" for key, value in {"endpoint": self.endpoint, **LOGIN}.items()]
        properties.write_text("".join(lines), encoding="utf-8")
        return {"store_uri": f"s3://{self.bucket}/{prefix}", "store_properties": str(properties)}

    def objects(self) -> set[str]:
        """The last parts of the names of what is in the bucket, but for what marks it as the store."""
        listed = httpx.get(f"{self.endpoint}/{self.bucket}?list-type=2&max-keys=1000", trust_env=False).text
        assert "<IsTruncated>false" in listed, listed
        return {part.partition("</Key>")[0].rpartition("/")[2] for part in listed.split("<Key>")[1:]} - {MARKER}
