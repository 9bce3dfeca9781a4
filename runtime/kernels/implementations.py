# SPDX-License-Identifier: Apache-2.0
"""The interfaces of an implementation: the operator, and products for tensor trains. The list of implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor

from sennit.runtime.kernels import reference, reference_products
from sennit.runtime.kernels.batch import Batch, RowSums
from sennit.runtime.kernels.checks import BadGradients
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.native import NativeOperator
from sennit.runtime.kernels.optimizers import Optimizer, StepConstants
from sennit.runtime.kernels.reference_products import Runs
from sennit.runtime.kernels.spec import Rounding
from sennit.transport.errors import ConfigError, Unsupported


class Implementation(Protocol):
    """An implementation of the operator: the functions of `reference`, with the same bits.

    Batches have been checked: ids are in range or `checks.IGNORED`, gradients have the shape of the result.
    """

    @property
    def device_type(self) -> str:
        """The type of device whose memory it can use."""

    def lookup(self, tables: Sequence[ShardMemory], batch: Batch) -> Tensor: ...

    def weight_gradient(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> Tensor: ...

    def update(
        self,
        tables: Sequence[ShardMemory],
        batch: Batch,
        gradient: Tensor,
        *,
        kind: Optimizer,
        constants: StepConstants,
        rounding: Rounding,
        seed: int,
    ) -> list[BadGradients]: ...

    def sum_rows(self, tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> list[RowSums]: ...


IMPLEMENTATIONS: Final = ("reference", "native", "native-avx2", "native-portable", "triton")
"""Names that `EmbeddingEngine` accepts. Two are for tests: the native implementation with fewer instructions."""

MAX_THREADS: Final = 256


def implementation(name: str, *, threads: int = 1) -> Implementation:
    """The implementation called `name`. Raises `ConfigError`, or `Unsupported` if this machine cannot run it.

    Only native implementations use several threads.
    """
    most = MAX_THREADS if name.startswith("native") else 1
    if not 1 <= threads <= most:
        raise ConfigError(f"{threads} threads for implementation {name}; allowed: 1 to {most}")
    match name:
        case "reference":
            return reference
        case "native":
            return NativeOperator(threads=threads)
        case "native-avx2" | "native-portable":
            return NativeOperator(name.removeprefix("native-"), threads=threads)
        case "triton":
            try:
                from sennit.runtime.kernels.triton_operator import TritonOperator
            except ModuleNotFoundError as error:
                raise Unsupported("implementation triton", str(error)) from error
            return TritonOperator()
    raise ConfigError(f"implementation {name!r}; allowed: {', '.join(IMPLEMENTATIONS)}")


class Products(Protocol):
    """Folds of products for tensor-train tables: the functions of `reference_products`, with the same bits."""

    def runs_of(self, keys: Tensor, key_count: int) -> Runs: ...

    def fold_products(
        self,
        left: Tensor,
        left_rows: Tensor,
        right: Tensor,
        right_rows: Tensor,
        starts: Tensor | None,
        *,
        into: Tensor | None = None,
    ) -> Tensor: ...


def products(implementation_name: str) -> Products:
    """The products of an implementation. `engine.implementation` has checked that it can run here."""
    if implementation_name == "triton":
        from sennit.runtime.kernels import triton_products

        return triton_products
    if implementation_name == "reference":
        return reference_products
    from sennit.runtime.kernels.native_products import NativeProducts

    return NativeProducts(implementation_name.removeprefix("native").removeprefix("-") or None)
