# SPDX-License-Identifier: Apache-2.0
"""Tables in tensor-train form: no row is stored; each row is a product of slices of three small cores.

Oseledets 2011; for embeddings Hrinchuk et al. 2020 (t3nsor) and Yin et al. 2021 (TT-Rec). Row i and column j have three
digits each, in the mixed bases `row_factors` and `column_factors`, and

    table[i, j] = Σ_a Σ_b  core1[i1][j1, a] · core2[i2][a, j2, b] · core3[i3][b, j3]

A slice is a row of an ordinary table, so cores use the optimizers, precisions and checkpoints of `ShardMemory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from sennit.runtime.kernels.spec import MAX_DIM, MAX_ROW_COUNT, Precision, ShardSpec
from sennit.transport.errors import ConfigError

CORES: Final = 3

SAMPLED_FROM: Final = 2.0
"""Initial weights of cores are normal, but at least this many standard deviations away from 0."""

Triple = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTrainSpec(ShardSpec):
    """A table of `row_count` rows and `dim` columns that is stored as three cores. `precision` is that of the cores.

    Rows are not spread over processes, so `first_row` is 0.
    """

    row_factors: Triple
    """n1, n2, n3: the bases of a row's digits, the last changing fastest. Their product is at least `row_count`."""

    column_factors: Triple
    """d1, d2, d3: the bases of the digits of a column. Their product is `dim`."""

    ranks: tuple[int, int]
    """r1, r2: the ranks, over which products of slices are summed."""

    @classmethod
    def of_rank(cls, *, name: str, row_count: int, dim: int, rank: int, precision: Precision = Precision.FP32) -> Self:
        """A spec with chosen factors and `rank` at both places, or less if cores with these factors cannot use it."""
        rows, columns = factor_rows(row_count), factor_columns(dim)
        _check(name, "rank", rank, 1, MAX_DIM)
        ranks = (min(rank, rows[0] * columns[0]), min(rank, rows[2] * columns[2]))
        return cls(
            name=name,
            row_count=row_count,
            dim=dim,
            precision=precision,
            row_factors=rows,
            column_factors=columns,
            ranks=ranks,
        )

    def __post_init__(self) -> None:
        ShardSpec.__post_init__(self)
        _check(self.name, "first_row of a tensor train", self.first_row, 0, 0)
        for field, factors in (("row factor", self.row_factors), ("column factor", self.column_factors)):
            if len(factors) != CORES:
                raise ConfigError(f"table {self.name}: {len(factors)} {field}s; allowed: {CORES}")
            for factor in factors:
                _check(self.name, field, factor, 1, MAX_ROW_COUNT)
        _check(self.name, "product of row factors", math.prod(self.row_factors), self.row_count, 2 * MAX_ROW_COUNT)
        _check(self.name, "product of column factors", math.prod(self.column_factors), self.dim, self.dim)
        if len(self.ranks) != CORES - 1:
            raise ConfigError(f"table {self.name}: {len(self.ranks)} ranks; allowed: {CORES - 1}")
        for rank in self.ranks:
            _check(self.name, "rank", rank, 1, MAX_DIM)
        for number, numbers in enumerate(self.slice_sizes, 1):
            _check(self.name, f"numbers in a slice of core {number} (ranks times column factor)", numbers, 1, MAX_DIM)

    @property
    def slice_sizes(self) -> Triple:
        """Parameters in a slice of each core."""
        (d1, d2, d3), (r1, r2) = self.column_factors, self.ranks
        return d1 * r1, r1 * d2 * r2, r2 * d3

    @property
    def cores(self) -> tuple[ShardSpec, ShardSpec, ShardSpec]:
        """The cores as tables.

        A row is a slice, whose parameters are ordered [rank before, column digit, rank behind].
        """
        first, second, third = (
            ShardSpec(name=f"{self.name}.core{number}", row_count=rows, dim=numbers, precision=self.precision)
            for number, (rows, numbers) in enumerate(zip(self.row_factors, self.slice_sizes, strict=True), 1)
        )
        return first, second, third

    @property
    def parameter_count(self) -> int:
        """Parameters that are stored."""
        return sum(rows * numbers for rows, numbers in zip(self.row_factors, self.slice_sizes, strict=True))

    @property
    def compression(self) -> float:
        """Parameters of the plain table divided by those that are stored. Below 1 the plain table is smaller."""
        return self.row_count * self.dim / self.parameter_count


def factor_rows(row_count: int) -> Triple:
    """Three factors as equal as possible, the largest last, whose product is `row_count` or slightly more."""
    rows = max(1, row_count)
    last = _root_up(rows, CORES)
    rest = -(-rows // last)
    middle = _root_up(rest, 2)
    return -(-rest // middle), middle, last


def factor_columns(dim: int) -> Triple:
    """Three factors of `dim`.

    The last is the least divisor from 16 on, to fill SIMD registers and GPUs; the others are most equal.
    """
    last = next(factor for factor in range(min(16, dim), dim + 1) if dim % factor == 0)
    rest = dim // last
    first = next(factor for factor in range(math.isqrt(rest), 0, -1) if rest % factor == 0)
    return first, rest // first, last


def initialise(spec: TensorTrainSpec, cores: Iterable[Tensor], deviation: float, generator: torch.Generator) -> None:
    """Fills cores so that elements of the table have mean 0 and standard deviation `deviation`.

    Elements are sums of r1·r2 products of three, so each core's elements have variance (deviation² / (r1·r2))^(1/3).
    They are drawn from TT-Rec's sampled Gaussian: a normal distribution without its middle, because products of normal
    numbers crowd around 0. Cores are filled in order, from `generator` alone.
    """
    if not 0 < deviation < math.inf:
        raise ConfigError(f"table {spec.name}: deviation {deviation}; allowed: above 0")
    beyond = 0.5 * math.erfc(SAMPLED_FROM / math.sqrt(2))
    density = math.exp(-SAMPLED_FROM * SAMPLED_FROM / 2) / math.sqrt(2 * math.pi)
    # The variance of a normal number further than c from 0: 1 + c·φ(c) / Q(c).
    variance = 1 + SAMPLED_FROM * density / beyond
    scale = (deviation * deviation / math.prod(spec.ranks)) ** (1 / 6) / math.sqrt(variance)
    for core in cores:
        # Strictly between 0 and 1: the whole tail on either side.
        place = torch.empty(core.shape, dtype=torch.float64).uniform_(2**-53, 1, generator=generator)
        is_upper = torch.rand(core.shape, dtype=torch.float64, generator=generator) < 0.5
        size = -torch.special.ndtri(place * beyond) * scale
        core.copy_(torch.where(is_upper, size, -size))


def _root_up(value: int, degree: int) -> int:
    """The least integer x with x^degree >= value."""
    root = max(1, round(math.pow(value, 1 / degree)) - 1)
    while root**degree < value:
        root += 1
    return root


def _check(table: str, what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"table {table}: {what} {value}; allowed: {low if low == high else f'{low} to {high}'}")
