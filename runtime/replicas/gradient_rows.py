# SPDX-License-Identifier: Apache-2.0
# Torch types its tensors thinly:
# mypy: disable-error-code="no-untyped-call"
"""The memory of a module's gradients while they are summed: flat rows, which are cut into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import own_parameters
from sennit.runtime.sharded.slices import Slices

# Every parameter's gradient begins at a multiple of 64 bytes, whatever its type.
_ALIGNMENT: Final = 64


class Place(NamedTuple):
    """Where a module keeps a parameter. A shared parameter has several places."""

    owner: nn.Module
    attribute: str
    name: str
    """The name from the root, as in `named_parameters`."""

    def put(self, parameter: nn.Parameter) -> None:
        if isinstance(self.owner, nn.RNNBase):
            setattr(self.owner, self.attribute, parameter)  # An RNN keeps a second list of its parameters.
        else:
            own_parameters(self.owner)[self.attribute] = parameter


def places_of(module: nn.Module) -> list[Place]:
    return [
        Place(owner, attribute, f"{path}.{attribute}" if path else attribute)
        for path, owner in module.named_modules()
        for attribute, parameter in own_parameters(owner).items()
        if parameter is not None
    ]


class Bucket(NamedTuple):
    """A range of a row whose sum over ranks is one AllReduce."""

    dtype: torch.dtype
    start: int
    end: int
    """The range, in elements of the row."""
    parameters: tuple[int, ...]
    """The indices of the parameters in it."""


class Layout:
    """Where the gradients of a module's parameters lie in flat rows, one row for each type of element.

    The row of float32 begins with how many slices had a gradient of each parameter, and with the samples of each slice.
    """

    def __init__(self, places: Sequence[Place], slices: Slices) -> None:
        self.slices = slices
        self.places: list[tuple[Place, int]] = []
        """The places of parameters that require gradients, and the parameter's index."""
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.key = _key(places)
        self.is_checked = False
        """Whether a pass has shown that the module reaches its parameters by their places."""
        self.free_rows: dict[torch.dtype, Tensor] = {}
        """Memory that an earlier pass used for its rows."""
        index_of: dict[nn.Parameter, int] = {}
        for place in places:
            parameter = own_parameters(place.owner)[place.attribute]
            assert parameter is not None
            if parameter.requires_grad:
                if parameter not in index_of:
                    index_of[parameter] = len(self.parameters)
                    self.parameters.append(parameter)
                    self.names.append(place.name)
                self.places.append((place, index_of[parameter]))
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        """Where gradients of slices are added up. Their sums travel from host memory."""
        self.counts_length = _aligned(len(self.parameters) + slices.count)
        self._buckets: dict[int | None, tuple[Bucket, ...]] = {}
        self.lengths: dict[torch.dtype, int] = {torch.float32: self.counts_length}
        self.starts: list[int] = []
        for parameter in self.parameters:
            start = self.lengths.setdefault(parameter.dtype, 0)
            self.starts.append(start)
            self.lengths[parameter.dtype] = start + _aligned(parameter.numel())

    def fits(self, places: Sequence[Place]) -> bool:
        """Whether these are still the module's parameters, and the same require gradients."""
        return self.key == _key(places)

    def piece(self, row: Tensor, index: int, first: int = 0) -> Tensor:
        """A parameter's part of a row, or of a range of it that begins at element `first`, in its shape."""
        start, parameter = self.starts[index] - first, self.parameters[index]
        return row[start : start + parameter.numel()].view(parameter.shape)

    def buckets(self, size_bytes: int | None) -> tuple[Bucket, ...]:
        """Cuts all rows into ranges of at least `size_bytes`; those that begin a row may be smaller. None: whole rows.

        Buckets are in the order in which gradients come: the last parameters first (Li et al., PyTorch Distributed,
        VLDB 2020). The counts are complete at the end of a pass, so the bucket that they are in comes last.
        """
        if size_bytes not in self._buckets:
            self._buckets[size_bytes] = self._cut(size_bytes)
        return self._buckets[size_bytes]

    def _cut(self, size_bytes: int | None) -> tuple[Bucket, ...]:
        found: list[Bucket] = []
        for dtype, length in self.lengths.items():
            end, inside = length, []
            first = self.counts_length if dtype is torch.float32 else 0
            for index in reversed([i for i, each in enumerate(self.parameters) if each.dtype is dtype]):
                start = self.starts[index]
                inside.append(index)
                is_full = size_bytes is not None and (end - start) * dtype.itemsize >= size_bytes
                if is_full and start > first:
                    found.append(Bucket(dtype, start, end, tuple(inside)))
                    end, inside = start, []
            found.append(Bucket(dtype, 0, end, tuple(inside)))
        has_counts = [bucket.dtype is torch.float32 and not bucket.start for bucket in found]
        order = sorted(range(len(found)), key=lambda i: (has_counts[i], -min(found[i].parameters, default=0)))
        return tuple(found[i] for i in order)


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def _key(places: Sequence[Place]) -> tuple[object, ...]:
    found = [(place.name, own_parameters(place.owner)[place.attribute]) for place in places]
    return tuple((name, id(p), p.requires_grad, p.dtype, p.shape) for name, p in found if p is not None)
