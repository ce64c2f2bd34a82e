# SPDX-License-Identifier: Apache-2.0
"""The archive of a segment: what other programs read of it, each of its bytes by position, and what is refused."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from cremant.model.errors import Corrupt, NoResource
from cremant.segment.archive import Archive, unpack

SEGMENT = "trips__0__7__20260101T0000Z"


def made(path: Path, segment: str = SEGMENT) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        archive = Archive(segment, size, Archive(segment, size).tar_crc32(file))
        return archive.read(file, 0, archive.size_bytes)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    path.write_bytes(random.Random(1).randbytes(300_001))
    return path


@pytest.mark.parametrize("size", [0, 1, 512, 64 * 1024, 65_535 * 3 - 1024, 1_000_000])
def test_gzip_and_tar_of_the_system_read_it(tmp_path: Path, size: int) -> None:
    parquet = tmp_path / "rows.parquet"
    parquet.write_bytes(os.urandom(size))
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(made(parquet))
    subprocess.run(["gzip", "-t", str(archive)], check=True)
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(tmp_path)], check=True, stderr=subprocess.DEVNULL)
    assert (tmp_path / SEGMENT / "rows.parquet").read_bytes() == parquet.read_bytes()
    unpack(archive, SEGMENT, tmp_path / "back", bytes_max=size + 100_000)
    assert (tmp_path / "back").read_bytes() == parquet.read_bytes()


def test_every_byte_follows_from_its_position(parquet: Path) -> None:
    whole = made(parquet)
    assert whole == made(parquet)
    dice = random.Random(2)
    with parquet.open("rb") as file:
        size = parquet.stat().st_size
        archive = Archive(SEGMENT, size, Archive(SEGMENT, size).tar_crc32(file))
        assert archive.size_bytes == len(whole)
        near = [0, 1, 9, 10, 11, 14, 15, 16, 10 + 65_540, 9 + 65_540, len(whole) - 9, len(whole) - 8, len(whole) - 1]
        for first in near + [dice.randrange(len(whole)) for _ in range(200)]:
            until = dice.choice([len(whole), min(len(whole), first + 1), dice.randrange(first, len(whole) + 1)])
            assert archive.read(file, first, until) == whole[first:until], (first, until)


def test_a_long_name_fits(tmp_path: Path, parquet: Path) -> None:
    name = "t" * 128 + "__1023__123456__20260101T0000Z"
    (tmp_path / "a").write_bytes(made(parquet, name))
    unpack(tmp_path / "a", name, tmp_path / "back", bytes_max=10**6)
    assert (tmp_path / "back").read_bytes() == parquet.read_bytes()


def test_what_is_cut_off_or_changed_is_refused(tmp_path: Path, parquet: Path) -> None:
    whole = made(parquet)
    flipped = bytearray(whole)
    flipped[200_000] ^= 1
    for damaged in (whole[:-1], whole[:150_000], whole[:20], b"", b"no archive at all", bytes(flipped)):
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(Corrupt, match=SEGMENT):
            unpack(tmp_path / "a", SEGMENT, tmp_path / "back", bytes_max=10**6)


def tarred(*entries: tuple[str, bytes, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for name, kind, content in entries:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            if kind == tarfile.SYMTYPE:
                info.linkname, info.size = "/etc/passwd", 0
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(sink.getvalue())


@pytest.mark.parametrize(
    "entries",
    [
        [("../rows.parquet", tarfile.REGTYPE, b"x")],
        [(f"{SEGMENT}/../../rows.parquet", tarfile.REGTYPE, b"x")],
        [("/etc/cremant", tarfile.REGTYPE, b"x")],
        [(f"{SEGMENT}/rows.parquet", tarfile.SYMTYPE, b"")],
        [("other/rows.parquet", tarfile.REGTYPE, b"x")],
        [(f"{SEGMENT}/rows.parquet", tarfile.REGTYPE, b"x"), (f"{SEGMENT}/rows.parquet", tarfile.REGTYPE, b"y")],
        [(SEGMENT, tarfile.DIRTYPE, b"")],
        [],
    ],
)
def test_archives_of_something_else_are_refused_and_write_nowhere(
    tmp_path: Path, entries: list[tuple[str, bytes, bytes]]
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "a").write_bytes(tarred(*entries))
    with pytest.raises(Corrupt):
        unpack(tmp_path / "a", SEGMENT, inner / "back", bytes_max=10**6)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "inner"}
    assert {path.name for path in inner.iterdir()} <= {"back"}


def test_a_small_archive_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(tarred((f"{SEGMENT}/rows.parquet", tarfile.REGTYPE, b"\0" * 10_000_000)))
    with pytest.raises(Corrupt, match="more than"):
        unpack(tmp_path / "a", SEGMENT, tmp_path / "back", bytes_max=1_000_000)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_headers_are_not_taken_into_memory_whatever_size_they_have(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "a").write_bytes(tarred(("x", kind, b"\0" * 3_000_000)))
    with pytest.raises(Corrupt, match="more than"):
        unpack(tmp_path / "a", SEGMENT, tmp_path / "back", bytes_max=10**9)


def test_an_archive_of_holes_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo(f"{SEGMENT}/rows.parquet")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % 10_000_000  # its size with the holes
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 0x20)
    (tmp_path / "a").write_bytes(gzip.compress(bytes(header) + bytes(1024)))
    with pytest.raises(Corrupt, match="unexpected entry"):
        unpack(tmp_path / "a", SEGMENT, tmp_path / "back", bytes_max=1_000_000)


def test_a_disk_that_is_full_is_said_so(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "a").write_bytes(made(parquet))
    (tmp_path / "back").symlink_to("/dev/full")
    with pytest.raises(NoResource, match="cannot write"):
        unpack(tmp_path / "a", SEGMENT, tmp_path / "back", bytes_max=10**6)
    with pytest.raises(NoResource, match="cannot write"):
        unpack(tmp_path / "a", SEGMENT, tmp_path / "nowhere" / "back", bytes_max=10**6)


def test_a_file_that_is_shorter_than_its_segment_says_is_noticed(parquet: Path) -> None:
    with parquet.open("rb") as file, pytest.raises(Corrupt, match="ends at 300001"):
        Archive(SEGMENT, 400_000).tar_crc32(file)
