# SPDX-License-Identifier: Apache-2.0
"""Finds the core's tracepoints (docs/reference/tracepoints.md), and names their numbers."""

from __future__ import annotations

import importlib.util
from enum import IntEnum
from pathlib import Path
from typing import Final

from sennit.transport.errors import Unsupported

LIBRARY: Final = "libsennit_core.so"


class PathState(IntEnum):
    """The states of a path: an argument of `path_state` (flow/paths.hpp)."""

    GOOD = 0
    SKIP = 1
    BAD = 2
    PROBING = 3


def state_name(number: int) -> str:
    """The name of a path's state; the number itself of one that this version does not know."""
    try:
        return PathState(number).name.lower()
    except ValueError:
        return f"{number}"


def library() -> Path:
    """Returns the file that contains the tracepoints. Every process that uses this installation maps it.

    Raises `Unsupported` if the native core is not built.
    """
    core = importlib.util.find_spec("sennit.transport._core")
    path = Path(core.origin).with_name(LIBRARY) if core is not None and core.origin is not None else None
    if path is None or not path.exists():
        raise Unsupported("core", f"{LIBRARY} is not built: make build")
    return path


def is_library(file: Path) -> bool:
    """Whether a file of this name, of any installation, has these tracepoints."""
    return file.name == LIBRARY
