# SPDX-License-Identifier: Apache-2.0
"""The forms in which a module gives its results: by feature, as one tensor, as TorchRec's KeyedTensor, as sequences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from sennit.runtime.backend.torch_versions import jagged


class KeyedVectors:
    """The pooled rows of features, with the methods of TorchRec's `KeyedTensor`."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        """`found`: float32 [B, dim] by feature."""
        self._found = found
        self._values: Tensor | None = None

    def keys(self) -> list[str]:
        """The names of the features, in the order of the columns."""
        return list(self._found)

    def values(self) -> Tensor:
        """Float32 [B, the sum of all dims]."""
        if self._values is None:
            self._values = concatenated(self._found)
        return self._values

    def key_dim(self) -> int:
        """The dimension that the features share."""
        return 1

    def length_per_key(self) -> list[int]:
        """The columns of each feature."""
        return [one.shape[1] for one in self._found.values()]

    def offset_per_key(self) -> list[int]:
        """Where the columns of each feature begin, and the number of all columns."""
        return [0, *itertools.accumulate(self.length_per_key())]

    def device(self) -> torch.device:
        """Where the values are."""
        return next(iter(self._found.values())).device

    def __getitem__(self, name: str) -> Tensor:
        """Float32 [B, dim]."""
        return self._found[name]

    def to_dict(self) -> dict[str, Tensor]:
        """Float32 [B, dim] by feature."""
        return dict(self._found)


def concatenated(found: Mapping[str, Tensor]) -> Tensor:
    """Float32 [B, the sum of all dims]: features side by side."""
    return torch.cat(list(found.values()), 1)


def nested(found: Mapping[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
    """Nested [B, *, dim] by feature, of layout `torch.jagged`, from the rows of ids [ids, dim].

    `lengths`: int32 or int64 [F, B], of the features in the same order.
    """
    offsets = torch.nn.functional.pad(torch.cumsum(lengths, 1, dtype=torch.int64), (1, 0))
    return {name: jagged(rows, own.to(rows.device)) for (name, rows), own in zip(found.items(), offsets, strict=True)}
