# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch, one rounding an operation (docs/reference/attention.md). Slow; for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.kernels.attention_call import AttentionCall

LANES: Final = 16
"""Sums over a row are made in as many parts."""

LEAST: Final = -87.0
MOST: Final = 87.0
LOG2_E: Final = float.fromhex("0x1.715476p+0")
LN2_HIGH: Final = float.fromhex("-0x1.62e4p-1")
LN2_LOW: Final = float.fromhex("-0x1.7f7d1cp-20")
TO_INTEGER: Final = float.fromhex("0x1.8p23")
COEFFICIENTS: Final = tuple(
    map(float.fromhex, ("0x1.6a244cp-10", "0x1.1239d4p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2"))
)


def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output, of the shape and dtype of `value`, and float32 [rows, heads, 2 or 0]: each row's greatest score and
    1 / the sum of its exponentials, with softmax.
    """
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    statistics = torch.empty(*query.shape[:2], 2 if call.is_softmax else 0)
    for sequence, rows in _sequences(call):
        one = _Sequence(call, sequence, rows, query, key, value)
        weights, of_rows = one.weights()
        output[rows] = stored(one.sums(weights, one.value).transpose(0, 1), output.dtype)
        statistics[rows] = of_rows.transpose(0, 1)
    return output, statistics


def differentiate(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    statistics: Tensor,
    *,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and float32 [heads, entries] of the biases, positions first.

    `gradient` is that of the output, `statistics` what `attend` returned.
    """
    results = [torch.empty_like(rows, memory_format=torch.contiguous_format) for rows in (query, key, value)]
    of_bias = torch.zeros(query.shape[1], call.bias_entries if wants_bias else 0)
    for sequence, rows in _sequences(call):
        one = _Sequence(call, sequence, rows, query, key, value)
        arriving = gradient[rows].float().transpose(0, 1)
        weights, of_scores = one.gradients(arriving, statistics[rows].transpose(0, 1))
        if wants_bias:
            of_bias = of_bias + one.bias_gradient(of_scores)
        of_products = of_scores * call.scale
        for result, sums in zip(
            results,
            (
                one.sums(of_products, one.key),
                one.sums(of_products.transpose(1, 2), one.query, turned=True),
                one.sums(weights.transpose(1, 2), arriving, turned=True),
            ),
            strict=True,
        ):
            result[rows] = stored(sums.transpose(0, 1), result.dtype)
    return results[0], results[1], results[2], of_bias


TILE_DEPTH: Final = 32
"""Positions or columns whose products of bfloat16 one tile instruction sums up."""

_LEAST_NORMAL: Final = 2.0**-126


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x · y + z of float32 tensors with one rounding."""
    return _fused_to_odd(x, y, z).float()


def _fused_to_odd(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x · y + z in float64, so that rounding it to float32 is as if it had been exact.

    The product is exact in float64. Their sum is rounded to odd there (Boldo and Melquiond, 2008).
    """
    product, z = x.double() * y.double(), z.double()
    total = product + z
    other = total - product
    error = (product - (total - other)) + (z - other)
    bits = total.view(torch.int64)
    odd = torch.where((error > 0) == (total > 0), bits | 1, (bits - 1) | 1)
    is_inexact = (error != 0) & total.isfinite()
    return torch.where(is_inexact, odd, bits).view(torch.float64)


def flushed(x: Tensor) -> Tensor:
    """float32 with ±0 for numbers below 2^-126."""
    return torch.where(x.abs() < _LEAST_NORMAL, x * 0, x)


def flushed_fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """`fused` of flushed numbers; ±0 if the result is below 2^-126 where exponents have no limit."""
    exact = _fused_to_odd(x, y, z)
    return torch.where(exact.abs() < _LEAST_NORMAL - 2.0**-151, exact * 0, exact).float()


def narrowed(x: Tensor) -> Tensor:
    """float32 with the precision of bfloat16, to nearest even; 0 below 2^-126."""
    return flushed(x).bfloat16().float()


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 as `dtype`, to nearest even. In bfloat16 there is one NaN."""
    return x if dtype == torch.float32 else x.to(dtype).masked_fill(x.isnan(), torch.nan)


def exponential(x: Tensor) -> Tensor:
    """e^x of float32, to 1 unit in the last place; below -87 and above 87 that of the limit. NaN stays NaN."""
    x = x.clamp(LEAST, MOST)
    constant = torch.full_like
    shifted = fused(x, constant(x, LOG2_E), constant(x, TO_INTEGER))
    n = shifted - TO_INTEGER
    r = fused(n, constant(n, LN2_LOW), fused(n, constant(n, LN2_HIGH), x))
    p = constant(r, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        p = fused(p, r, constant(r, coefficient))
    p = fused(p * r, r, r) + 1.0
    power = ((n.nan_to_num().to(torch.int32) + 127) << 23).view(torch.float32)
    return p * power


def lane_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension: column j is added in lane j mod 16, then halves of the lanes."""
    rest = -x.shape[-1] % LANES
    parts = torch.nn.functional.pad(x, (0, rest)).reshape(*x.shape[:-1], -1, LANES)
    lanes = torch.zeros_like(parts[..., 0, :]) if parts.shape[-2] else x.new_zeros(*x.shape[:-1], LANES)
    for part in parts.unbind(-2):
        lanes = lanes + part
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes.squeeze(-1)


def _sequences(call: AttentionCall) -> Iterator[tuple[int, slice]]:
    """Those that are not empty, and their rows."""
    for sequence, (begin, end) in enumerate(itertools.pairwise(call.offsets.tolist())):
        if begin < end:
            yield sequence, slice(begin, end)


class _Sequence:
    """One sequence in float32: query, key and value [heads, n, dim]."""

    def __init__(
        self, call: AttentionCall, sequence: int, rows: slice, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        self.call = call
        self.is_bf16 = query.dtype == torch.bfloat16
        self.query, self.key, self.value = (x[rows].float().transpose(0, 1) for x in (query, key, value))
        n = rows.stop - rows.start
        self.history = n - (0 if call.targets is None else int(call.targets[sequence]))
        context = min(call.context, self.history)
        place = torch.arange(n).clamp(max=self.history)
        if context:
            place = (place - (context - 1)).clamp(min=0)
        self.distance = (place[:, None] - place[None, :]).abs()
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        self.mask = j < self.history
        if call.causal:
            self.mask = self.mask & (j <= i)
        if call.window is not None:
            self.mask = self.mask & (self.distance <= call.window)
        self.mask = self.mask | ((i < context) & (j < self.history)) | (i == j)
        self.time_bucket: Tensor | None = None
        if call.times is not None and call.boundaries is not None:
            times = call.times[rows]
            apart = (times[:, None] - times[None, :]).abs()
            self.time_bucket = torch.bucketize(apart, call.boundaries, right=True)

    def scores(self) -> Tensor:
        products = self.products(self.query, self.key)
        bias = self.bias()
        if bias is None:
            return products * self.call.scale
        return fused(products, torch.full_like(products, self.call.scale), bias)

    def bias(self) -> Tensor | None:
        call = self.call
        if not call.bias_entries:
            return None
        bias = torch.zeros(self.query.shape[0], *self.distance.shape)
        if call.position_bias is not None:
            bias = bias + call.position_bias[:, self.distance.clamp(max=call.position_bias.shape[1] - 1)]
        if call.time_bias is not None and self.time_bucket is not None:
            bias = bias + call.time_bias[:, self.time_bucket]
        return bias

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """[heads, n, n]: left[i] · right[j], column after column of them."""
        result = torch.zeros(left.shape[0], left.shape[1], right.shape[1])
        if self.is_bf16:
            left, right = flushed(left), flushed(right)
            return self._in_blocks(
                result,
                left.shape[2],
                lambda column, sums: flushed_fused(left[:, :, None, column], right[:, None, :, column], sums),
            )
        for column in range(left.shape[2]):
            result = fused(left[:, :, None, column], right[:, None, :, column], result)
        return result

    def sums(self, weights: Tensor, rows: Tensor, *, turned: bool = False) -> Tensor:
        """[heads, n, dim]: sums over j of weights[i, j] · rows[j], one after another, where i and j attend."""
        mask = (self.mask.T if turned else self.mask)[None, :, :, None]
        add = fused
        if self.is_bf16:
            weights, rows, add = narrowed(weights), flushed(rows), flushed_fused

        def with_position(j: int, sums: Tensor) -> Tensor:
            return torch.where(mask[:, :, j], add(weights[:, :, j, None], rows[:, None, j], sums), sums)

        result = torch.zeros(rows.shape)
        if self.is_bf16:
            return self._in_blocks(result, rows.shape[1], with_position)
        for j in range(rows.shape[1]):
            result = with_position(j, result)
        return result

    @staticmethod
    def _in_blocks(result: Tensor, count: int, add: Callable[[int, Tensor], Tensor]) -> Tensor:
        """`result` with sums of 32 added to it, block after block, of even indices and of odd ones apart."""
        for first in range(0, count, TILE_DEPTH):
            even, odd = torch.zeros_like(result), torch.zeros_like(result)
            for index in range(first, min(count, first + TILE_DEPTH)):
                if index % 2:
                    odd = add(index, odd)
                else:
                    even = add(index, even)
            result = flushed(result + flushed(even + odd))
        return result + 0.0

    def weights(self) -> tuple[Tensor, Tensor]:
        scores = self.scores()
        if not self.call.is_softmax:
            return scores * self._logistic(scores) * self._share, scores.new_empty(*scores.shape[:2], 0)
        most = scores.masked_fill(~self.mask, -torch.inf).amax(-1)
        powers = exponential(scores - most[..., None]).masked_fill(~self.mask, 0)
        share = 1.0 / lane_sum(powers)
        return powers * share[..., None], torch.stack([most, share], -1)

    def gradients(self, arriving: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, and gradients of scores, [heads, n, n] each."""
        scores, of_weights = self.scores(), self.products(arriving, self.value)
        if not self.call.is_softmax:
            y = self._logistic(scores)
            slope = y * fused(scores, 1.0 - y, torch.ones_like(y))
            return scores * y * self._share, of_weights * slope * self._share
        most, share = statistics[..., :1], statistics[..., 1:]
        weights = exponential(scores - most) * share
        mean = lane_sum((weights * of_weights).masked_fill(~self.mask, 0))
        return weights, weights * (of_weights - mean[..., None])

    def bias_gradient(self, of_scores: Tensor) -> Tensor:
        """[heads, entries]: rows one after another, in each of them columns."""
        call = self.call
        parts = []
        for bias, entry in ((call.position_bias, self.distance), (call.time_bias, self.time_bucket)):
            if bias is None or entry is None:
                continue
            result = torch.zeros_like(bias)
            entry = entry.clamp(max=bias.shape[1] - 1)
            for i, j in self.mask.nonzero().tolist():
                at = int(entry[i, j])
                result[:, at] = result[:, at] + of_scores[:, i, j]
            parts.append(result)
        return torch.cat(parts, 1)

    @property
    def _share(self) -> float:
        return float(torch.tensor(1 / self.call.divisor, dtype=torch.float32))

    @staticmethod
    def _logistic(scores: Tensor) -> Tensor:
        return 1.0 / (1.0 + exponential(-scores))
