# SPDX-License-Identifier: Apache-2.0
"""The Java process of a pipeline: found, checked, started, watched (facts: cold start, settings that worked).

It is started directly, not through spark-submit: no shell scripts, no second JVM that only builds a command line, and
its output goes to a file instead of the user's terminal. It reads its standard input, which is a pipe from us: when we
die, however we die, it sees the end of that pipe and exits, so a JVM never outlives its driver for long.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cremant.model.errors import NoResource
from cremant.shell.leftovers import make_held, remove_held, temporary_path

JAVA_MAJOR_MIN = 17
#: A laptop under load needs about 5 s; beyond this something is wrong.
JVM_START_TIMEOUT_S = 120.0
#: Queries are stopped before; what is left of Spark's own tidying may be cut short.
JVM_STOP_TIMEOUT_S = 1.0
HOW_TO_INSTALL = (
    "install Java 17 or newer: `apt-get install openjdk-17-jre-headless`, `dnf install java-17-openjdk-headless` or "
    "`brew install openjdk@17`; or set JAVA_HOME to one"
)
_HERE = Path(__file__).resolve().parent / "jvm"
QUICK_JAR = _HERE / "cremant-fs.jar"
_LOG4J = _HERE / "log4j2.properties"
#: What Spark's own launcher passes (org.apache.spark.launcher.JavaModuleOptions), less the vector module, which only
#: machine learning uses and which prints a warning.
_OPENED = (
    "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util",
    "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch", "sun.nio.cs",
    "sun.security.action", "sun.util.calendar",
)  # fmt: skip


def find_java() -> Path:
    """A Java that is new enough. Raises NoResource with how to get one."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if found is None or not os.access(found, os.X_OK):
        where = f"JAVA_HOME={home} has no bin/java" if home else "no `java` on the PATH"
        raise NoResource(f"the pipeline needs Java {JAVA_MAJOR_MIN} or newer: {where}", hint=HOW_TO_INSTALL)
    java = Path(found).resolve()
    major = java_major(java)
    if major < JAVA_MAJOR_MIN:
        raise NoResource(
            f"the pipeline needs Java {JAVA_MAJOR_MIN} or newer, {java} is Java {major}", hint=HOW_TO_INSTALL
        )
    return java


def java_major(java: Path) -> int:
    """Major version of a Java: from its `release` file, or by asking it. Raises NoResource."""
    release = java.parent.parent / "release"
    text = release.read_text(errors="replace") if release.is_file() else ""
    match = re.search(r'JAVA_VERSION="([^"]+)"', text)
    if match is None:
        try:
            asked = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoResource(f"{java} does not start: {error}", hint=HOW_TO_INSTALL) from error
        match = re.search(r'version "([^"]+)"', asked.stderr + asked.stdout)
    if match is None:
        raise NoResource(f"{java} does not tell its version", hint=HOW_TO_INSTALL)
    parts = re.findall(r"\d+", match.group(1))
    return int(parts[1]) if parts[0] == "1" and len(parts) > 1 else int(parts[0])


def spark_home() -> Path:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise NoResource("PySpark is not installed", hint="pip install 'cremant[pipeline]'")
    return Path(spec.origin).parent


@dataclass(frozen=True, slots=True)
class Jvm:
    """A running Java process with its gateway for Python."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str
    log_path: Path

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends it, gently first. Returns when it is gone."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=JVM_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=JVM_START_TIMEOUT_S)


class JvmStart:
    """A JVM on its way: `begin` it first thing, do other work, then `wait`."""

    def __init__(self, process: subprocess.Popen[bytes], info_directory: Path, log_path: Path) -> None:
        self._process = process
        self._info_directory = info_directory
        self._log_path = log_path

    @classmethod
    def begin(cls, *, driver_memory: str, log_path: Path, scratch: Path | None = None) -> JvmStart:
        """Starts Java; `scratch` is where it keeps temporary files. Raises NoResource (no Java, no PySpark)."""
        java, home = find_java(), spark_home()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".previous.log"))
        info = temporary_path(f"jvm-{os.getpid()}")
        make_held(info)
        environment = dict(os.environ) | {
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info / "gateway"),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        }
        options = jvm_options(driver_memory, home)
        if scratch is not None:
            options.append(f"-Djava.io.tmpdir={scratch}")
        with log_path.open("ab") as output:
            process = subprocess.Popen(
                [str(java), *options, "org.apache.spark.api.python.PythonGatewayServer"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        return cls(process, info, log_path)

    def wait(self) -> Jvm:
        """The JVM once its gateway listens. Raises NoResource with the end of its log if it does not come up."""
        info = self._info_directory / "gateway"
        deadline = time.monotonic() + JVM_START_TIMEOUT_S
        try:
            while not info.exists():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._process.kill()
                    self._process.wait(timeout=JVM_START_TIMEOUT_S)
                    raise NoResource(
                        f"the Java process of the pipeline did not start: {self._log_tail()}",
                        hint=f"see {self._log_path}; if memory is short, lower spark_driver_memory",
                    )
                time.sleep(0.02)
            data = info.read_bytes()
        finally:
            remove_held(self._info_directory)
        length = int.from_bytes(data[4:8], "big")
        return Jvm(self._process, int.from_bytes(data[:4], "big"), data[8 : 8 + length].decode(), self._log_path)

    def _log_tail(self) -> str:
        text = self._log_path.read_text(errors="replace") if self._log_path.exists() else ""
        return text[-500:].strip() or "no output"


def jvm_options(driver_memory: str, home: Path) -> list[str]:
    class_path = f"{QUICK_JAR}:{home}/jars/*" if QUICK_JAR.exists() else f"{home}/jars/*"
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    return [
        f"-Xmx{driver_memory}",
        # Spark's analyser recurses deeply when a query is stopped inside foreachBatch.
        "-Xss16m",
        # This JVM conducts, it does not compute: the quick compiler halves its start and costs nothing later.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        # A sixth of what a start costs goes into checking the class files of the PySpark that is installed here.
        "-XX:+UnlockDiagnosticVMOptions",
        "-XX:-BytecodeVerificationRemote",
        "-XX:+IgnoreUnrecognizedVMOptions",
        *opened,
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Djdk.reflect.useDirectMethodHandle=false",
        f"-Dlog4j2.configurationFile=file:{_LOG4J}",
        "-cp",
        class_path,
    ]
