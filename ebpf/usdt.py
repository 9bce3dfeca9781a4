# SPDX-License-Identifier: Apache-2.0
"""The tracepoints that a program or library has (USDT): read from its ELF notes, where every tracer finds them.

A note of the kind "stapsdt" has the provider, the name, and for each argument its width and where it is at that
instruction, in the words of the assembler (https://sourceware.org/systemtap/wiki/UserSpaceProbeImplementation).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

SECTION: Final = ".note.stapsdt"
OWNER: Final = "stapsdt"
ADDRESS_BYTES: Final = 8
ADDRESSES: Final = 3
"""Of the instruction, of a section that tells how far the file was relocated, and of a semaphore."""
_ARGUMENT: Final = re.compile(r"(-?)(\d)@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One value that a tracepoint hands over."""

    size_bytes: int
    is_signed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracepoint:
    """A name, which may stand at several instructions."""

    provider: str
    name: str
    arguments: tuple[Argument, ...]


def read(path: Path) -> list[Tracepoint]:
    """The tracepoints of an ELF file, by provider and name; empty where it has none.

    Raises ValueError if it is no ELF file, or if two places of one name disagree about its arguments.
    """
    found: dict[tuple[str, str], Tracepoint] = {}
    with path.open("rb") as file:
        try:
            section = ELFFile(file).get_section_by_name(SECTION)
            notes = list(section.iter_notes()) if isinstance(section, NoteSection) else []
        except ELFError as error:
            raise ValueError(f"{path}: {error}") from None
    for note in notes:
        if note["n_name"] != OWNER:
            continue
        tracepoint = _decoded(note["n_descdata"])
        known = found.setdefault((tracepoint.provider, tracepoint.name), tracepoint)
        if known != tracepoint:
            raise ValueError(f"{path}: {tracepoint.name} has {known.arguments} and {tracepoint.arguments}")
    return [found[key] for key in sorted(found)]


def _decoded(description: bytes) -> Tracepoint:
    provider, name, arguments, *_ = description[ADDRESSES * ADDRESS_BYTES :].split(b"\0")
    return Tracepoint(
        provider=provider.decode(),
        name=name.decode(),
        arguments=tuple(
            Argument(size_bytes=int(size), is_signed=sign == "-")
            for sign, size in _ARGUMENT.findall(arguments.decode())
        ),
    )
