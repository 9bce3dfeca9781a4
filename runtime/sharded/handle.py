# SPDX-License-Identifier: Apache-2.0
"""A handle for one table of a module: its learning rate, whether it is frozen, its rows by id."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from sennit.runtime.kernels.checks import IdError
from sennit.runtime.kernels.spec import Bounds
from sennit.runtime.sharded.features import PADDING
from sennit.runtime.sharded.forms import kind_of
from sennit.runtime.sharded.optimizer import TableOptimizer
from sennit.runtime.sharded.row_access import RowAccess
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ArgumentError, ConfigError


class Access(Protocol):
    """Begins a `RowAccess` of a table."""

    def __call__(self, ids: Tensor, error: Exception | None, *, writes: bool) -> RowAccess: ...


class TableHandle:
    """One table of a module of sharded tables (`module["user"]`).

    `get_rows` and `set_rows` are collective. All ranks call them in the same order, each with ids of its own, or none.
    """

    def __init__(
        self, table: Table, number: int, optimizer: TableOptimizer, device: torch.device, access: Access
    ) -> None:
        """`number`: of the table in its module, whose optimizer and device are given."""
        self._table, self._number, self._optimizer = table, number, optimizer
        self._device, self._access = device, access

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else f"lr {self.lr}"
        return f"<table {self.name}: {self.rows} rows of {self.dim}, {state}>"

    @property
    def name(self) -> str:
        return self._table.name

    @property
    def rows(self) -> int:
        return self._table.rows

    @property
    def dim(self) -> int:
        return self._table.dim

    @property
    def lr(self) -> float:
        """The learning rate of the next backward pass. With 0 neither rows nor optimizer states move.

        Rates that differ by rank are a `ConfigError` on all ranks in the next call of the module.
        """
        return float(self._optimizer.param_groups[self._number]["lr"])

    @lr.setter
    def lr(self, lr: float) -> None:
        if not 0 <= lr < math.inf:
            raise ConfigError(f"table {self.name}: lr {lr}; allowed: 0 or more")
        self._optimizer.param_groups[self._number]["lr"] = lr

    @property
    def frozen(self) -> bool:
        """Whether backward passes leave rows and optimizer states as they are. All ranks must set the same, as `lr`."""
        return not self._optimizer.parameters[self._number].requires_grad

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._optimizer.freeze(self._number, frozen)

    def get_rows(self, ids: Tensor) -> Tensor:
        """Float32 [n, dim] on the device of the module: the rows of `ids`, int32 or int64 [n], in any order.

        Raises `IdError`, `ArgumentError`; the other ranks then raise `PeerInputError`. With rows in files also
        `ConfigError` on all ranks, if they do not fit the cache of an owner.
        """
        error = self._wrong(ids)
        return self._access(_on_host(ids, error), error, writes=False).read().to(self._device)

    def set_rows(self, ids: Tensor, values: Tensor) -> None:
        """Sets the rows of `ids`, int32 or int64 [n], each given once, to `values`, floats [n, dim]: pretrained rows.

        Values are rounded to the nearest in the precision of the table. States of the optimizer stay as they are. Of
        several ranks that give a row, the last one holds. Batches that were looked up before have the old rows.

        Raises as `get_rows`, and `ArgumentError` for a tensor train, whose rows are computed.
        """
        error = self._wrong(ids) or self._wrong_values(ids, values)
        access = self._access(_on_host(ids, error), error, writes=True)
        access.write(values.detach().to("cpu", torch.float32))

    def _wrong(self, ids: Tensor) -> Exception | None:
        """What is wrong with ids on this rank. Any error, because the other ranks wait for this one."""
        try:
            return self._refused(ids)
        except Exception as error:
            return error

    def _refused(self, ids: Tensor) -> ArgumentError | None:
        if not isinstance(ids, Tensor):
            return ArgumentError(f"ids are a {type(ids).__name__}; allowed: a tensor of int32 or int64")
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            return ArgumentError(f"ids are {kind_of(ids)}; allowed: int32 or int64, one dimension")
        if self._table.ids is not None:
            if self._table.bounds is Bounds.IGNORE and (ids == PADDING).any():
                return IdError(f"id {PADDING}, which table {self.name} ignores; allowed: all others")
            return None
        outside = ids[(ids < 0) | (ids >= self.rows)]
        if len(outside):
            return IdError(f"id {int(outside[0])}; table {self.name} has rows 0 to {self.rows - 1}")
        return None

    def _wrong_values(self, ids: Tensor, values: Tensor) -> ArgumentError | None:
        """What is wrong with values for `ids`, which are good, on this rank."""
        if self._table.train_rank is not None:
            return ArgumentError(f"table {self.name} is a tensor train, whose rows are computed; allowed: other tables")
        if not isinstance(values, Tensor):
            return ArgumentError(f"values are a {type(values).__name__}; allowed: a tensor of floats")
        if not values.is_floating_point() or values.shape != (len(ids), self.dim):
            given = f"{values.dtype} of shape {tuple(values.shape)}"
            return ArgumentError(f"values are {given}; allowed: floats of ({len(ids)}, {self.dim})")
        distinct, counts = torch.unique(ids, return_counts=True)
        if len(twice := distinct[counts > 1]):
            return ArgumentError(f"id {int(twice[0])} is given twice; allowed: once")
        return None


def _on_host(ids: Tensor, error: Exception | None) -> Tensor:
    """Int64 [n], contiguous, in host memory; none if they are wrong."""
    return torch.empty(0, dtype=torch.int64) if error is not None else ids.to("cpu", torch.int64).contiguous()
