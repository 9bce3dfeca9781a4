# SPDX-License-Identifier: Apache-2.0
"""Lines of text as columns of Arrow, as long as they are plain: the fast way for what most lines are.

Plain lines have no quotes, and numbers and times as programs write them: `-1.5`, `1e9`, `2026-11-28 06:30:00`. They
become what `pyarrow.csv` makes of them, bit by bit. Of all others there is no result, and pyarrow has to read them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sennit.offload._native import LineParser

__all__ = ["LineParser", "line_parser"]

_FORMATS: Final = {
    **{f"int{bits}": sign for bits, sign in ((8, "c"), (16, "s"), (32, "i"), (64, "l"))},
    **{f"uint{bits}": sign for bits, sign in ((8, "C"), (16, "S"), (32, "I"), (64, "L"))},
    **{f"timestamp[{unit}]": f"ts{unit[0]}:" for unit in ("s", "ms", "us")},
    "date32[day]": "tdD",
    "double": "g",
    "string": "u",
}
"""How the Arrow C data interface writes a type (https://arrow.apache.org/docs/format/CDataInterface.html)."""


@lru_cache(maxsize=64)
def line_parser(
    delimiter: str, nulls: tuple[str, ...], names: tuple[str, ...], columns: tuple[tuple[str, str], ...]
) -> LineParser | None:
    """A parser for lines with the values `names`, of which `columns` are wanted: names, and types as pyarrow prints
    them. None if it lacks a type.

    `nulls`: what stands for null, in columns of every type. Its `parse(text, line_count)` returns an object with
    `__arrow_c_array__`, or None unless the text is so many plain lines. Text is taken for UTF-8 without a check.
    """
    if not delimiter.isascii() or any(kind not in _FORMATS for _, kind in columns):
        return None
    places = {name: place for place, name in enumerate(names)}
    wanted = [(places[name], _FORMATS[kind]) for name, kind in columns]
    return LineParser(delimiter=delimiter, nulls=list(nulls), names=list(names), columns=wanted)
