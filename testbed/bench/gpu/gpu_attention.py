# SPDX-License-Identifier: Apache-2.0
# Torch types its dynamic parts thinly:
# mypy: disable-error-code="no-untyped-call"
"""Part of `sennit bench gpu`: attention in Triton, its bits and its times beside other kernels of the same mask.

Bits are those of the native kernels in float32. Times are of a forward and a backward pass over histories as
`sennit bench attention` draws them. The peers are torch's flex_attention, compiled, with a mask of the sequences, and
Meta's Triton kernel of HSTU, from the clone of meta-recsys/generative-recommenders that GENERATIVE_RECOMMENDERS_CLONE
names.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sennit.runtime.kernels import jagged_attention
from sennit.testbed.bench.gpu.gpu import Settings
from sennit.testbed.bench.gpu.gpu_kernels import EQUAL
from sennit.testbed.bench.tables.embedding_cuda import call_ms
from sennit.testbed.bench.training import attention as histories
from sennit.testbed.bench.training.attention import Sequences

SHAPE: Final = {"count": 32, "mean": 139.0, "longest": 512, "heads": 4, "dim": 64}
SMALL: Final = {"count": 2, "mean": 6.0, "longest": 12, "heads": 1, "dim": 16}
"""In the interpreter."""

CLONE: Final = "GENERATIVE_RECOMMENDERS_CLONE"
HSTU: Final = "generative_recommenders.ops.triton.triton_hstu_attention"

NEAR: Final = 1e-4
"""The most that a peer's outputs in float32 may differ from ours, where the outputs are about 1."""

FLEX_GOAL: Final = 1.0
HSTU_GOAL: Final = 1 / 1.3
"""Goals: a peer's time / ours is at least this."""


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Raises RuntimeError if bits differ from the native kernels, or outputs from those of a peer."""
    shape: dict[str, Any] = SMALL if settings.interpreter else SHAPE
    device = torch.device("cpu" if settings.interpreter else "cuda")
    drawn = histories.draw(**shape, seed=settings.seed)
    results: list[dict[str, Any]] = []

    def add(one: dict[str, Any]) -> None:
        results.append(one)
        save({"results": results})

    wrong = []
    for name, options in cases(drawn, shape["longest"], is_brief=settings.interpreter).items():
        different = differences(drawn, options, device)
        add({"name": f"bits, {name}", "outcome": f"other bits: {', '.join(different)}" if different else EQUAL})
        wrong += [name] if different else []
    there = placed(drawn, device)
    add({"name": "outputs of flex_attention", "outcome": f"differ by {flex_difference(there):.1e} at most"})
    if flex_difference(there) > NEAR:
        wrong.append("outputs beside flex_attention")
    if not settings.interpreter:
        for one in (there, there.bfloat16()):
            timed(one, shape["longest"], settings.rounds, add)
    if wrong:
        raise RuntimeError(f"attention is wrong: {', '.join(wrong)}")
    return {"results": results}


def cases(drawn: Sequences, longest: int, *, is_brief: bool) -> dict[str, dict[str, Any]]:
    """By name options of `jagged_attention`: all rules, both activations, with and without biases."""
    targets = drawn.offsets.diff().clamp(max=2)
    silu: dict[str, Any] = {"activation": "silu", "divisor": float(longest), "targets": targets}
    found: dict[str, dict[str, Any]] = {"softmax": {}, "silu": silu}
    if is_brief:
        return {"silu": silu}
    biases = histories.biases(drawn, longest)
    return found | {
        "softmax, window": {"window": 50},
        "softmax, not causal": {"causal": False, "targets": targets},
        "softmax, biases": biases,
        "silu, context, window": silu | {"context": 3, "window": 60},
        "silu, biases": silu | biases,
    }


def differences(drawn: Sequences, options: dict[str, Any], device: torch.device) -> list[str]:
    """Names of what differs from the native kernels, with the number of elements."""
    expected = _results(drawn, options, torch.device("cpu"), "native")
    found = _results(drawn, options, device, "triton")
    different = []
    for name, wanted in expected.items():
        count = int((wanted.view(torch.int32) != found[name].cpu().view(torch.int32)).sum())
        if count:
            different.append(f"{name} in {count} of {wanted.numel()} elements")
    return different


def _results(drawn: Sequences, options: dict[str, Any], device: torch.device, by: str) -> dict[str, Tensor]:
    there = placed(drawn, device)
    given: dict[str, Any] = {
        name: one.detach().to(device, copy=True).requires_grad_(one.is_floating_point())
        if isinstance(one, Tensor)
        else one
        for name, one in options.items()
    }
    query, key, value = (one.detach().requires_grad_() for one in (there.query, there.key, there.value))
    output = jagged_attention(query, key, value, there.offsets, implementation=by, **given)
    output.backward(there.gradient)
    leaves = {"query": query, "key": key, "value": value}
    leaves |= {name: one for name, one in given.items() if isinstance(one, Tensor) and one.requires_grad}
    gradients = {f"gradient of {name}": one.grad for name, one in leaves.items() if one.grad is not None}
    return {"output": output.detach(), **gradients}


def placed(drawn: Sequences, device: torch.device) -> Sequences:
    return Sequences(*(one.to(device) for one in (drawn.query, drawn.key, drawn.value, drawn.gradient, drawn.offsets)))


def flex_difference(there: Sequences) -> float:
    """The most that outputs of softmax differ between flex_attention, not compiled, and ours."""
    mask = sequence_mask(there)
    query, key, value = (one.transpose(0, 1)[None] for one in (there.query, there.key, there.value))
    theirs: Any = flex_attention(query, key, value, block_mask=mask)
    ours = jagged_attention(there.query, there.key, there.value, there.offsets, implementation="triton")
    return float((theirs[0].transpose(0, 1) - ours).abs().max())


def sequence_mask(there: Sequences) -> Any:
    """A block mask of flex_attention over all rows: causal within each sequence."""
    rows = len(there.query)
    owner = torch.repeat_interleave(there.offsets.diff(), output_size=rows)

    def attends(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (owner[i] == owner[j]) & (j <= i)

    return create_block_mask(attends, None, None, rows, rows, device=str(there.query.device))


def timed(there: Sequences, longest: int, rounds: int, add: Callable[[dict[str, Any]], None]) -> None:
    """Adds times of passes, and of peers in the same run with their ratio to ours."""
    of = "bf16" if there.query.dtype == torch.bfloat16 else "fp32"
    silu: dict[str, Any] = {"activation": "silu", "divisor": float(longest)}
    biases = {
        name: one.detach().to(there.query.device).requires_grad_(one.is_floating_point())
        for name, one in histories.biases(there, longest).items()
    }
    ours = {
        "softmax": _milliseconds(lambda: histories.attend(there), rounds),
        "silu": _milliseconds(lambda: histories.attend(there, **silu), rounds),
        "silu, biases": _milliseconds(lambda: histories.attend(there, **silu, **biases), rounds),
    }
    for name, ms in ours.items():
        add({"name": f"{name}, {of}", "ms": ms})
    for peer, same, goal, make in (
        ("flex_attention of torch, compiled", "softmax", FLEX_GOAL, _flex),
        ("Meta's Triton kernel of HSTU", "silu", HSTU_GOAL, _hstu),
    ):
        one: dict[str, Any] = {"name": f"{peer}, {same}, {of}"}
        try:
            ms = _milliseconds(make(there, longest), rounds)
        except Exception as reason:  # A peer that does not run here says nothing of ours.
            add(one | {"absent": f"{type(reason).__name__}: {reason}"})
        else:
            add(one | {"ms": ms, "over_sennit": ms / ours[same], "goal_over_sennit": goal})


def _milliseconds(step: Callable[[], object], rounds: int) -> float:
    return statistics.median(call_ms(step, rounds))


def _flex(there: Sequences, _: int) -> Callable[[], object]:
    mask, compiled = sequence_mask(there), torch.compile(flex_attention)
    arriving = there.gradient.transpose(0, 1)[None]

    def step() -> None:
        query, key, value = (
            one.detach().transpose(0, 1)[None].requires_grad_() for one in (there.query, there.key, there.value)
        )
        output: Any = compiled(query, key, value, block_mask=mask)
        output.backward(arriving)

    return step


def _hstu(there: Sequences, longest: int) -> Callable[[], object]:
    """Raises LookupError if no clone is named."""
    if not (folder := os.environ.get(CLONE)):
        raise LookupError(f"{CLONE} names no clone of meta-recsys/generative-recommenders")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    attend = importlib.import_module(HSTU).triton_hstu_mha
    scale = there.query.shape[2] ** -0.5

    def step() -> None:
        query, key, value = (one.detach().requires_grad_() for one in (there.query, there.key, there.value))
        attend(
            N=longest, alpha=scale, q=query, k=key, v=value, seq_offsets=there.offsets, num_targets=None,
            max_attn_len=0, contextual_seq_len=0,
        ).backward(there.gradient)  # fmt: skip

    return step
