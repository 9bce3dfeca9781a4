# SPDX-License-Identifier: Apache-2.0
"""The optimizer of tables, as a program has it: learning rates, steps with kept gradients, mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sennit.runtime.sharded.shards import Rates
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ArgumentError

_OF_TABLES: Final = frozenset(
    {"weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "amsgrad", "maximize"}
)
"""What groups of torch's optimizers have, and here a table's `OptimizerSpec`."""


class TableOptimizer(torch.optim.Optimizer):
    """The learning rates of tables, which torch's schedulers can set: a parameter group for each table, in their order.

    A table is frozen while the parameter of its group requires no gradient. The backward pass updates rows. `step` and
    `zero_grad` are for gradients that it has kept (`no_sync`): `step` takes a step with them, `zero_grad` forgets them.
    """

    # `GradScaler.step` then calls `step` after an overflow, too. Meanwhile `found_inf` and `grad_scale` are set.
    _step_supports_amp_scaling = True
    found_inf: Tensor
    grad_scale: Tensor

    on_step: Callable[[], None] | None = None
    on_zero_grad: Callable[[], None] | None = None
    """What `step` and `zero_grad` call."""

    _scaler: torch.amp.GradScaler | None = None
    _has_left_gradients = False

    def __init__(self, tables: Sequence[Table], *, lr: float, device: torch.device) -> None:
        """`lr`: of tables that have none of their own. `device`: of the parameters, as a DDP takes one kind alone."""
        self.parameters = [nn.Parameter(torch.zeros(1, device=device)) for _ in tables]
        """What stands for each table (`TableParameters`)."""

        groups = [
            {"params": [parameter], "table": table.name, "lr": lr if table.lr is None else table.lr}
            for table, parameter in zip(tables, self.parameters, strict=True)
        ]
        super().__init__(groups, {"lr": lr})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes rates over by the names of tables. Raises `ArgumentError` for those of other tables."""
        of_table = {group.get("table"): group for group in state_dict["param_groups"]}
        names = [group["table"] for group in self.param_groups]
        if of_table.keys() != set(names):
            given = ", ".join(map(str, of_table))
            raise ArgumentError(f"rates of the tables {given}; allowed: those of {', '.join(names)}")
        super().load_state_dict({**state_dict, "param_groups": [of_table[name] for name in names]})

    def check_groups(self) -> None:
        """Raises `ArgumentError` for a setting in a group that would change nothing."""
        for group in self.param_groups:
            if not _OF_TABLES.isdisjoint(group):
                what = min(_OF_TABLES.intersection(group))
                raise ArgumentError(
                    f"table {group['table']}: {what} in `embeddings.optimizer`, which has learning rates alone; "
                    "allowed: Table(optimizer=OptimizerSpec(...))"
                )

    def rates(self) -> Rates:
        """What the next step would use."""
        return tuple(
            float(group["lr"]) if parameter.requires_grad else None
            for group, parameter in zip(self.param_groups, self.parameters, strict=True)
        )

    def freeze(self, number: int, frozen: bool) -> None:
        """Freezes a table, or ends it."""
        self.parameters[number].requires_grad_(not frozen)

    @property
    def are_frozen(self) -> bool:
        """Whether all tables are."""
        return not any(parameter.requires_grad for parameter in self.parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `ArgumentError` once there is a group for each table."""
        if len(self.param_groups) == len(self.parameters):
            raise ArgumentError("a group of parameters for the optimizer of tables; allowed: none but those of tables")
        super().add_param_group(param_group)

    @property
    def were_zeroed(self) -> bool:
        """Whether the program has taken away all gradients that were left: `zero_grad` of a model or an optimizer."""
        return self._has_left_gradients and all(one.grad is None for one in self.parameters)

    def leave_gradients(self) -> None:
        """Gives parameters without a gradient one of 0: optimizers of the program keep no state for unused ones."""
        self._has_left_gradients = any(one.requires_grad for one in self.parameters)
        zeros = torch.zeros(len(self.parameters), 1, device=self.parameters[0].device).unbind()
        for parameter, zero in zip(self.parameters, zeros, strict=True):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = zero

    def step(self, closure: Any = None) -> Any:
        """Raises `ArgumentError` if a `GradScaler` calls it and `scaler` is not set."""
        loss = None if closure is None else closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and self._scaler is None:
            del self.found_inf, self.grad_scale
            raise ArgumentError(
                "a GradScaler that tables were not told of; set `embeddings.optimizer.scaler = scaler` before the "
                "first backward pass"
            )
        # After an overflow there is no step, and nothing of it is kept.
        call = self.on_step if found_inf is None or not float(found_inf) else self.on_zero_grad
        if call is not None:
            call()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.on_zero_grad is not None:
            self.on_zero_grad()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses. Tables divide their gradients by its scale. If the gradients of any rank are not
        finite, no rank takes the step."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ArgumentError(f"a scaler of type {type(scaler).__name__}; allowed: a torch.amp.GradScaler, or None")
        self._scaler = scaler if scaler is None or scaler.is_enabled() else None

    def tell_scaler(self, *, is_finite: bool) -> None:
        """Leaves what `scaler.step` looks at: whether the gradients of the last step were finite."""
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.0 if is_finite else torch.inf)
