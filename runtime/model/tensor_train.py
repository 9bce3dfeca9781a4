# SPDX-License-Identifier: Apache-2.0
"""Which embedding tables of a run are tensor trains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.kernels.spec import MAX_DIM, MAX_ROW_COUNT, TableSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.transport.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTrainRule:
    """Tables with many rows become tensor trains if that makes them smaller."""

    rows_at_least: int
    rank: int

    def __post_init__(self) -> None:
        for name, value, high in (
            ("rows of a tensor train", self.rows_at_least, MAX_ROW_COUNT),
            ("rank of a tensor train", self.rank, MAX_DIM),
        ):
            if not 1 <= value <= high:
                raise ConfigError(f"{name} {value}; allowed: 1 to {high}")

    def __str__(self) -> str:
        return f"{self.rows_at_least}:{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "ROWS_AT_LEAST:RANK"."""
        found = re.fullmatch(r"(\d{1,10}):(\d{1,5})", text)
        if found is None:
            raise ConfigError(f"tensor train {text!r}; allowed: ROWS_AT_LEAST:RANK, like 100000:16")
        return cls(rows_at_least=int(found[1]), rank=int(found[2]))


def table_spec(table: TableFacts, *, dim: int, rule: TensorTrainRule | None) -> TableSpec:
    """The engine's spec of `table`, in float32."""
    if rule is not None and table.row_count >= rule.rows_at_least:
        train = TensorTrainSpec.of_rank(name=table.name, row_count=table.row_count, dim=dim, rank=rule.rank)
        if train.compression > 1:
            return train
    return TableSpec(name=table.name, row_count=table.row_count, dim=dim)


def parts(spec: TableSpec) -> tuple[TableSpec, ...]:
    """The tables that store `spec`: its cores, or itself."""
    return spec.cores if isinstance(spec, TensorTrainSpec) else (spec,)
