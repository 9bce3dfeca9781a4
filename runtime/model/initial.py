# SPDX-License-Identifier: Apache-2.0
"""Initial values of tables that a settings file can ask for. Each fills rows of float32 [n, dim] from a generator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform in [-bound, bound)."""

    bound: float

    def __call__(self, rows: Tensor, generator: Generator) -> None:
        rows.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with mean 0."""

    deviation: float

    def __call__(self, rows: Tensor, generator: Generator) -> None:
        rows.normal_(0, self.deviation, generator=generator)


@dataclass(frozen=True, slots=True)
class Zeros:
    """All zero."""

    def __call__(self, rows: Tensor, generator: Generator) -> None:
        rows.zero_()
