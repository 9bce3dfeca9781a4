# SPDX-License-Identifier: Apache-2.0
"""Where tracers find the tracepoints of ingest (docs/reference/tracepoints.md)."""

from __future__ import annotations

from pathlib import Path

from sennit.offload import _native


def library() -> Path:
    """The file with the tracepoints, which every process that sends or takes records has mapped."""
    return Path(_native.__file__)
