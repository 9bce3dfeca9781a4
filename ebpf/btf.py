# SPDX-License-Identifier: Apache-2.0
"""Types of an object file as NumPy dtypes, read from its BTF (Linux, Documentation/bpf/btf.rst).

A C struct's layout is therefore written once: Python sees what clang laid out. (libbpf's `btf__*` was tried: the types
behind its pointers have to be declared all the same, in as many lines, and a mistake is a crash.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sennit.ebpf.elf import Elf
from sennit.errors import FormatError

_MAGIC: Final = 0xEB9F
_HEADER: Final = struct.Struct("<HBBIIIII")
_TYPE: Final = struct.Struct("<III")
_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _FWD, _TYPEDEF = range(1, 9)
_VOLATILE, _CONST, _RESTRICT, _FUNC, _FUNC_PROTO, _VAR, _DATASEC, _FLOAT, _DECL_TAG, _TYPE_TAG, _ENUM64 = range(9, 20)
_TRANSPARENT: Final = (_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG)
# Bytes that follow a type of this kind, for each of its members.
_MEMBER_BYTES: Final = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _FUNC_PROTO: 8, _DATASEC: 12, _ENUM64: 12}
_TRAILER_BYTES: Final = {_INT: 4, _ARRAY: 12, _VAR: 4, _DECL_TAG: 4}
_INT_SIGNED: Final = 1
_POINTER_BYTES: Final = 8


class BtfError(FormatError):
    """The object has no such type, or the type has no dtype."""


@dataclass(frozen=True, slots=True)
class _Type:
    kind: int
    name: str
    members: int
    size_or_type: int
    is_bit_field: bool
    at: int
    """The offset of the next type."""


class Btf:
    """The types of one object file."""

    def __init__(self, elf: Elf) -> None:
        section = elf.sections.get(".BTF")
        if section is None:
            raise BtfError("the object has no BTF; compile it with -g")
        magic, _, _, header_bytes, type_offset, type_bytes, text_offset, _ = _HEADER.unpack_from(section)
        if magic != _MAGIC:
            raise BtfError(f"BTF begins with {magic:#x}; must be {_MAGIC:#x}")
        self._data = section
        self._text = header_bytes + text_offset
        # Type 0 is void.
        self._types = [_Type(0, "void", 0, 0, False, 0)]
        at, end = header_bytes + type_offset, header_bytes + type_offset + type_bytes
        while at < end:
            name, info, size_or_type = _TYPE.unpack_from(section, at)
            kind, members = info >> 24 & 0x1F, info & 0xFFFF
            at += _TYPE.size
            self._types.append(_Type(kind, self._string(name), members, size_or_type, bool(info >> 31), at))
            at += _MEMBER_BYTES.get(kind, 0) * members + _TRAILER_BYTES.get(kind, 0)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of the struct, union or typedef `name`."""
        for number, found in enumerate(self._types):
            if found.name == name and found.kind in (_STRUCT, _UNION, _TYPEDEF, _ENUM, _ENUM64):
                return self._dtype(number)
        raise BtfError(f"the object's BTF has no type {name!r}")

    def map_value_dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of a map's values, from __type(value, ...) in its SEC(".maps") definition."""
        for found in self._types:
            if found.kind == _VAR and found.name == name:
                definition = self._types[self._resolve(found.size_or_type)]
                for member, number, _ in self._members(definition):
                    if member == "value":
                        return self._dtype(self._types[self._resolve(number)].size_or_type)
                raise BtfError(f"map {name!r} does not say __type(value, ...)")
        raise BtfError(f"the object's BTF has no map {name!r}")

    def variable_dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of the global variable `name`."""
        for found in self._types:
            if found.kind == _VAR and found.name == name:
                return self._dtype(found.size_or_type)
        raise BtfError(f"the object's BTF has no variable {name!r}")

    def _string(self, offset: int) -> str:
        start = self._text + offset
        return self._data[start : self._data.index(b"\0", start)].decode()

    def _resolve(self, number: int) -> int:
        """Resolves typedefs and qualifiers."""
        while self._types[number].kind in _TRANSPARENT:
            number = self._types[number].size_or_type
        return number

    def _members(self, of: _Type) -> list[tuple[str, int, int]]:
        """Name, type and offset in bytes of each member of a struct or union."""
        found = []
        for n in range(of.members):
            name, number, offset_bits = struct.unpack_from("<III", self._data, of.at + 12 * n)
            if of.is_bit_field and offset_bits >> 24:
                raise BtfError(f"{of.name}.{self._string(name)} is a bit field, which NumPy has not")
            found.append((self._string(name), number, (offset_bits & 0xFFFFFF) // 8))
        return found

    def _dtype(self, number: int) -> np.dtype[Any]:
        number = self._resolve(number)
        found = self._types[number]
        if found.kind == _INT:
            encoding = struct.unpack_from("<I", self._data, found.at)[0] >> 24 & 0xF
            return np.dtype(f"<{'i' if encoding & _INT_SIGNED else 'u'}{found.size_or_type}")
        if found.kind in (_ENUM, _ENUM64):
            return np.dtype(f"<u{found.size_or_type}")
        if found.kind == _PTR:
            return np.dtype(f"<u{_POINTER_BYTES}")
        if found.kind == _ARRAY:
            element, _, count = struct.unpack_from("<III", self._data, found.at)
            return np.dtype((self._dtype(element), (count,)))
        if found.kind in (_STRUCT, _UNION):
            members = self._members(found)
            return np.dtype(
                {
                    "names": [name for name, _, _ in members],
                    "formats": [self._dtype(member) for _, member, _ in members],
                    "offsets": [offset for _, _, offset in members],
                    "itemsize": found.size_or_type,
                }
            )
        raise BtfError(f"type {found.name or number!r} of BTF kind {found.kind} has no NumPy dtype")
