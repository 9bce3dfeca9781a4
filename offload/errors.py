# SPDX-License-Identifier: Apache-2.0
"""Errors of schemas, plans and targets, classed by who must act."""

from __future__ import annotations

from sennit.errors import ArgumentError, SennitError


class SchemaError(ArgumentError):
    """A field of the schema is wrong. The author of the schema must act."""


class PlanError(ArgumentError):
    """The plan is wrong: an unknown column, a cycle, an overflow, a wrong type. The author of the plan must act."""


class RecordError(ArgumentError):
    """A record does not fit the schema. The feeder must act."""


class SketchError(ArgumentError):
    """A sketch cannot have this shape, table or file. The caller must act."""


class NotOffloadable(PlanError):
    """A target cannot run this operator. `str()` says which operator, why, and what it costs on the CPU."""

    def __init__(self, column: str, operator: str, reason: str, cpu_ns_per_record: float) -> None:
        super().__init__(
            f"column {column!r}: {operator} cannot run in XDP: {reason}; on the CPU it costs about "
            f"{cpu_ns_per_record:.0f} ns a record (see split)"
        )
        self.column = column
        self.reason = reason
        self.cpu_ns_per_record = cpu_ns_per_record


class TargetUnavailable(SennitError):
    """This machine or process cannot run the target. The message says what is missing and which target works."""
