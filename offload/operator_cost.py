# SPDX-License-Identifier: Apache-2.0
"""Estimates what an operator costs on the CPU. The error for a plan that cannot be offloaded quotes it."""

from __future__ import annotations

from typing import Final

from sennit.offload.columns import ColumnType, IdsType
from sennit.offload.operators import (
    Cross,
    MapId,
    NGram,
    Operator,
    SigridHash,
    TableOperator,
)

# Nanoseconds per value in the native core, on the machine of docs/performance.md. Only the order of magnitude counts:
# tables that miss the caches cost several times that.
NS_PER_VALUE: Final[dict[type[Operator], float]] = {
    SigridHash: 5.0,
    MapId: 4.0,
    NGram: 5.0,
    Cross: 5.0,
    TableOperator: 2.0,
}
OTHER_NS_PER_VALUE: Final = 2.0


def cpu_ns_per_record(operator: Operator, result: ColumnType) -> float:
    """The cost in nanoseconds of the longest possible row."""
    values = result.length if isinstance(result, IdsType) else 1
    for kind, ns in NS_PER_VALUE.items():
        if isinstance(operator, kind):
            return ns * values
    return OTHER_NS_PER_VALUE * values
