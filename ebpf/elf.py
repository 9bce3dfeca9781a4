# SPDX-License-Identifier: Apache-2.0
"""Reads sections and symbols of an object file."""

from __future__ import annotations

import io
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from sennit.errors import FormatError


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
    """A symbol in a section."""

    section: str
    offset: int
    size_bytes: int


class ElfError(FormatError):
    """The file is not an object file."""


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
                # Symbols without a section have a special section index.
                if symbol.name and isinstance(symbol["st_shndx"], int):
                    self.symbols[symbol.name] = Symbol(
                        section=found[symbol["st_shndx"]].name, offset=symbol["st_value"], size_bytes=symbol["st_size"]
                    )
