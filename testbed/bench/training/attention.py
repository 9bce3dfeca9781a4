# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""`sennit bench attention`: forward and backward over sequences of different lengths, beside torch's own attention.

Lengths are of a gamma distribution, as in histories of users. The peers get the same sequences: padded to the longest
with a mask, and one after another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table as Lines
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sennit.runtime.calibrate.machine import describe, one_core
from sennit.runtime.kernels import jagged_attention

SHAPE_OF_LENGTHS: Final = 1.5
"""The gamma distribution's shape. Its mean is given."""

PADDED, LOOP, PRODUCTS = "padded, with a mask", "one sequence after another", "large products"
SILU: Final = "sennit, silu"
SIDE: Final = 1024
"""Rows and columns of a large product."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Rows of sequences, one after another, and the gradient that arrives."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in self.offsets.diff()]

    @property
    def operations(self) -> float:
        """Floating-point operations of a forward and a backward pass: seven products over the pairs that attend."""
        _, heads, dim = self.query.shape
        return 7.0 * 2 * heads * dim * sum(length * (length + 1) / 2 for length in self.lengths)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Processor seconds of each pass, by what made it."""

    sequences: Sequences
    taken_s: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.taken_s[name])

    def ratio(self, name: str) -> float:
        """The median over turns of a peer's time / ours. Above 1 sennit is faster."""
        pairs = zip(self.taken_s[name], self.taken_s["sennit"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    @property
    def share_of_products(self) -> float:
        """Operations a second of sennit / those of a large product, in the same turns."""
        rates = zip(self.taken_s[PRODUCTS], self.taken_s["sennit"], strict=True)
        per_product = 2.0 * SIDE**3
        return statistics.median(self.sequences.operations / ours / (per_product / theirs) for theirs, ours in rates)


def draw(*, count: int, mean: float, longest: int, heads: int, dim: int, seed: int) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    # A gamma distribution of this shape: the sum of an exponential one and half a squared normal one.
    exponential = -torch.rand(count, generator=generator).log()
    lengths = (exponential + torch.randn(count, generator=generator).square() / 2) * mean / SHAPE_OF_LENGTHS
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.long().clamp(1, longest).cumsum(0)])
    rows = [torch.randn(int(offsets[-1]), heads, dim, generator=generator) for _ in range(4)]
    return Sequences(query=rows[0], key=rows[1], value=rows[2], gradient=rows[3], offsets=offsets)


def run(*, count: int, mean: float, longest: int, heads: int, dim: int, rounds: int, seed: int) -> Report:
    sequences = draw(count=count, mean=mean, longest=longest, heads=heads, dim=dim, seed=seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways = _ways(sequences, longest)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        with one_core():
            for number in range(rounds + 1):
                for name in list(ways)[:: 1 if number % 2 else -1]:
                    began_s = time.process_time()
                    ways[name]()
                    # The first turn warms caches and allocators.
                    if number:
                        taken[name].append(time.process_time() - began_s)
    finally:
        torch.set_num_threads(threads)
    return Report(sequences=sequences, taken_s=taken)


def _ways(sequences: Sequences, longest: int) -> dict[str, Callable[[], object]]:
    left = torch.randn(SIDE, SIDE)
    return {
        "sennit": lambda: attend(sequences),
        SILU: lambda: attend(sequences, activation="silu", divisor=float(longest)),
        PADDED: padded(sequences),
        LOOP: lambda: looped(sequences),
        PRODUCTS: lambda: left @ left,
    }


def attend(sequences: Sequences, **options: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    rows = _leaves(sequences)
    query, key, value = rows
    output = jagged_attention(query, key, value, sequences.offsets, **options)
    output.backward(sequences.gradient)
    return _results(output, rows)


def looped(sequences: Sequences) -> list[Tensor]:
    rows = _leaves(sequences)
    outputs = []
    for query, key, value in zip(*(x.split(sequences.lengths) for x in rows), strict=True):
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        outputs.append(scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1))
    output = torch.cat(outputs)
    output.backward(sequences.gradient)
    return _results(output, rows)


def padded(sequences: Sequences) -> Callable[[], list[Tensor]]:
    """Padding itself is not in the time."""
    most = max(sequences.lengths)

    def pad(rows: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows.split(sequences.lengths)), batch_first=True)

    wide = [pad(x) for x in (sequences.query, sequences.key, sequences.value)]
    arriving = pad(sequences.gradient)
    is_there = torch.arange(most) < torch.tensor(sequences.lengths)[:, None]
    mask = is_there[:, None, None, :] & torch.ones(most, most, dtype=torch.bool).tril()

    def step() -> list[Tensor]:
        rows = [x.detach().requires_grad_() for x in wide]
        query, key, value = (x.transpose(1, 2) for x in rows)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        output.backward(arriving)
        return [x[is_there] for x in _results(output, rows)]

    return step


def _leaves(sequences: Sequences) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in (sequences.query, sequences.key, sequences.value)]


def _results(output: Tensor, rows: list[Tensor]) -> list[Tensor]:
    return [output.detach(), *(x.grad for x in rows if x.grad is not None)]


def render(report: Report, console: Console) -> None:
    lines = Lines(box=None, pad_edge=False)
    lines.add_column("forward and backward", no_wrap=True)
    for name in ("ms", "/ sennit"):
        lines.add_column(name, justify="right")
    for name in report.taken_s:
        if name != PRODUCTS:
            lines.add_row(name, f"{report.median(name) * 1e3:.3g}", f"{report.ratio(name):.2f}×")
    console.print(lines)
    lengths = report.sequences.lengths
    console.print(
        f"{len(lengths)} sequences, mean {statistics.mean(lengths):.0f}, longest {max(lengths)}; "
        f"{report.share_of_products:.0%} of the rate of products of {SIDE} x {SIDE}",
        soft_wrap=True,
    )


def as_json(report: Report, **settings: float) -> dict[str, Any]:
    return {
        "machine": describe(),
        "settings": settings,
        "lengths": report.sequences.lengths,
        "step_s": report.taken_s,
        "peer_over_sennit": {name: report.ratio(name) for name in (PADDED, LOOP)},
        "share_of_products": report.share_of_products,
    }
