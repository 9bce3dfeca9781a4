# SPDX-License-Identifier: Apache-2.0
"""The fields of a record: label, dense features and sparse ids. docs/reference/records.md is the specification."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sennit.offload.columns import IdsType
from sennit.offload.errors import SchemaError

WIDTHS_BYTES: Final = (1, 2, 4, 8)
# A list's length takes one byte, or two if it can exceed 255.
LIST_MAX_LENGTH: Final = 1024
FIELDS_MAX: Final = 512
# The payload that fits one packet of 3,506 bytes, the largest that native XDP takes on a veth without fragments.
RECORD_MAX_BYTES: Final = 3392


class ByteOrder(enum.StrEnum):
    """The byte order of all numbers in a record. A packet's header is always in network byte order."""

    LITTLE = "little"
    BIG = "big"


class LabelKind(enum.StrEnum):
    """The encoding of the label."""

    BINARY = "binary"  # one byte, 0 or 1
    FLOAT32 = "float32"


class DenseKind(enum.StrEnum):
    """The encoding of a dense feature on the wire. In a batch it is float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"  # the upper half of a float32


DENSE_BYTES: Final = {DenseKind.FLOAT32: 4, DenseKind.BFLOAT16: 2}
LABEL_BYTES: Final = {LabelKind.BINARY: 1, LabelKind.FLOAT32: 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """One real number per record."""

    name: str
    kind: DenseKind = DenseKind.FLOAT32


@dataclass(frozen=True, kw_only=True, slots=True)
class Ids:
    """A fixed number of ids per record, or a list with a maximum length."""

    name: str
    width_bytes: int = 4
    signed: bool = False
    """Bytes per id. Two's complement; ids of 8 bytes are always signed."""

    length: int = 1
    """The number of ids, or the maximum length of a list."""

    is_list: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numbers on the wire as NumPy types in the machine's byte order."""
        return np.dtype(f"{'i' if self.signed or self.width_bytes == 8 else 'u'}{self.width_bytes}")

    @property
    def length_bytes(self) -> int:
        """The type of a list's length on the wire."""
        return (1 if self.length < 256 else 2) if self.is_list else 0

    @property
    def type(self) -> IdsType:
        bounds = np.iinfo(self.dtype)
        return IdsType(length=self.length, is_list=self.is_list, low=int(bounds.min), high=int(bounds.max))


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The fields of a record in wire order: label, dense, fixed ids and list lengths, lists."""

    dense: tuple[Dense, ...] = ()
    ids: tuple[Ids, ...] = ()
    label: LabelKind = LabelKind.BINARY
    byte_order: ByteOrder = ByteOrder.LITTLE

    def __post_init__(self) -> None:
        names = [*(part.name for part in self.dense), *(part.name for part in self.ids)]
        if not 1 <= len(names) <= FIELDS_MAX:
            raise SchemaError(f"{len(names)} fields; allowed: 1 to {FIELDS_MAX}")
        for name in names:
            if not name.isidentifier():
                raise SchemaError(f"field {name!r}: allowed are names like those of variables")
            if names.count(name) > 1:
                raise SchemaError(f"field {name!r} is there twice")
        for field in self.ids:
            if field.width_bytes not in WIDTHS_BYTES:
                raise SchemaError(f"field {field.name!r}: width {field.width_bytes} bytes; allowed: 1, 2, 4, 8")
            if not 1 <= field.length <= LIST_MAX_LENGTH:
                raise SchemaError(f"field {field.name!r}: length {field.length}; allowed: 1 to {LIST_MAX_LENGTH}")
        if self.fixed_bytes > RECORD_MAX_BYTES:
            raise SchemaError(f"a record has at least {self.fixed_bytes} bytes; allowed: {RECORD_MAX_BYTES}")

    @property
    def lists(self) -> tuple[Ids, ...]:
        return tuple(field for field in self.ids if field.is_list)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a record without the ids of its lists."""
        size = LABEL_BYTES[self.label] + sum(DENSE_BYTES[field.kind] for field in self.dense)
        return size + sum(field.length_bytes or field.width_bytes * field.length for field in self.ids)

    @property
    def schema_id(self) -> int:
        """The first 32 bits of the SHA-256 of the schema's canonical JSON. Packets carry it."""
        canonical = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:4], "big")

    def as_json(self) -> dict[str, Any]:
        return {
            "byte_order": str(self.byte_order),
            "label": str(self.label),
            "dense": [{"name": field.name, "kind": str(field.kind)} for field in self.dense],
            "ids": [
                {
                    "name": field.name,
                    "width_bytes": field.width_bytes,
                    "signed": field.signed or field.width_bytes == 8,
                    "length": field.length,
                    "is_list": field.is_list,
                }
                for field in self.ids
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Schema:
        try:
            return cls(
                byte_order=ByteOrder(content["byte_order"]),
                label=LabelKind(content["label"]),
                dense=tuple(
                    Dense(name=_of_type(str, entry["name"]), kind=DenseKind(entry["kind"]))
                    for entry in content["dense"]
                ),
                ids=tuple(
                    Ids(**{name: _of_type(_IDS_TYPES[name], value) for name, value in entry.items()})
                    for entry in content["ids"]
                ),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"not a schema: {error!r}") from None


_IDS_TYPES: Final[dict[str, type]] = {"name": str, "width_bytes": int, "signed": bool, "length": int, "is_list": bool}


def _of_type(kind: type, value: Any) -> Any:
    """Checks JSON types strictly: `true` is not an integer."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
