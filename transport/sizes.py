# SPDX-License-Identifier: Apache-2.0
"""Byte counts as people write them: '64 KiB'."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Returns the bytes of '4096', '64KiB' or '16 MiB'."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        raise ValueError(f"size {text!r}: expected a number with one of {', '.join(unit for unit in UNITS if unit)}")
    return int(match[1]) * UNITS[match[2]]


def format_size(size_bytes: int) -> str:
    """Returns the shortest exact form: '64 KiB', '4100 B'."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % UNITS[unit] == 0:
            return f"{size_bytes // UNITS[unit]} {unit}"
    return f"{size_bytes} B"
