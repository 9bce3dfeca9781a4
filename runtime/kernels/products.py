# SPDX-License-Identifier: Apache-2.0
"""Folds of products for tensor-train tables, in the engine's implementation."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sennit.runtime.kernels import reference_products
from sennit.runtime.kernels.reference_products import Runs


class Products(Protocol):
    """The functions of `reference_products`, with the same bits."""

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
