# SPDX-License-Identifier: Apache-2.0
"""What an embedding table is: its name, shape and precision. And how ids and sums are treated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from sennit.transport.errors import ConfigError

MAX_ROW_COUNT: Final = (1 << 32) - 1
"""The most rows of one table in one process: the kernels sort 32-bit row numbers."""

MAX_DIM: Final = 4096


class Precision(Enum):
    """The type that weights are stored in. All arithmetic is in float32."""

    FP32 = torch.float32
    FP16 = torch.float16
    BF16 = torch.bfloat16

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.value
        return dtype


class Rounding(Enum):
    """How updated weights are stored in fp16 and bf16."""

    NEAREST = "nearest"
    """To nearest, ties to even."""

    STOCHASTIC = "stochastic"
    """Up or down with probabilities that keep the mean (docs/reference/embedding.md, rule 8)."""


class Pooling(Enum):
    """What is done with the rows of a bag."""

    SUM = "sum"
    """They are summed, weighted if the batch has weights."""

    MEAN = "mean"
    """Their sum divided by the length of the bag; zeros for an empty bag."""

    NONE = "none"
    """They are not pooled: each lookup returns its row (sequences)."""


class Bounds(Enum):
    """What is done with ids outside [0, row_count). All are counted."""

    ERROR = "error"
    """Raise, before any row is read or written."""

    WRAP = "wrap"
    """Use id mod row_count, never negative."""

    IGNORE = "ignore"
    """Add nothing (a zero row in a sequence) and update nothing. The length of a mean still counts the id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """A shard of a table, as an engine holds it. A whole table is one shard. What kernels call a table is a shard."""

    name: str
    """The global name of the shard. Weights, states and random numbers depend on it."""

    row_count: int
    """Number of rows here; ids are in [0, row_count). May be 0."""

    dim: int
    """Columns."""

    precision: Precision = Precision.FP32

    first_row: int = 0
    """The global number of the first row here, if rows are spread over processes. Random numbers depend on it."""

    stream_name: str | None = None
    """The name that random numbers depend on, if not `name`. Parts of one table share it."""

    directories: tuple[str, ...] = ()
    """The names of the states that say which row has which id, int64 [row_count, 2] each (`id_directory`). Only dynamic
    tables have some."""

    def __post_init__(self) -> None:
        for field, low, high in (
            ("row_count", 0, MAX_ROW_COUNT),
            ("dim", 1, MAX_DIM),
            ("first_row", 0, (1 << 48) - 1 - self.row_count),
        ):
            value = getattr(self, field)
            if not low <= value <= high:
                raise ConfigError(f"table {self.name}: {field} {value}; allowed: {low} to {high}")

    @property
    def stream(self) -> int:
        """The table's word in the counter of the random numbers: 32 bits, from the name alone."""
        name = self.name if self.stream_name is None else self.stream_name
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
