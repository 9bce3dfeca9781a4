# SPDX-License-Identifier: Apache-2.0
"""The parameters that stand for tables in a module: torch's tools find, freeze and count them as any others.

Each has one element, 0, and its gradient is 0, so DDP, FSDP2, clipping and optimizers of the program may take it.
(FSDP2 takes no parameter without elements.) A table itself is updated in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import finds_unused, own_parameters, runs_ddp
from sennit.runtime.sharded.sent import Pending


class TableParameters(nn.Module):
    """A parameter for each table, by its name. A state has the tables' shards in place of them."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in zip(names, parameters, strict=True):
            # Some names have a meaning for modules, and torch's own method refuses dots.
            own_parameters(self)[f"{name}_" if hasattr(self, name) else name] = parameter
        self._given = tuple(parameters)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return

    def used(self, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The results of a lookup. Inside a DDP, or FSDP2, they are functions of all parameters.

        Both take gradients from autograd alone, and DDP waits for them. (Else `leave_gradients` costs less.)
        A backward pass comes to the parameters before the lookup, so that AllReduce need not wait for its exchanges.
        Waits for results where a DDP looks for tensors in its own.
        """
        has_fsdp = next(self.parameters()) is not self._given[0]
        if not has_fsdp and not runs_ddp():
            return results
        if isinstance(results, Pending) and not finds_unused():
            return Pending(lambda: self._used(results.wait()))
        return self._used(results)

    def _used(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # FSDP2 has taken the parameters if they are DTensors, and waits for none.
        is_sharded = any(hasattr(one, "placements") for one in self.parameters())
        if is_sharded or not any(one.requires_grad for one in results.values()):
            return dict(results)
        # Whoever waits for results first may do so to look at them alone.
        with torch.inference_mode(False), torch.enable_grad():
            found = _Used.apply(len(results), *results.values(), *self.parameters())  # type: ignore[no-untyped-call]
        return dict(zip(results, found, strict=True))


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: `count` results, then parameters."""
        context.set_materialize_grads(False)
        context.others = len(tensors) - count, tensors[-1].device
        # The same memory as tensors that are no views: programs may write to results.
        return tuple(one.detach() for one in tensors[:count])

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count, device = context.others
        return None, *gradients, *torch.zeros(count, 1, device=device).unbind()
