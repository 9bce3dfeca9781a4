# SPDX-License-Identifier: Apache-2.0
"""What a feeder says about its data. A trainer without data builds tables, a plan and an order from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from sennit.offload.errors import PlanError, SchemaError
from sennit.offload.ingest.protocol import ProtocolError, integer, text
from sennit.offload.plan import FeaturePlan, Sparse
from sennit.offload.plan_json import columns_as_json, columns_from_json
from sennit.offload.schema import Schema

SAMPLES_MAX: Final = 1 << 40
TABLE_ROWS_MAX: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    """One embedding table."""

    name: str
    rows: int
    mean_length: float
    """Mean number of ids per sample."""

    is_dynamic: bool = False
    """Ids are any 64-bit integers. `rows` is the most rows that the table may have."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Describes one data set as records. All feeders of a run must have the same."""

    name: str
    fingerprint: str
    """A hash that tells the contents of data sets apart, whatever their names."""

    sample_count: int
    numbering: Mapping[str, Any]
    """What the numbers of the run's batches depend on, besides the terms, as `runtime.ingest.numbering` writes it."""

    tables: tuple[TableFacts, ...]
    dense_names: tuple[str, ...]
    label_names: tuple[str, ...] = ("label",)
    """The first one is the label of a record. The others are numbers of the plan behind the dense features."""

    has_weights: bool = False
    """Whether the weight of a sample is the last number of the plan."""

    preprocessing: Mapping[str, Any] | None = None
    """The preprocessing of the samples before they became records, as JSON for trainers, who store it in checkpoints.

    None: the feeder did not send it, because it is longer than a line of the protocol.
    """

    plan: FeaturePlan
    """The plan: sparse columns become the tables, dense columns the dense features, in this order.
    It keeps every row.
    """

    def __post_init__(self) -> None:
        if not self.label_names:
            raise PlanError("no label; allowed: at least one")
        numbers = len(self.dense_names) + len(self.label_names) - 1 + self.has_weights
        if len(self.plan.sparse) != len(self.tables) or len(self.plan.dense) != numbers:
            raise PlanError(
                f"the plan has {len(self.plan.sparse)} tables and {len(self.plan.dense)} numbers, but "
                f"{len(self.tables)} and {numbers} are named"
            )
        if self.plan.keep:
            raise PlanError("a plan that leaves out rows; allowed: one that keeps them all, so that batches are full")

    def difference(self, other: Facts) -> str | None:
        """The first difference, as text for people; None if there is none."""
        ours, theirs = self.as_json(), other.as_json()
        for part in fields(self):
            if ours[part.name] != theirs[part.name]:
                return f"{part.name} {_short(ours[part.name])}, not {_short(theirs[part.name])}"
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "sample_count": self.sample_count,
            "numbering": self.numbering,
            "tables": [[table.name, table.rows, table.mean_length, table.is_dynamic] for table in self.tables],
            "dense_names": list(self.dense_names),
            "label_names": list(self.label_names),
            "has_weights": self.has_weights,
            "preprocessing": self.preprocessing,
            "plan": {
                "schema": self.plan.schema.as_json(),
                "columns": columns_as_json(self.plan.columns),
                "dense": list(self.plan.dense),
                "sparse": [table.column for table in self.plan.sparse],
            },
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Raises ProtocolError that says what is wrong with facts from outside."""
        try:
            tables = tuple(
                TableFacts(
                    name=text(f"facts: name of table {number}", name),
                    rows=integer(f"facts: rows of table {number}", rows, 1, TABLE_ROWS_MAX),
                    mean_length=_number(f"mean length of table {number}", mean_length),
                    is_dynamic=_boolean(f"whether table {number} is dynamic", is_dynamic),
                )
                for number, (name, rows, mean_length, is_dynamic) in enumerate(content["tables"])
            )
            plan, preprocessing = content["plan"], content["preprocessing"]
            if preprocessing is not None and not isinstance(preprocessing, dict):
                raise ProtocolError(f"facts: preprocessing {_short(preprocessing)}; allowed: an object or null")
            if not isinstance(content["numbering"], dict):
                raise ProtocolError(f"facts: numbering {_short(content['numbering'])}; allowed: an object")
            return cls(
                name=text("facts: name", content["name"]),
                fingerprint=text("facts: fingerprint", content["fingerprint"]),
                sample_count=integer("facts: sample_count", content["sample_count"], 1, SAMPLES_MAX),
                numbering=content["numbering"],
                tables=tables,
                dense_names=tuple(text("facts: dense name", name) for name in content["dense_names"]),
                label_names=tuple(text("facts: label name", name) for name in content["label_names"]),
                has_weights=_boolean("whether samples have weights", content["has_weights"]),
                preprocessing=preprocessing,
                plan=FeaturePlan(
                    schema=Schema.from_json(plan["schema"]),
                    columns=columns_from_json(plan["columns"]),
                    dense=tuple(text("facts: dense column", name) for name in plan["dense"]),
                    sparse=tuple(
                        Sparse(column=text("facts: sparse column", name), rows=None if table.is_dynamic else table.rows)
                        for name, table in zip(plan["sparse"], tables, strict=True)
                    ),
                ),
            )
        except ProtocolError:
            raise
        except (PlanError, SchemaError) as error:
            raise ProtocolError(f"facts: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError(f"facts: not those of a data set: {error!r}") from None


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ProtocolError(f"facts: {name} {_short(value)}; allowed: finite numbers from 0")
    return float(value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"facts: {name} {_short(value)}; allowed: true, false")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
