# SPDX-License-Identifier: Apache-2.0
"""What a model of `sennit train` is made from. A user's factory gets the same (docs/reference/models.md)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """What a model gets of each sample, and the widths that were asked for. The same on all ranks.

    The model is called as `model(dense, vectors)`. `dense` is float32 [B, dense_count], `vectors` has for each table a
    float32 tensor [B, dim] by its name, and the result is a logit for each sample, [B].
    """

    dense_count: int
    """Dense features; may be 0."""

    tables: tuple[Table, ...]
    """In the order of the data's columns, whose names they have. A sample has a vector of each: its pooled rows."""

    bottom: tuple[int, ...] = ()
    """Hidden widths of the MLP on the dense features, if the model has one."""

    top: tuple[int, ...] = ()
    """Hidden widths of the MLP on everything else."""

    seed: int = 0
    """Of the run."""

    def __post_init__(self) -> None:
        if self.dense_count < 0:
            raise ConfigError(f"{self.dense_count} dense features; allowed: 0 or more")
        if not self.tables:
            raise ConfigError("a model without tables; allowed: one or more")
        for name, widths in (("bottom", self.bottom), ("top", self.top)):
            for width in widths:
                if width < 1:
                    raise ConfigError(f"width in the {name} MLP {width}; allowed: 1 or more")

    def __str__(self) -> str:
        """For people, who know their tables."""
        tables = ", ".join(f"{table.name} ({table.dim} columns)" for table in self.tables)
        return f"{self.dense_count} dense features, tables {tables}, bottom {self.bottom}, top {self.top}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(table.name for table in self.tables)

    @property
    def width(self) -> int:
        """Numbers that a model sees of a sample: dense features and the columns of all tables."""
        return self.dense_count + sum(table.dim for table in self.tables)

    def common_dim(self, model: str) -> int:
        """The dim of all tables. Raises `ConfigError` that names two which differ: `model` multiplies vectors."""
        first = self.tables[0]
        for table in self.tables:
            if table.dim != first.dim:
                raise ConfigError(
                    f"{model} multiplies the vectors of tables, but table {first.name} has dim {first.dim} and table "
                    f"{table.name} has dim {table.dim}; allowed: one dim for all tables, or the model dcnv2"
                )
        return first.dim


def in_order(vectors: dict[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    """The vectors of these tables. The order of the dictionary must not matter."""
    return [vectors[name] for name in names]
