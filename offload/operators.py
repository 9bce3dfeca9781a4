# SPDX-License-Identifier: Apache-2.0
"""The operators of a plan: their inputs, their parameters and the type of their result.

Names and results are those of TorchArrow (`torcharrow.functional`) where it has the operator.
docs/reference/feature-plans.md has the definitions, and `reference` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sennit.offload.columns import INT64_MAX, INT64_MIN, ColumnType, DenseType, IdsType
from sennit.offload.errors import PlanError

BORDERS_MAX: Final = 4096
MAP_MAX_ENTRIES: Final = 1 << 20
TABLE_BITS: Final = range(10, 25)
NGRAM_MAX: Final = 16
# The most ids that one row of a column may have.
COLUMN_MAX_LENGTH: Final = 4096
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Computes one column from one or two others."""

    @property
    def inputs(self) -> tuple[str, ...]:
        raise NotImplementedError

    def infer(self, *types: ColumnType) -> ColumnType:
        """The result's type. Raises PlanError if an input has the wrong type or a size overflows."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseOperator(Operator):
    """An operator on a dense column."""

    column: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.column,)

    def infer(self, *types: ColumnType) -> ColumnType:
        if not isinstance(types[0], DenseType):
            raise PlanError(f"{type(self).__name__} takes a dense column, but {self.column!r} holds ids")
        return self._result()

    def _result(self) -> ColumnType:
        return DenseType()


@dataclass(frozen=True, kw_only=True, slots=True)
class IdsOperator(Operator):
    """An operator on a column of ids."""

    column: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.column,)

    def infer(self, *types: ColumnType) -> ColumnType:
        return self._result(_ids(self, self.column, types[0]))

    def _result(self, ids: IdsType) -> IdsType:
        raise NotImplementedError


def _ids(operator: Operator, column: str, found: ColumnType) -> IdsType:
    if not isinstance(found, IdsType):
        raise PlanError(f"{type(operator).__name__} takes ids, but {column!r} is dense (Bucketize makes ids of it)")
    return found


def _check_int64(operator: Operator, **values: int) -> None:
    for name, value in values.items():
        if not INT64_MIN <= value <= INT64_MAX:
            raise PlanError(f"{type(operator).__name__}: {name} {value} overflows 64 bits")


def _check_float32(operator: object, **values: float) -> None:
    """Parameters are rounded to float32 where they are used."""
    for name, value in values.items():
        if math.isnan(value) or (math.isfinite(value) and abs(value) > _FLOAT32_MAX):
            raise PlanError(f"{type(operator).__name__}: {name} {value!r} is not in the range of float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clamp(DenseOperator):
    """std::clamp(x, low, high). NaN stays NaN."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_float32(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise PlanError(f"Clamp: low {self.low} is above high {self.high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOperator(DenseOperator):
    """A function by table lookup: x is rounded to its upper `bits` bits, computed in float64, rounded to float32.

    All targets read the same table, so their results are equal, and BPF needs no floating point.
    """

    bits: int = 16

    def __post_init__(self) -> None:
        if self.bits not in TABLE_BITS:
            raise PlanError(
                f"{type(self).__name__}: bits {self.bits}; allowed: {TABLE_BITS.start} to {TABLE_BITS.stop - 1}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Log1p(TableOperator):
    """log(1 + x). NaN below -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logit(TableOperator):
    """log(p / (1 - p)) of p = clamp(x, eps, 1 - eps)."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        TableOperator.__post_init__(self)
        if not 0.0 < self.eps < 0.5:
            raise PlanError(f"Logit: eps {self.eps}; allowed: above 0 and below 0.5")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxCox(TableOperator):
    """(x^power - 1) / power, and log(x) for power 0. NaN unless x > 0."""

    power: float

    def __post_init__(self) -> None:
        TableOperator.__post_init__(self)
        if not math.isfinite(self.power):
            raise PlanError(f"BoxCox: power {self.power}; allowed: finite numbers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucketize(DenseOperator):
    """The number of borders below x. NaN gives len(borders)."""

    borders: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.borders) <= BORDERS_MAX:
            raise PlanError(f"Bucketize: {len(self.borders)} borders; allowed: 1 to {BORDERS_MAX}")
        _check_float32(self, **{f"border {n}": border for n, border in enumerate(self.borders)})
        if any(left > right for left, right in zip(self.borders, self.borders[1:], strict=False)):
            raise PlanError("Bucketize: the borders are not in ascending order")

    def _result(self) -> ColumnType:
        return IdsType(length=1, is_list=False, low=0, high=len(self.borders))


@dataclass(frozen=True, kw_only=True, slots=True)
class SigridHash(IdsOperator):
    """floor-mod(hash_combine(salt, twang_mix64(id)), max_value), as in folly and TorchArrow."""

    salt: int
    max_value: int

    def __post_init__(self) -> None:
        _check_int64(self, salt=self.salt, max_value=self.max_value)
        if self.max_value < 1:
            raise PlanError(f"SigridHash: max_value {self.max_value}; allowed: 1 to {INT64_MAX}")

    def _result(self, ids: IdsType) -> IdsType:
        return IdsType(length=ids.length, is_list=ids.is_list, low=0, high=self.max_value - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositiveModulus(IdsOperator):
    """The id modulo the divisor. The result is from 0 to divisor - 1, also for negative ids."""

    divisor: int

    def __post_init__(self) -> None:
        _check_int64(self, divisor=self.divisor)
        if self.divisor < 1:
            raise PlanError(f"PositiveModulus: divisor {self.divisor}; allowed: 1 to {INT64_MAX}")

    def _result(self, ids: IdsType) -> IdsType:
        return IdsType(length=ids.length, is_list=ids.is_list, low=0, high=self.divisor - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampList(IdsOperator):
    """std::clamp(id, low, high) for every id."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_int64(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise PlanError(f"ClampList: low {self.low} is above high {self.high}")

    def _result(self, ids: IdsType) -> IdsType:
        low, high = (min(max(bound, self.low), self.high) for bound in (ids.low, ids.high))
        return IdsType(length=ids.length, is_list=ids.is_list, low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class MapId(IdsOperator):
    """The dictionary's value for the id, or the default."""

    mapping: Mapping[int, int]
    default: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.mapping) <= MAP_MAX_ENTRIES:
            raise PlanError(f"MapId: {len(self.mapping)} entries; allowed: 1 to {MAP_MAX_ENTRIES}")
        bounds = (*self.mapping, *self.mapping.values(), self.default)
        _check_int64(self, least=min(bounds), greatest=max(bounds))

    def _result(self, ids: IdsType) -> IdsType:
        found = (*self.mapping.values(), self.default)
        return IdsType(length=ids.length, is_list=ids.is_list, low=min(found), high=max(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumerate(IdsOperator):
    """The position of every id in its row, from 0."""

    def _result(self, ids: IdsType) -> IdsType:
        return IdsType(length=ids.length, is_list=ids.is_list, low=0, high=ids.length - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstX(IdsOperator):
    """The first `count` ids of a row, or all ids if the row has fewer."""

    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= COLUMN_MAX_LENGTH:
            raise PlanError(f"FirstX: count {self.count}; allowed: 1 to {COLUMN_MAX_LENGTH}")

    def _result(self, ids: IdsType) -> IdsType:
        return IdsType(length=min(ids.length, self.count), is_list=ids.is_list, low=ids.low, high=ids.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class NGram(IdsOperator):
    """hash_combine(a, b, ...) of every `count` successive ids of a row. Empty for a row with fewer ids."""

    count: int

    def __post_init__(self) -> None:
        if not 2 <= self.count <= NGRAM_MAX:
            raise PlanError(f"NGram: count {self.count}; allowed: 2 to {NGRAM_MAX}")

    def _result(self, ids: IdsType) -> IdsType:
        if ids.length < self.count:
            raise PlanError(f"NGram: {self.column!r} has at most {ids.length} ids, so never {self.count} in a row")
        length = ids.length - self.count + 1
        return IdsType(length=length, is_list=ids.is_list, low=INT64_MIN, high=INT64_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cross(Operator):
    """hash_combine(a, b) for every pair of an id a of the left row and an id b of the right row; b varies fastest."""

    left: str
    right: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.left, self.right)

    def infer(self, *types: ColumnType) -> ColumnType:
        left, right = _ids(self, self.left, types[0]), _ids(self, self.right, types[1])
        length = left.length * right.length
        if length > COLUMN_MAX_LENGTH:
            raise PlanError(
                f"Cross: {left.length} × {right.length} = {length} ids a row overflow the {COLUMN_MAX_LENGTH} allowed "
                f"(FirstX shortens {self.left!r} or {self.right!r})"
            )
        return IdsType(length=length, is_list=left.is_list or right.is_list, low=INT64_MIN, high=INT64_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Keeps a row with this probability. The draw depends on batch, row and seed alone: all targets agree."""

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise PlanError(f"Sample: fraction {self.fraction}; allowed: 0 to 1")
        if not 0 <= self.seed < 1 << 64:
            raise PlanError(f"Sample: seed {self.seed}; allowed: 0 to {(1 << 64) - 1}")

    @property
    def below(self) -> int:
        """A row is kept if the upper 32 bits of its draw are below this value."""
        return round(self.fraction * (1 << 32))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRange:
    """Keeps a row if low <= x <= high for a dense column of the schema. Drops NaN."""

    column: str
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_float32(self, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLength:
    """Keeps a row if a list of the schema has `least` to `most` ids."""

    column: str
    least: int = 1
    most: int = COLUMN_MAX_LENGTH


RowFilter = Sample | KeepRange | KeepLength


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
    """What an operator costs on the CPU: an estimate for the longest possible row, in nanoseconds.

    The error for a plan that cannot be offloaded quotes it.
    """
    values = result.length if isinstance(result, IdsType) else 1
    for kind, ns in NS_PER_VALUE.items():
        if isinstance(operator, kind):
            return ns * values
    return OTHER_NS_PER_VALUE * values
