# SPDX-License-Identifier: Apache-2.0
"""The forms in which a program has the ids of one feature: tensors, NumPy arrays, lists, what nn.EmbeddingBag takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sennit.transport.errors import ArgumentError

INTEGERS: Final = (torch.int32, torch.int64)
_ALLOWED: Final = (
    "int32 or int64, [samples] or [samples, ids a sample], as a tensor, an array or a list; a nested tensor; a list of "
    "lists; (ids, offsets) or (ids, offsets, weights)"
)


class Bags(NamedTuple):
    """The ids of one feature, in host memory."""

    lengths: Tensor
    """Int32 or int64 [samples]: how many ids each sample has."""

    values: Tensor
    """Int32 or int64 [ids], sample after sample."""

    weights: Tensor | None = None
    """Float32 [ids], where the program has them."""


def bags_of(name: str, given: Any, *, include_last_offset: bool = False) -> Bags:
    """The ids of feature `name`, which are one of these:

    - a tensor, or what NumPy reads as an array: [B] for one id a sample, [B, n] for n;
    - a nested tensor [B, *], of either layout;
    - a list with the id of each sample, or with its ids;
    - (ids, offsets) or (ids, offsets, weights), the arguments of `nn.EmbeddingBag`: a sample begins at its offset, and
      the last one ends with the ids. With `include_last_offset` there is one more, where they end. Where offsets are
      None, ids are in one of the forms above;
    - an object with `lengths` and `values`: `Features` of one feature, or TorchRec's `JaggedTensor`.

    Raises `ArgumentError` for anything else, and for a list of two tensors that may be ids and offsets.
    """
    weights = None
    if isinstance(given, tuple):
        lengths, values, weights = _of_arguments(name, given, include_last_offset)
    elif not isinstance(given, Tensor) and hasattr(given, "lengths") and hasattr(given, "values"):
        lengths, values = _called(given.lengths), _called(given.values)
        weights = given.weights_or_none() if hasattr(given, "weights_or_none") else getattr(given, "weights", None)
        if isinstance(lengths, Tensor) and lengths.dim() == 2 and len(lengths) == 1:
            lengths = lengths[0]
    else:
        lengths, values = _of_ids(name, given)
    for what, one in (("lengths", lengths), ("ids", values)):
        if not isinstance(one, Tensor) or one.dim() != 1 or one.dtype not in INTEGERS:
            raise ArgumentError(f"feature {name}: {what} are {kind_of(one)}; allowed: {_ALLOWED}")
    if (total := int(lengths.sum(dtype=torch.int64))) != len(values):
        raise ArgumentError(f"feature {name}: lengths of {total} ids in all, but {len(values)} ids")
    if weights is not None:
        is_float = isinstance(weights, Tensor) and weights.dtype is torch.float32
        if not is_float or weights.numel() != len(values):
            raise ArgumentError(f"feature {name}: weights are {kind_of(weights)}; allowed: float32 of ({len(values)},)")
    return Bags(lengths.cpu(), values.cpu(), None if weights is None else weights.reshape(-1))


def lengths_of(offsets: Tensor, count: int, *, include_last: bool = False) -> Tensor:
    """Int64 [B]: the ids of each sample, of `count` in all. `offsets`: int32 or int64 [B], where each sample begins.
    With `include_last` one more, where the last one ends.

    Raises `ArgumentError` unless they begin with 0, never fall, and end at `count` or before.
    """
    if offsets.dim() != 1 or offsets.dtype not in INTEGERS:
        raise ArgumentError(f"offsets are {kind_of(offsets)}; allowed: int32 or int64, one dimension")
    offsets = offsets.to("cpu", torch.int64)
    if include_last:
        if not len(offsets) or int(offsets[-1]) != count:
            last = f"the last offset is {int(offsets[-1])}" if len(offsets) else "there are no offsets"
            raise ArgumentError(f"{last}; allowed: {count}, where the ids end")
        offsets = offsets[:-1]
    if not len(offsets):
        if count:
            raise ArgumentError(f"no offsets for {count} ids; allowed: one for each sample")
        return offsets
    if int(offsets[0]):
        raise ArgumentError(f"the first offset is {int(offsets[0])}; allowed: 0")
    lengths = torch.diff(offsets, append=torch.tensor([count]))
    if int(lengths.min()) < 0:
        place = int((lengths < 0).to(torch.int8).argmax())
        most = count if place + 1 == len(offsets) else int(offsets[place + 1])
        raise ArgumentError(f"offset {int(offsets[place])} at position {place}; allowed: at most {most}, what follows")
    return lengths


def _of_arguments(name: str, given: tuple[Any, ...], include_last: bool) -> tuple[Tensor, Tensor, Any]:
    if not 2 <= len(given) <= 3:
        raise ArgumentError(f"feature {name} is a tuple of {len(given)} parts; allowed: {_ALLOWED}")
    if not (given[1] is None or isinstance(_array(given[1]), Tensor)):
        raise ArgumentError(f"feature {name}: offsets are {kind_of(given[1])}; allowed: a tensor or an array, or None")
    lengths, values = _of_ids(name, given[0])
    if given[1] is not None:
        if len(values) != len(lengths):
            raise ArgumentError(f"feature {name}: offsets for ids that are in bags; allowed: None")
        lengths = lengths_of(_array(given[1]), len(values), include_last=include_last)
    return lengths, values, _array(given[2]) if len(given) == 3 else None


def _of_ids(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """Lengths and values."""
    ids: Any = _array(given)
    if isinstance(ids, Tensor) and (ids.is_sparse or ids.is_meta):
        raise ArgumentError(f"feature {name} is a {'sparse' if ids.is_sparse else 'meta'} tensor; allowed: {_ALLOWED}")
    if isinstance(given, Tensor) and given.is_nested:
        if ids.layout is torch.jagged and ids.dim() == 2 and ids.lengths() is None:
            return torch.diff(ids.offsets()), ids.values()
        ids = list(ids.unbind())
    if isinstance(ids, Tensor) and ids.dim() in (1, 2):
        each = 1 if ids.dim() == 1 else ids.shape[1]
        return torch.full((len(ids),), each, dtype=torch.int32), ids.reshape(-1)
    if isinstance(ids, (str, bytes, Tensor)) or not isinstance(ids, Sequence):
        raise ArgumentError(f"feature {name} is {kind_of(ids)}; allowed: {_ALLOWED}")
    if _may_be_offsets(given):
        what = f"feature {name} is a list of two tensors: ids with offsets, or the ids of two samples"
        raise ArgumentError(f"{what}; allowed: the tuple (ids, offsets), or a list of lists")
    samples = [one.tolist() if isinstance(one := _array(item), Tensor) else one for item in ids]
    bags = [one if isinstance(one, Sequence) else (one,) for one in samples]
    try:
        values = torch.tensor([one for bag in bags for one in bag])
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(f"feature {name}: {error}; allowed: {_ALLOWED}") from error
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    return lengths, values if len(values) else values.to(torch.int64)


def _may_be_offsets(given: Any) -> bool:
    """Whether it is [ids, offsets], as a `DataLoader` with `pin_memory` makes it of (ids, offsets)."""
    if not (isinstance(given, list) and len(given) == 2 and all(isinstance(one, Tensor) for one in given)):
        return False
    ids, offsets = given
    if ids.dim() != 1 or offsets.dim() != 1 or len(offsets) < 2 or offsets.dtype not in INTEGERS:
        return False
    return int(offsets[0]) == 0 and bool((offsets.diff() >= 0).all()) and int(offsets[-1]) <= len(ids)


def _array(given: Any) -> Any:
    """A tensor of what is an array; a list, if it is one of objects. Anything else stays as it is."""
    if isinstance(given, Tensor) or not hasattr(given, "__array__"):
        return given
    array = np.asarray(given)
    if array.dtype.kind not in "iuf":
        return list(array) if array.dtype.kind == "O" else array
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    # torch warns of memory that it must not write to.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _called(part: Any) -> Any:
    return part() if callable(part) else part


def kind_of(given: Any) -> str:
    """What ids are, for errors."""
    if isinstance(given, Tensor) and given.dtype is torch.uint64:
        return f"{given.dtype} of shape {tuple(given.shape)}, whose bits a dynamic table takes as .view(torch.int64)"
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return f"a {type(given).__name__}"
