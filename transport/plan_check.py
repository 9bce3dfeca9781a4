# SPDX-License-Identifier: Apache-2.0
"""Checks one plan on its own. The core holds the rules (docs/reference/plans.md) and checks them when it loads a plan.

`reference.py` checks that the plans of all ranks fit together (sizes, order, overlapping writes).
"""

from __future__ import annotations

from sennit.transport.errors import ArgumentError
from sennit.transport.plans.plan import Plan


def check(plan: Plan) -> None:
    """Raises ArgumentError, naming step and rule, where `plan` breaks one."""
    from sennit.transport import _core

    touched = _core.Plan(plan.encode()).buffer_bytes
    if plan.count_count:
        return
    for buffer, (needs, has) in enumerate(zip(touched, plan.buffer_bytes, strict=True)):
        if needs > has:
            raise ArgumentError(
                f"plan {plan.name}: a step reaches byte {needs} of buffer {buffer}, which has {has} bytes"
            )
