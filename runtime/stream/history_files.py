# SPDX-License-Identifier: Apache-2.0
"""Events in user-major order as files of one folder: an array a file, mapped, and what tells them from others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sennit.runtime.data.packages import require
from sennit.runtime.stream.user_order import Arrays, UserOrder

VERSION: Final = 1
"""Incremented when the same stream gives other files."""

_ABOUT: Final = "about.json"
_PURPOSE: Final = "histories"


@dataclass(frozen=True)
class HistoryFiles:
    """The files of one stream's histories. `key` says which stream, and which columns."""

    key: str
    arrays: Arrays

    def made(self, folder: Path) -> UserOrder:
        """Files of the right size, still to be filled. Raises OSError if the disk is full."""
        found = {}
        for name, dtype in self.arrays.dtypes.items():
            with _array(folder, name).open("wb") as file:
                header = np.lib.format.header_data_from_array_1_0(np.empty(0, dtype)) | {"shape": (self.arrays.rows,)}
                np.lib.format.write_array_header_1_0(file, header)
                file.flush()
                # A full disk ends a process that writes to a map of a file which has holes.
                os.posix_fallocate(file.fileno(), 0, file.tell() + self.arrays.rows * dtype.itemsize)
            found[name] = np.load(_array(folder, name), mmap_mode="r+")
        return self.arrays.order(found)

    def finish(self, folder: Path, order: UserOrder, values: Mapping[str, Any]) -> None:
        """Writes the rest, and all of it to the disk. `values`: for columns of codes, what these stand for."""
        arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
        for array in order.arrays.values():
            array.flush()  # type: ignore[attr-defined]
        for number, known in enumerate(values.values()):
            with arrow.OSFile(str(_values(folder, number)), "wb") as sink:
                table = arrow.table({"values": known})
                with arrow.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
        about = self._about | {"values": list(values), "sizes": _sizes(folder)}
        (folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    def wrong(self, folder: Path) -> str:
        """What is wrong with the files; empty if nothing is."""
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            for name, wanted in self._about.items():
                if about[name] != wanted:
                    return f"{name} is {about[name]!r}; allowed: {wanted!r}"
            for name, size in about["sizes"].items():
                if (found := (folder / name).stat().st_size) != size:
                    return f"{name} has {found} bytes; allowed: {size}"
            self.read(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"not what a run wrote: {error!r}"
        return ""

    def read(self, folder: Path) -> tuple[UserOrder, dict[str, Any]]:
        """What was written, and what codes stand for. Raises ValueError and OSError for files that are not these."""
        arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
        found = {}
        for name, dtype in self.arrays.dtypes.items():
            array = np.load(_array(folder, name), mmap_mode="r")
            if (array.dtype, array.shape) != (dtype, (self.arrays.rows,)):
                raise ValueError(f"{name} is {array.dtype} {array.shape}; allowed: {dtype} ({self.arrays.rows},)")
            found[name] = array
        values = {}
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        for number, name in enumerate(about["values"]):
            with arrow.memory_map(str(_values(folder, number))) as source:
                values[name] = arrow.ipc.open_file(source).read_all()["values"].combine_chunks()
        return self.arrays.order(found), values

    @property
    def _about(self) -> dict[str, Any]:
        return {
            "format": "sennit histories",
            "version": VERSION,
            "key": self.key,
            "rows": self.arrays.rows,
            "columns": [[name, str(dtype)] for name, dtype in self.arrays.columns.items()],
        }


def _array(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.npy"


def _values(folder: Path, number: int) -> Path:
    return folder / f"values-{number}.arrow"


def _sizes(folder: Path) -> dict[str, int]:
    # Files of parts, which are hidden, are gone by now.
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
