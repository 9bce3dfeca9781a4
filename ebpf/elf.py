# SPDX-License-Identifier: Apache-2.0
"""What is read from an object file: sections and symbols."""

from __future__ import annotations

import io
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
    """A named thing in a section."""

    section: str
    offset: int
    size_bytes: int


class ElfError(ValueError):
    """Not an object file."""


class Elf:
    """The sections and symbols of an object file."""

    def __init__(self, image: bytes) -> None:
        try:
            found = list(ELFFile(io.BytesIO(image)).iter_sections())
        except (ELFError, UnicodeDecodeError) as error:
            raise ElfError(f"no ELF file: {error}") from None
        self.sections: dict[str, bytes] = {section.name: section.data() for section in found}
        self.symbols: dict[str, Symbol] = {}
        for table in found:
            for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
                # What lies in no section has a word in place of the section's number.
                if symbol.name and isinstance(symbol["st_shndx"], int):
                    self.symbols[symbol.name] = Symbol(
                        section=found[symbol["st_shndx"]].name, offset=symbol["st_value"], size_bytes=symbol["st_size"]
                    )
