# SPDX-License-Identifier: Apache-2.0
"""Made-up arguments for a model: to see what it returns, and to measure it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        lengths: Mapping[str, Sequence[int]] | None = None,
        make: Callable[[int, int], Tensor] = torch.zeros,
    ) -> None:
        """`lengths`: how many ids samples have, by table, for a model that reads histories; 1 where nothing is said.
        Samples take what is evenly spread among these.

        `make`: returns float32 [rows, dim].
        """
        history = inputs.history if reads_histories else None
        self._is_nested = reads_histories
        given = lengths if lengths is not None and reads_histories else {}
        self._lengths = {
            name: torch.tensor(of, dtype=torch.int64)[torch.arange(samples) * len(of) // samples]
            for name, of in ((table.name, given.get(table.name, (1,))) for table in inputs.tables)
        }
        self._times = None if history is None else history.times
        if history is not None:
            # A sample has as many of all columns of its history, and its own.
            own = self._lengths[history.own[0]].clamp(min=1)
            self._lengths |= dict.fromkeys(history.own, own) | dict.fromkeys(history.past, own - 1)
            self._of_events = own
        self.leaves = {table.name: make(int(self._lengths[table.name].sum()), table.dim) for table in inputs.tables}

    def arguments(self) -> tuple[dict[str, Any], ...]:
        """What a model gets behind dense features."""
        if not self._is_nested:
            return (self.leaves,)
        vectors = {name: _nested(rows, self._lengths[name]) for name, rows in self.leaves.items()}
        if self._times is None:
            return vectors, {}
        begins = self._of_events.cumsum(0) - self._of_events
        times = torch.arange(int(self._of_events.sum())) - begins.repeat_interleave(self._of_events)
        return vectors, {self._times: _nested(times, self._of_events)}


def _nested(rows: Tensor, lengths: Tensor) -> Any:
    return jagged(rows, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
