# SPDX-License-Identifier: Apache-2.0
"""The statically defined tracepoints (USDT) of a program or library, read from its ELF notes.

A note of the kind "stapsdt" has the provider, the name, and for each argument its width and its place at that
instruction in assembler syntax (https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation).
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

SECTION: Final = ".note.stapsdt"
BASE_SECTION: Final = ".stapsdt.base"
OWNER: Final = "stapsdt"
_ADDRESSES: Final = struct.Struct("<QQQ")
"""The addresses of the instruction, of the section that shows how the file was relocated, and of a semaphore."""
_ARGUMENT: Final = re.compile(r"(-?)(\d)@(\[[^\]]*\]|\S+)")
# Some x86 libraries have a second nop of five bytes behind the first, for a call (github.com/libbpf/usdt).
_NOP_AND_NOP5: Final = bytes.fromhex("90 0f1f440000")
_READ_MAX_BYTES: Final = 1 << 18
"""What is read of a file, with at least `_READ_LEAST_BYTES` a call: six times what the largest of ours takes."""
_READ_LEAST_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of a tracepoint."""

    size_bytes: int
    is_signed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One instruction of a tracepoint."""

    offset: int
    """Offset in the file."""

    operands: tuple[str, ...]
    """The place of each argument: a register, a constant, or memory at a register."""

    has_call_nop: bool
    """A nop of five bytes follows. Linux 6.18 replaces it by a call instead of a trap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracepoint:
    """A named tracepoint, which may have several instructions."""

    provider: str
    name: str
    arguments: tuple[Argument, ...]
    places: tuple[Place, ...]


class _Bounded(io.BufferedReader):
    """A file of which little is read: it may be a stranger's, and then its sizes are whatever the stranger wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)))
        self._left_bytes = _READ_MAX_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self._left_bytes + 1 if size is None or size < 0 else size
        self._left_bytes -= max(wanted, _READ_LEAST_BYTES)
        if self._left_bytes < 0:
            raise ValueError(f"its headers and notes have more than {_READ_MAX_BYTES >> 10} KiB")
        return super().read(wanted)


def read(path: Path) -> list[Tracepoint]:
    """The tracepoints of an ELF file, by provider and name; empty if it has none.

    Raises OSError, and ValueError if the file is not ELF, if two places of one name have different arguments, or if
    anything else in it is not as it should be: any user's process may have mapped such a file.
    """
    with _Bounded(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path}: no ordinary file")
        try:
            return _read(file)
        except Exception as error:  # the parser has many, and some are of others (struct, construct, UTF-8)
            raise ValueError(f"{path}: {error}") from None


def _read(file: _Bounded) -> list[Tracepoint]:
    found: dict[tuple[str, str], Tracepoint] = {}
    elf = ELFFile(file)
    section = elf.get_section_by_name(SECTION)
    notes = list(section.iter_notes()) if isinstance(section, NoteSection) else []
    base = elf.get_section_by_name(BASE_SECTION)
    base_address = base["sh_addr"] if base is not None else None
    for note in notes:
        if note["n_name"] != OWNER:
            continue
        new = _decoded(elf, base_address, note["n_descdata"])
        known = found.get((new.provider, new.name), new)
        if known.arguments != new.arguments:
            raise ValueError(f"{new.name!r} has {known.arguments} and {new.arguments}")
        places = (*known.places, *new.places) if known is not new else new.places
        found[new.provider, new.name] = Tracepoint(
            provider=new.provider, name=new.name, arguments=new.arguments, places=places
        )
    return [found[key] for key in sorted(found)]


def split_arguments(text: str) -> list[tuple[str, str, str]]:
    """Sign, width in bytes and operand of each argument. Memory operands of arm64 have a space: `[sp, 60]`."""
    return _ARGUMENT.findall(text)


def _decoded(elf: ELFFile, base_address: int | None, description: bytes) -> Tracepoint:
    address, noted_base, _ = _ADDRESSES.unpack_from(description)
    provider, name, arguments, *_ = description[_ADDRESSES.size :].split(b"\0")
    found = split_arguments(arguments.decode())
    offset = _file_offset(elf, address + (base_address - noted_base if base_address is not None else 0))
    elf.stream.seek(offset)
    place = Place(
        offset=offset,
        operands=tuple(operand for _, _, operand in found),
        has_call_nop=elf.stream.read(len(_NOP_AND_NOP5)) == _NOP_AND_NOP5,
    )
    return Tracepoint(
        provider=provider.decode(),
        name=name.decode(),
        arguments=tuple(Argument(size_bytes=int(size), is_signed=sign == "-") for sign, size, _ in found),
        places=(place,),
    )


def _file_offset(elf: ELFFile, address: int) -> int:
    offset = next(iter(elf.address_offsets(address)), None)
    if offset is None:
        raise ValueError(f"a tracepoint at {address:#x}, which is in no segment of the file")
    return int(offset)
