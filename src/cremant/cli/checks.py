# SPDX-License-Identifier: Apache-2.0
"""What `cremant doctor` looks at on this machine. A check answers with findings; a finding that is not ok says how to
mend it. Checks never change anything but stale temporary directories of dead processes."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from cremant.cli import preflight
from cremant.cli.find import ClusterFile
from cremant.model.errors import CremantError
from cremant.model.limits import MIB
from cremant.model.settings import Settings
from cremant.shell.deepstore import open_store, probe
from cremant.shell.leftovers import remove_stale_directories
from cremant.store.deepstore import MARKER
from cremant.store.open import has_store, store_directory, store_uri

PYTHON_MINIMUM = (3, 11)
PYSPARK_MINIMUM = (4, 3)
#: Less than this is not enough for a segment being sealed and its neighbours; below the second it will soon not be.
_DISK_FAIL_BYTES, _DISK_WARN_BYTES = 512 * MIB, 4096 * MIB
_INODES_FAIL, _INODES_WARN = 1_000, 20_000
#: Sockets, mapped segments, log files; a server of a thousand segments needs some thousands.
_FILES_WARN = 4_096
_MEMORY_WARN_BYTES = 2048 * MIB
_CLOCK_SAMPLE_S = 0.2
_CLOCK_DRIFT_MS = 20.0


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True):
    check: str
    level: Level
    message: str
    fix: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding(check, Level.OK, message)


def warned(check: str, message: str, fix: str) -> Finding:
    return Finding(check, Level.WARN, message, fix)


def failed(check: str, message: str, fix: str) -> Finding:
    return Finding(check, Level.FAIL, message, fix)


def skipped(check: str, message: str) -> Finding:
    return Finding(check, Level.SKIP, message)


def of_error(check: str, error: CremantError) -> Finding:
    return failed(check, error.message, error.hint)


def check_python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MINIMUM:
        yield failed("python", f"Python {found}", "install Python 3.11 or newer")
    else:
        yield ok("python", f"Python {found}, {sys.executable}")


def check_pyspark() -> Iterator[Finding]:
    try:
        preflight.check_pyspark()
        version = importlib.metadata.version("pyspark")
    except CremantError as error:
        yield of_error("pyspark", error)
    except importlib.metadata.PackageNotFoundError:
        yield warned("pyspark", "PySpark of unknown version", "pip install 'cremant[pipeline]'")
    else:
        if tuple(int(part) for part in version.split(".")[:2]) < PYSPARK_MINIMUM:
            yield failed("pyspark", f"PySpark {version} is too old", "pip install 'cremant[pipeline]'")
        else:
            yield ok("pyspark", f"PySpark {version}")


def check_java() -> Iterator[Finding]:
    try:
        yield ok("java", preflight.check_java())
    except CremantError as error:
        yield of_error("java", error)


def check_ports(host: str, ports: dict[str, int], cluster: ClusterFile | None) -> Iterator[Finding]:
    """Free, or taken by a role of the cluster in this data directory, or by whom."""
    ours = {role.pid: name for name, role in cluster.roles.items()} if cluster is not None else {}
    for name, port in ports.items():
        check = f"port {port}"
        try:
            preflight.check_port(host, port, f"--{name.partition('-')[0]}-port")
        except CremantError as error:
            pid, command = listener(port)
            if pid in ours:
                yield ok(check, f"our own {ours[pid]} listens there (process {pid})")
            elif cluster is not None:
                yield ok(check, f"taken by {command or 'another program'}; this cluster has other ports")
            else:
                who = f"{command} (process {pid})" if pid else "a process of another user"
                yield warned(check, f"{name}: in use by {who}", error.hint)
        else:
            yield ok(check, f"free, for {name}")


def listener(port: int) -> tuple[int, str]:
    """Process id and command of whoever listens on a TCP port; (0, "") if that cannot be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    if not inodes:
        return 0, ""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return int(process.name), command[:80]
        except OSError:
            continue  # gone meanwhile, or another user's
    return 0, ""


def check_directory(what: str, directory: Path, option: str) -> Iterator[Finding]:
    """Reachable, writable, with room. A directory that does not exist yet is judged by its nearest parent."""
    nearest = _nearest(directory)
    exists = nearest == directory
    fix = f"give this user the right to write there, or choose another: {option}"
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(20, "not a directory")
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield failed(what, f"{nearest} cannot be written: {error.strerror}", fix)
        return
    yield ok(what, f"{directory}" + ("" if exists else f" (will be made in {nearest})"))


def check_store(settings: Settings) -> Iterator[Finding]:
    """A directory that nobody uses yet is looked at; any other store is written, read and deleted in."""
    what = "deep store"
    try:
        directory = store_directory(settings)
        if directory is not None and not (has_store(settings) and (directory / MARKER).exists()):
            yield from check_directory(what, directory, "--store-uri")
            if has_store(settings):
                yield warned(
                    what, f"{directory} is no deep store yet: it has no file {MARKER}",
                    "the first start of a controller makes it one; if one has run with it before, mount the share",
                )  # fmt: skip
            return
        with tempfile.TemporaryDirectory() as scratch:
            trouble = probe(open_store(settings), Path(scratch))
    except CremantError as error:
        yield of_error(what, error)
        return
    if trouble is None:
        yield ok(what, f"{store_uri(settings)}: written, read and deleted")
    else:
        yield failed(what, trouble, "segments cannot be stored: mend the store, --store-uri or store_properties")


def check_rooms(directories: dict[str, Path | None]) -> Iterator[Finding]:
    """Once per file system; None is a place that is none."""
    seen: dict[int, list[str]] = {}
    at: dict[int, Path] = {}
    for name, directory in directories.items():
        if directory is None:
            continue
        nearest = _nearest(directory)
        device = nearest.stat().st_dev
        seen.setdefault(device, []).append(name)
        at.setdefault(device, nearest)
    for device, names in seen.items():
        yield from _check_room(", ".join(names), at[device])


def _nearest(directory: Path) -> Path:
    """The directory, or its nearest parent that exists."""
    while directory != directory.parent:
        try:
            directory.stat()
        except OSError:
            directory = directory.parent
        else:
            break
    return directory


def _check_room(users: str, directory: Path) -> Iterator[Finding]:
    usage = shutil.disk_usage(directory)
    free = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free for {users}"
    if usage.free < _DISK_FAIL_BYTES:
        yield failed("room", f"{directory}: {free}", "make room: nothing can be stored soon")
    elif usage.free < _DISK_WARN_BYTES:
        yield warned("room", f"{directory}: {free}", "make room, or shorten retention")
    else:
        yield ok("room", free)
    inodes = os.statvfs(directory)
    if inodes.f_files and inodes.f_favail < _INODES_WARN:
        level = Level.FAIL if inodes.f_favail < _INODES_FAIL else Level.WARN
        yield Finding(
            "room", level, f"{directory}: {inodes.f_favail:,} inodes free for {users}", "remove small files there"
        )


def check_temporary() -> Iterator[Finding]:
    directory = Path(tempfile.gettempdir())
    yield from check_directory("temporary files", directory, "the variable TMPDIR")
    longest = len(str(directory)) + 60
    if longest > 107:
        yield failed(
            "temporary files", f"{directory} is too long a path for the sockets of Spark's workers", "set TMPDIR=/tmp"
        )
    removed = remove_stale_directories()
    if removed:
        yield ok("leftovers", f"removed {len(removed)} directories of dead processes in {directory}")


def check_clock() -> Iterator[Finding]:
    """The wall clock runs as fast as the monotonic one."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_CLOCK_SAMPLE_S)
    drift_ms = ((time.time() - wall) - (time.monotonic() - steady)) * 1000
    if abs(drift_ms) > _CLOCK_DRIFT_MS:
        yield warned("clock", f"the wall clock jumped by {drift_ms:.0f} ms while we looked", "let NTP slew, not step")
    elif time.time() < 1_735_689_600:
        yield failed("clock", f"the clock says {time.ctime()}", "set it; retention goes by it")
    else:
        yield ok("clock", "steady")


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < _FILES_WARN:
        fix = f"ulimit -n {min(65_536, hard) if hard > 0 else 65_536} before starting; LimitNOFILE= in systemd"
        yield warned("file descriptors", f"{soft:,} allowed", fix)
    else:
        yield ok("file descriptors", f"{soft:,} allowed")


def check_memory() -> Iterator[Finding]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        yield skipped("memory", "not known on this system")
        return
    text = f"{available / 2**30:.1f} GiB available"
    if available < _MEMORY_WARN_BYTES:
        fix = "lower spark_driver_memory and query_memory_bytes, or run fewer servers"
        yield warned("memory", text, fix)
    else:
        yield ok("memory", text)


def check_reach(check: str, brokers: str, timeout_s: float = 3.0) -> Iterator[Finding]:
    """That something listens at each of `host:port,…`."""
    for broker in brokers.split(","):
        host, _, port = broker.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
        except (OSError, OverflowError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            yield failed(check, f"{broker}: {reason}", "is it running, and is the address right as seen from here?")
