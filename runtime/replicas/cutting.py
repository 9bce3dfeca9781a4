# SPDX-License-Identifier: Apache-2.0
# Torch types its tensors thinly:
# mypy: disable-error-code="no-untyped-call"
"""Cuts arguments into slices of samples, and puts results together; the backward pass does it the other way round.

Each part begins at a multiple of 64 bytes: matrix products may round differently at another alignment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sennit.runtime.backend.torch_versions import (
    jagged,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from sennit.runtime.sharded.slices import Slices
from sennit.transport.errors import ArgumentError

# torch's allocator gives this alignment: a cache line, and the widest vector.
ALIGNMENT_BYTES = 64
CUT_NODE = "_CutBackward"
"""Autograd's name for the node that cuts an argument. Nodes below it belong to the argument, not to a slice."""


@dataclass(frozen=True, slots=True)
class Along:
    """An argument whose tensors have their samples along another dimension than 0."""

    value: Any
    """A tensor, or tuples, lists and dicts of tensors."""

    dim: int | None
    """The dimension of samples. None: every slice gets the whole tensor."""


class CutArguments:
    """The arguments of a call, for each slice of this rank. Nested tensors are cut between sequences."""

    def __init__(self, arguments: object, slices: Slices, global_batch: int | None) -> None:
        """Raises `ArgumentError` if tensors differ in samples, or if the samples are not those of this rank's slices.

        `arguments`: tuples, lists and dicts of tensors and other values. Tensors with a dimension are cut along
        dimension 0 or along that of an `Along`. All other values go whole to every slice.
        """
        found, self._spec = tree_flatten_with_path(tree_map(_along, arguments))
        local_batch, self.global_batch = _samples(found), global_batch
        self.own_sizes = slices.own_sizes(local_batch, global_batch)
        """The samples in each slice of this rank."""
        if torch.is_grad_enabled() and (empty := _empty_rank(local_batch, slices, global_batch)) is not None:
            raise ArgumentError(
                f"a global batch of {global_batch or 0} samples for {slices.count} slices leaves rank {empty} without "
                "a sample, but each rank needs one for a gradient. Leave such a last batch out; or deal samples "
                "equally, and give no global_batch"
            )
        self.is_empty = not local_batch
        """This rank has no samples. Then its first slice stands for all, so that results have their shapes."""
        self.numbers = [number for number, size in zip(range(*slices.own), self.own_sizes, strict=True) if size]
        self.numbers = self.numbers or [slices.own.low]
        """The slices of this rank that have samples."""
        self.sizes = [size for size in self.own_sizes if size] or [0]
        """The samples in each of these slices."""
        self._parts = [self._cut(leaf) for _, leaf in found]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yields each slice's number and arguments. A slice is cut when it is its turn."""
        for place, number in enumerate(self.numbers):
            yield number, tree_unflatten([parts[place] for parts in self._parts], self._spec)

    def _cut(self, leaf: object) -> Sequence[object]:
        if not isinstance(leaf, Along):
            return [leaf] * len(self.sizes)
        if leaf.dim is None:
            return [leaf.value] * len(self.sizes)
        if leaf.value.is_nested:
            return _cut_nested(leaf.value, self.sizes)
        return _cut_dim(leaf.value, self.sizes, leaf.dim)


def _cut_dim(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    if torch.is_grad_enabled() and tensor.requires_grad:
        parts: tuple[Tensor, ...] = _Cut.apply(tensor, list(sizes), dim)
        return parts
    return [aligned(part) for part in tensor.split(list(sizes), dim)]


def _cut_nested(nested: Any, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Parts of a nested tensor of layout torch.jagged: whole sequences, and as many rows as these have."""
    begins = list(itertools.accumulate(sizes, initial=0))
    offsets = nested.offsets()
    rows = offsets[torch.tensor(begins).to(offsets.device)].diff().tolist()
    parts = _cut_dim(nested.values(), rows, 0)
    return [
        jagged(part, offsets[begin : end + 1] - offsets[begin])
        for part, (begin, end) in zip(parts, itertools.pairwise(begins), strict=True)
    ]


def aligned(tensor: Tensor) -> Tensor:
    """The tensor if it is contiguous and aligned, or else a copy that is."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def join(outputs: Sequence[object], on_backward: Callable[[], None] | None, *, is_empty: bool = False) -> Any:
    """One result from those of the slices: tensors one after another along dimension 0, 0-dim tensors stacked. Nested
    tensors of layout torch.jagged are joined by sequences.

    `is_empty`: no slice has samples, so 0-dim tensors, such as their mean loss, are left out.
    `on_backward` is called when a gradient of the result comes. Raises `ArgumentError` if slices gave other structures,
    or other values that differ.
    """
    flat = [tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    for _, other in flat:
        if other != spec:
            raise ArgumentError(f"slices gave results of different structure: {spec} and {other}")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_join_leaf(parts, on_backward, is_empty) for parts in columns], spec)


def _join_leaf(parts: tuple[Any, ...], on_backward: Callable[[], None] | None, is_empty: bool) -> object:
    if is_empty and isinstance(parts[0], Tensor) and not parts[0].ndim:
        return parts[0].new_empty(0)
    tensors = [isinstance(part, Tensor) for part in parts]
    if all(tensors):
        if any(part.is_nested for part in parts):
            return _join_nested(parts, on_backward)
        return _Join.apply(on_backward, *parts)
    if any(tensors) or any(part != parts[0] for part in parts):
        raise ArgumentError(
            f"slices gave the values {parts}; allowed: tensors, and values that are equal in all slices"
        )
    return parts[0]


def _join_nested(parts: tuple[Any, ...], on_backward: Callable[[], None] | None) -> Tensor:
    for part in parts:
        _check_jagged("a result", part)
    lengths = torch.cat([part.offsets().diff() for part in parts])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rows = _Join.apply(on_backward, *(part.values() for part in parts))
    return jagged(rows, offsets)


def _check_jagged(name: str, tensor: Any) -> None:
    """Raises `ArgumentError` unless it is nested, of layout torch.jagged, with sequences right after one another."""
    if not tensor.is_nested or tensor.layout is not torch.jagged or tensor.lengths() is not None:
        layout = tensor.layout if tensor.is_nested else "a tensor that is not nested"
        raise ArgumentError(
            f"{name} of {layout}; allowed: nested tensors of layout torch.jagged that are contiguous, in all slices"
        )
    if isinstance(tensor.shape[1], int):
        raise ArgumentError(f"{name} is nested along another dimension than 1; allowed: [samples, *, ...]")


def _empty_rank(local_batch: int, slices: Slices, global_batch: int | None) -> int | None:
    """A rank without samples, if there is one. All ranks find the same, but for those that gave none by themselves."""
    if not local_batch:
        return slices.rank
    # Below one sample a slice, a rank may have as many samples by its slices as equally dealt, and cannot tell which.
    if global_batch is None or global_batch >= slices.count:
        return None
    spans = [slices.samples(rank, global_batch) for rank in range(slices.world_size)]
    return next((rank for rank, span in enumerate(spans) if span.low == span.high), None)


def _along(value: object) -> object:
    """Gives each tensor an `Along` of its own. Raises `ArgumentError` for other arrays with samples."""
    if isinstance(value, Along):
        return tree_map(lambda leaf: _along_dim(leaf, value.dim), value.value)
    return _along_dim(value, None if isinstance(value, Tensor) and not value.ndim else 0)


def _along_dim(value: object, dim: int | None) -> object:
    if isinstance(value, Tensor):
        return Along(value, dim)
    shape: Any = getattr(value, "shape", ())
    if shape and dim is not None:
        raise ArgumentError(
            f"an argument is a {type(value).__name__} of shape {tuple(shape)}, which is not cut into slices; allowed: "
            "tensors (torch.as_tensor), or Along(value, None), which goes whole to every slice"
        )
    return value


def _samples(found: Sequence[tuple[Any, object]]) -> int:
    """The number of this rank's samples. Raises `ArgumentError` if arguments differ in it."""
    first: tuple[str, int] | None = None
    for path, leaf in found:
        if not isinstance(leaf, Along):
            continue
        name, tensor, dim = f"argument {keystr(path)}", leaf.value, leaf.dim
        if dim is None:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    f"{name} goes whole to every slice and requires gradients, which would be summed in no defined "
                    "order. Make it a parameter of the module, or cut it"
                )
            continue
        if tensor.is_nested:
            _check_jagged(name, tensor)
            if dim:
                raise ArgumentError(f"{name} is nested, and has its samples along dimension {dim}; allowed: 0")
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ArgumentError(f"{name} of shape {tuple(tensor.shape)} has no dimension {dim}")
        samples = tensor.shape[dim]
        if first is None:
            first = name, samples
        elif samples != first[1]:
            raise ArgumentError(
                f"{name} has {samples} samples along dimension {dim}, {first[0]} has {first[1]}. Tensors of other "
                "dimensions are given as Along(tensor, dim), whole ones as Along(tensor, None)"
            )
    if first is None:
        raise ArgumentError("no argument is a tensor with samples to cut into slices")
    return first[1]


class _Cut(torch.autograd.Function):
    """tensor -> copies of its slices. Autograd's own split would return views, which no operator may write to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in tensor.split(sizes, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(gradients, ctx.dim), None, None


class _Join(torch.autograd.Function):
    """Results of slices -> one tensor; its gradient -> aligned gradients of the slices."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None] | None, *parts: Tensor) -> Tensor:
        ctx.on_backward = on_backward
        ctx.sizes = [part.shape[0] for part in parts] if parts[0].ndim else None
        return torch.stack(parts) if ctx.sizes is None else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.on_backward is not None:
            ctx.on_backward()
        parts = gradient.unbind() if ctx.sizes is None else gradient.split(ctx.sizes)
        return None, *(aligned(part) for part in parts)
