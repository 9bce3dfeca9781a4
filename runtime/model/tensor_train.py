# SPDX-License-Identifier: Apache-2.0
"""Which embedding tables of a run are tensor trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from sennit.runtime.kernels.spec import MAX_DIM, MAX_ROW_COUNT
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.tables import Home, Table
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

    def applied(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """The tables, of which large ones are now tensor trains. A train is one shard, and in memory."""
        return tuple(self._train(table) if self._takes(table) else table for table in tables)

    def _train(self, table: Table) -> Table:
        home = None if table.home is Home.FILE else table.home
        return replace(table, train_rank=self.rank, row_shards=1, column_shards=1, home=home)

    def _takes(self, table: Table) -> bool:
        if table.rows < self.rows_at_least or table.train_rank is not None:
            return False
        train = TensorTrainSpec.of_rank(name=table.name, row_count=table.rows, dim=table.dim, rank=self.rank)
        return train.compression > 1
