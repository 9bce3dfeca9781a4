# SPDX-License-Identifier: Apache-2.0
"""The tensors of a call as sennit gets them: in any strides, over each other, and refused ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sennit.runtime.backend.torch_versions import base_of
from sennit.testbed.differential.calls import Call

SENTINEL: Final = 1  # between the elements of strided tensors

# The error of one rounding of a result, relative to the largest number.
ROUNDINGS: Final = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.complex64: 1e-6}


@dataclass(kw_only=True)
class Given:
    """What one backend gets for a call."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    is_untouched: Callable[[], bool] = lambda: True
    """Whether everything between the elements of the outputs is as it was."""


def strided(rng: random.Random, values: torch.Tensor) -> torch.Tensor:
    """The same values in any strides: dimensions in another order of memory, gaps, a start within the memory."""
    kind = rng.randrange(4)
    if kind == 0:
        return values.clone()
    order = rng.sample(range(values.dim()), values.dim()) if kind & 1 else list(range(values.dim()))
    stored = [values.shape[dimension] for dimension in order]
    if kind & 2:
        step = rng.randrange(2, 4)
        memory = torch.full((*stored, step), SENTINEL).to(values.dtype)[..., rng.randrange(step)]
    else:
        memory = torch.full((math.prod(stored) + 3,), SENTINEL).to(values.dtype)[3:].view(stored)
    view = memory.permute([order.index(dimension) for dimension in range(values.dim())])
    return view.copy_(values)


def in_one_memory(rng: random.Random, call: Call) -> Given:
    """Inputs and outputs as parts of one tensor: apart among each other, but inputs lie over outputs.

    Both are in the order of the call half of the time, so that some are the same tensors.
    """
    sizes = [sum(tensor.numel() for tensor in tensors) for tensors in (call.inputs, call.outputs)]
    memory = torch.zeros(max(sizes) + 3, dtype=call.outputs[0].dtype)
    is_in_order = rng.random() < 0.5

    def placed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        first = 0 if is_in_order else rng.randrange(4)
        parts = [torch.empty(0)] * len(tensors)
        order = range(len(tensors)) if is_in_order else rng.sample(range(len(tensors)), len(tensors))
        for index in order:
            parts[index] = memory[first : first + tensors[index].numel()].view(tensors[index].shape)
            parts[index].copy_(tensors[index])
            first += tensors[index].numel()
        return parts

    outputs = placed(call.outputs)
    return Given(inputs=placed(call.inputs), outputs=outputs)


def unusual(rng: random.Random, call: Call) -> Given:
    """What sennit gets for `call`."""
    first = call.outputs[0] if call.outputs else torch.empty(0)
    if call.difference == "aliased" and first.numel():
        step = rng.randrange(min(first.numel(), 2))
        memory = torch.zeros(first.numel() + step * len(call.outputs), dtype=first.dtype)
        starts = range(0, step * len(call.outputs), step) if step else [0] * len(call.outputs)
        outputs = [memory[start : start + first.numel()].view(first.shape) for start in starts]
        return Given(inputs=call.inputs, outputs=outputs)
    if call.difference == "expanded" and first.numel() > 1:
        return Given(inputs=call.inputs, outputs=[torch.ones((), dtype=first.dtype).expand(first.shape)])
    # A message that is received where another is sent from would be a race.
    if call.inputs and call.outputs and call.kind != "batch" and not call.difference and rng.random() < 0.25:
        return in_one_memory(rng, call)
    outputs = [strided(rng, tensor) for tensor in call.outputs]
    inputs = [strided(rng, tensor) for tensor in call.inputs]
    return Given(inputs=inputs, outputs=outputs, is_untouched=untouched(outputs))


def untouched(outputs: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Returns a question: is everything in the memory of `outputs`, but for their elements, what it is now?"""
    kept = [(one, base, base.clone()) for one in outputs if (base := base_of(one)) is not None]

    def ask() -> bool:
        for one, memory, before in kept:
            before.as_strided(one.shape, one.stride(), one.storage_offset()).copy_(one)
            if not same(before, memory, is_exact=True):
                return False
        return True

    return ask


def same(one: torch.Tensor, other: torch.Tensor, *, is_exact: bool) -> bool:
    """Whether two results are the same: in all bits, or but for the rounding of sums in another order."""
    if not is_exact and (one.is_floating_point() or one.is_complex()):
        rounding = ROUNDINGS.get(one.dtype, 1e-14)
        wide = torch.complex128 if one.is_complex() else torch.float64
        return torch.allclose(one.to(wide), other.to(wide), rtol=4 * rounding, atol=4 * rounding)
    found, expected = (
        tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for tensor in (one, other)
    )
    # Over gloo the sum of two truths is a byte of 2.
    return torch.equal(found != 0, expected != 0) if one.dtype == torch.bool else torch.equal(found, expected)
