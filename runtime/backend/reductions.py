# SPDX-License-Identifier: Apache-2.0
"""Which reduction of ours one of torch's is, for the calls that torch does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import ReduceOp


def known_reduction(op: Any, allowed: Mapping[str, ReduceOp]) -> ReduceOp:
    """The reduction that `op`, one of `torch.distributed.ReduceOp`, names. Raises ArgumentError for all but these."""
    # torch has two types of them: an operation, and its name.
    name = getattr(op, "name", None)
    if not isinstance(name, str) or name not in allowed:
        shown = name if isinstance(name, str) else repr(op)
        raise ArgumentError(f"reduce op {shown}; allowed: torch.distributed.ReduceOp. {', '.join(allowed)}")
    return allowed[name]
