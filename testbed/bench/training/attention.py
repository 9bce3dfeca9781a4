# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""`sennit bench attention`: forward and backward over sequences of different lengths, beside torch's own attention.

Lengths are of a gamma distribution, as in histories of users. The peers get the same sequences: padded to the longest
with a mask, and one after another. All of it is done in float32 and in bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import gc
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
from sennit.runtime.kernels import _kernels, jagged_attention
from sennit.testbed.bench.peak_memory import peak_bytes, reset_peak

SHAPE_OF_LENGTHS: Final = 1.5
"""The gamma distribution's shape. Its mean is given."""

SENNIT, PADDED, LOOP, PRODUCTS = "sennit", "padded, with a mask", "one sequence after another", "large products"
SILU, BIASED, NEAR = "sennit, silu", "sennit, silu, biases", "sennit, in a window"
PEERS: Final = (PADDED, LOOP)
SIDE: Final = 1024
"""Rows and columns of a large product."""

WINDOW: Final = 64
"""Places that a position looks back in `NEAR`."""

TIME_BUCKETS: Final = 40
"""Biases by time in `BIASED`, between powers of two."""


def narrow(way: str) -> str:
    """The name of the same way in bfloat16."""
    return f"{way}, bf16"


@dataclass(frozen=True)
class Sequences:
    """Rows of sequences, one after another, and the gradient that arrives."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    offsets: Tensor

    def bfloat16(self) -> Sequences:
        query, key, value, gradient = (x.bfloat16() for x in (self.query, self.key, self.value, self.gradient))
        return Sequences(query, key, value, gradient, self.offsets)

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in self.offsets.diff()]

    @property
    def operations(self) -> float:
        """Floating-point operations of a forward and a backward pass: seven products over the pairs that attend."""
        _, heads, dim = self.query.shape
        return 7.0 * 2 * heads * dim * sum(length * (length + 1) / 2 for length in self.lengths)


@dataclass(frozen=True)
class Report:
    """Processor seconds of each pass, by what made it, and bytes that one of them added to the process."""

    sequences: Sequences
    taken_s: dict[str, list[float]]
    added_bytes: dict[str, int]

    def median(self, name: str) -> float:
        return statistics.median(self.taken_s[name])

    def ratio(self, name: str) -> float:
        """The median over turns of a peer's time / ours of the same precision. Above 1 sennit is faster."""
        ours = narrow(SENNIT) if name.endswith(narrow("")) else SENNIT
        pairs = zip(self.taken_s[name], self.taken_s[ours], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def memory_ratio(self, name: str) -> float:
        """What a pass of sennit adds to the process / what a peer's adds."""
        ours = narrow(SENNIT) if name.endswith(narrow("")) else SENNIT
        return self.added_bytes[ours] / self.added_bytes[name]

    def share_of_products(self, name: str = SENNIT) -> float:
        """Operations a second of sennit / those of a large product in float32, in the same turns."""
        rates = zip(self.taken_s[PRODUCTS], self.taken_s[name], strict=True)
        per_product = 2.0 * SIDE**3
        return statistics.median(self.sequences.operations / ours / (per_product / theirs) for theirs, ours in rates)

    @property
    def products_ratio(self) -> float:
        """The rate of large products in bfloat16 / that in float32."""
        pairs = zip(self.taken_s[PRODUCTS], self.taken_s[narrow(PRODUCTS)], strict=True)
        return statistics.median(wide / short for wide, short in pairs)


def draw(*, count: int, mean: float, longest: int, heads: int, dim: int, seed: int) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    # A gamma distribution of this shape: the sum of an exponential one and half a squared normal one.
    exponential = -torch.rand(count, generator=generator).log()
    lengths = (exponential + torch.randn(count, generator=generator).square() / 2) * mean / SHAPE_OF_LENGTHS
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.long().clamp(1, longest).cumsum(0)])
    rows = [torch.randn(int(offsets[-1]), heads, dim, generator=generator) for _ in range(4)]
    return Sequences(rows[0], rows[1], rows[2], rows[3], offsets)


def run(*, count: int, mean: float, longest: int, heads: int, dim: int, rounds: int, seed: int) -> Report:
    sequences = draw(count=count, mean=mean, longest=longest, heads=heads, dim=dim, seed=seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways = _ways(sequences, longest)
        # First of all, before freed memory is there to be used again.
        added = {name: added_bytes(way) for name, way in ways.items() if PRODUCTS not in name}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        with one_core():
            for number in range(rounds + 1):
                for name in list(ways)[:: 1 if number % 2 else -1]:
                    step = ways[name]()
                    began_s = time.process_time()
                    step()
                    # The first turn warms caches and allocators.
                    if number:
                        taken[name].append(time.process_time() - began_s)
    finally:
        torch.set_num_threads(threads)
    return Report(sequences, taken, added)


Step = Callable[[], object]


def _ways(sequences: Sequences, longest: int) -> dict[str, Callable[[], Step]]:
    """By name what makes a step. Making it is neither in the time nor in the memory."""
    silu: dict[str, Any] = {"activation": "silu", "divisor": float(longest)}
    found: dict[str, Callable[[], Step]] = {}
    for name, rows in ((str, sequences), (narrow, sequences.bfloat16())):
        left = torch.randn(SIDE, SIDE).to(rows.query.dtype)
        found |= {
            name(SENNIT): _attending(rows, {}),
            name(SILU): _attending(rows, silu),
            name(BIASED): _attending(rows, silu | biases(rows, longest)),
            name(NEAR): _attending(rows, {"window": WINDOW}),
            name(PADDED): functools.partial(padded, rows),
            name(LOOP): functools.partial(_looping, rows),
            name(PRODUCTS): functools.partial(_multiplying, left),
        }
    return found


def _attending(sequences: Sequences, options: dict[str, Any]) -> Callable[[], Step]:
    return lambda: lambda: attend(sequences, **options)


def _looping(sequences: Sequences) -> Step:
    return lambda: looped(sequences)


def _multiplying(left: Tensor) -> Step:
    return lambda: left @ left


def biases(sequences: Sequences, longest: int) -> dict[str, Any]:
    """By distance and by time, as HSTU has them. An event comes after the one before by up to a day."""
    heads = sequences.query.shape[1]
    generator = torch.Generator().manual_seed(1)
    apart = torch.randint(1, 86_400, (len(sequences.query),), generator=generator)
    return {
        "position_bias": torch.randn(heads, longest, generator=generator).requires_grad_(),
        "time_bias": torch.randn(heads, TIME_BUCKETS, generator=generator).requires_grad_(),
        # They need not begin anew with each sequence: differences count.
        "times": apart.cumsum(0),
        "boundaries": 2 ** torch.arange(TIME_BUCKETS - 1),
    }


def added_bytes(way: Callable[[], Step]) -> int:
    """What a step adds to the process at most, beside its inputs."""
    step = way()
    step()  # What the first one alone brings, such as libraries, stays.
    gc.collect()
    # What is freed stays with the process otherwise, and the next one uses it.
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    step()
    return peak_bytes() - before


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
    """A step on padded rows."""
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
    for name in ("ms", "/ sennit", "MiB added"):
        lines.add_column(name, justify="right")
    for name in report.taken_s:
        if PRODUCTS not in name:
            added = f"{report.added_bytes[name] / 2**20:.0f}"
            lines.add_row(name, f"{report.median(name) * 1e3:.3g}", f"{report.ratio(name):.2f}×", added)
    console.print(lines)
    lengths = report.sequences.lengths
    shares = ", ".join(f"{report.share_of_products(name):.0%} ({name})" for name in (SENNIT, narrow(SENNIT)))
    console.print(
        f"{len(lengths)} sequences, mean {statistics.mean(lengths):.0f}, longest {max(lengths)}; of the rate of fp32 "
        f"products of {SIDE} x {SIDE}: {shares}; bf16 products: {report.products_ratio:.1f} times that rate",
        soft_wrap=True,
    )


def as_json(report: Report, **settings: float) -> dict[str, Any]:
    return {
        "machine": describe(),
        "settings": settings,
        "lengths": report.sequences.lengths,
        "step_s": report.taken_s,
        "added_bytes": report.added_bytes,
        "peer_over_sennit": {way(name): report.ratio(way(name)) for way in (str, narrow) for name in PEERS},
        "memory_over_peer": {way(PADDED): report.memory_ratio(way(PADDED)) for way in (str, narrow)},
        "share_of_products": report.share_of_products(),
        "bf16_share_of_fp32_products": report.share_of_products(narrow(SENNIT)),
        "bf16_products_over_fp32": report.products_ratio,
        "attention_sets": _kernels.attention_sets(),
    }
