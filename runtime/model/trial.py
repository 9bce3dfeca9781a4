# SPDX-License-Identifier: Apache-2.0
"""Made-up arguments for a model: to see what it returns, and to measure it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.backend.torch_versions import jagged
from sennit.runtime.model.inputs import ModelInputs


class Trial:
    """The vectors and integers of some samples, from leaves that may get gradients."""

    def __init__(
        self,
        inputs: ModelInputs,
        samples: int,
        *,
        reads_histories: bool,
        lengths: Mapping[str, int] | None = None,
        make: Callable[[int, int], Tensor] = torch.zeros,
    ) -> None:
        """`lengths`: the ids of each sample by table, for a model that reads histories; 1 where nothing is said.

        `make`: returns float32 [rows, dim].
        """
        history = inputs.history if reads_histories else None
        self._samples, self._is_nested = samples, reads_histories
        self._lengths = {table.name: (lengths or {}).get(table.name, 1) for table in inputs.tables}
        self._times = None if history is None else history.times
        self._length = 1
        if history is not None:
            # A sample has as many of all columns of its history.
            self._length = max(1, *(self._lengths[name] for name in history.own))
            self._lengths |= dict.fromkeys(history.own, self._length) | dict.fromkeys(history.past, self._length - 1)
        self.leaves = {
            table.name: make(samples * (self._lengths[table.name] if reads_histories else 1), table.dim)
            for table in inputs.tables
        }

    def arguments(self) -> tuple[dict[str, Any], ...]:
        """What a model gets behind dense features."""
        if not self._is_nested:
            return (self.leaves,)
        vectors = {name: self._nested(rows, self._lengths[name]) for name, rows in self.leaves.items()}
        times = torch.arange(self._length).repeat(self._samples)
        return vectors, {} if self._times is None else {self._times: self._nested(times, self._length)}

    def _nested(self, rows: Tensor, length: int) -> Any:
        return jagged(rows, torch.arange(self._samples + 1) * length)
