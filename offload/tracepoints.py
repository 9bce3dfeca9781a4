# SPDX-License-Identifier: Apache-2.0
"""Finds the ingest tracepoints for tracers (docs/reference/tracepoints.md)."""

from __future__ import annotations

from pathlib import Path

from sennit.offload import _native


def library() -> Path:
    """The file that contains the tracepoints. Every process that sends or receives records maps it."""
    return Path(_native.__file__)


def is_library(file: Path) -> bool:
    """Whether a file of this name, of any installation, has these tracepoints."""
    return file.parent.name == "offload" and file.name.startswith("_native.") and file.suffix == ".so"
