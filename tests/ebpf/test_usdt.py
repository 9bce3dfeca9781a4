# SPDX-License-Identifier: Apache-2.0
"""A file that a stranger's process has mapped may say anything of its tracepoints. It is read, or refused."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

pytest.importorskip("elftools", reason="pyelftools is not installed")
pytest.importorskip("sennit.offload._native", reason="the native receiver is not built")

from elftools.elf.elffile import ELFFile

from sennit.ebpf import usdt
from sennit.offload import tracepoints
from tests import extent

pytestmark = pytest.mark.needs("tracepoints")
SECTION_HEADER_BYTES = 64
SIZE_AT = 32  # of sh_size in a section header
DESCRIPTION_SIZE_AT = 4  # in a note


@dataclass(frozen=True)
class Copy:
    """A copy of a library, which is changed in place."""

    path: Path
    file: BinaryIO
    notes_at: int
    notes_bytes: int
    headers_at: int
    headers_bytes: int
    notes_header_at: int

    @contextlib.contextmanager
    def changed(self, *changes: tuple[int, bytes]) -> Iterator[None]:
        """Within the block these bytes stand at these places."""
        before = []
        for at, new in changes:
            self.file.seek(at)
            before.append((at, self.file.read(len(new))))
            self._put(at, new)
        try:
            yield
        finally:
            for at, old in reversed(before):
                self._put(at, old)

    def _put(self, at: int, new: bytes) -> None:
        self.file.seek(at)
        self.file.write(new)
        self.file.flush()


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    path = tmp_path / "stranger.so"
    shutil.copyfile(tracepoints.library(), path)
    with path.open("rb") as file:
        elf = ELFFile(file)
        names = [section.name for section in elf.iter_sections()]
        number = names.index(usdt.SECTION)
        section, headers_at = elf.get_section(number), elf.header["e_shoff"]
    with path.open("r+b") as file:
        yield Copy(
            path=path,
            file=file,
            notes_at=section["sh_offset"],
            notes_bytes=section["sh_size"],
            headers_at=headers_at,
            headers_bytes=len(names) * SECTION_HEADER_BYTES,
            notes_header_at=headers_at + number * SECTION_HEADER_BYTES,
        )


def told(path: Path) -> str:
    """What is said of the file; empty if it is read."""
    try:
        usdt.read(path)
    except ValueError as error:
        return str(error)
    return ""


def test_notes_that_end_anywhere_are_read_or_refused(copy: Copy) -> None:
    whole = usdt.read(copy.path)
    refused = 0
    for size in range(0, copy.notes_bytes, 1 if extent.is_long else 11):
        with copy.changed((copy.notes_header_at + SIZE_AT, struct.pack("<Q", size))):
            refused += bool(told(copy.path))
        with copy.changed((copy.notes_at + DESCRIPTION_SIZE_AT, struct.pack("<I", size))):
            refused += bool(told(copy.path))
    assert refused > 10
    assert usdt.read(copy.path) == whole


def test_changed_bytes_are_read_or_refused(copy: Copy, seed: int) -> None:
    chance = random.Random(seed)
    zones = [(0, 64), (copy.notes_at, copy.notes_bytes), (copy.headers_at, copy.headers_bytes)]
    refused = 0
    for _ in range(extent.number(200)):
        begin, size = chance.choice(zones)
        changes = [
            (begin + chance.randrange(size), bytes([chance.choice([0, 1, 4, 255, chance.randrange(256)])]))
            for _ in range(chance.randint(1, 3))
        ]
        with copy.changed(*changes):
            refused += bool(told(copy.path))
    assert refused > 10


@pytest.mark.parametrize("what", ["a description of 4 GiB", "65,280 sections"])
def test_sizes_are_not_believed(copy: Copy, what: str) -> None:
    # The second one is e_shnum of the file's header. Sections beyond the end of the file are there, as zeros.
    at, number = (
        (copy.notes_at, struct.pack("<II", 8, 0xFFFFFFF0)) if "GiB" in what else (60, struct.pack("<H", 65_280))
    )
    os.truncate(copy.path, copy.path.stat().st_size + 65_280 * SECTION_HEADER_BYTES)
    with copy.changed((at, number)):
        assert told(copy.path) == f"{copy.path}: its headers and notes have more than 256 KiB"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert told(tmp_path / "pipe").endswith("no ordinary file")
    (tmp_path / "text").write_text("no library\n")
    assert told(tmp_path / "text") == f"{tmp_path / 'text'}: Magic number does not match"
    with pytest.raises(FileNotFoundError):
        usdt.read(tmp_path / "none")
