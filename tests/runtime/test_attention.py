# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""Jagged attention: bits of the reference, the values of plain torch, and nothing from neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from sennit.runtime.kernels import _kernels, jagged_attention
from sennit.runtime.kernels.reference_attention import exponential, fused
from sennit.transport.errors import ArgumentError

LENGTHS = (17, 0, 1, 50, 7, 64)
TARGETS = (3, 0, 1, 0, 7, 20)


@dataclass
class Batch:
    """Random sequences, with all that the operator can be given."""

    query: Tensor
    key: Tensor
    value: Tensor
    offsets: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, implementation: str, **more: Any) -> list[Tensor]:
        """The output and all gradients of a weighted sum of it."""
        rows = [x.detach().clone().requires_grad_() for x in (self.query, self.key, self.value)]
        options = dict(self.options)
        biases = [name for name in ("position_bias", "time_bias") if name in options]
        for name in biases:
            options[name] = options[name].detach().clone().requires_grad_()
        query, key, value = rows
        options |= {"implementation": implementation} | more
        output = jagged_attention(query, key, value, self.offsets, **options)
        arriving = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
        output.backward(arriving)
        gradients = [x.grad for x in rows] + [options[name].grad for name in biases]
        return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def batch_of(
    seed: int,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: int = 2,
    dim: int = 20,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    query, key = (torch.randn(rows, heads, dim, generator=generator).to(dtype) for _ in range(2))
    value = torch.randn(rows, heads, width, generator=generator).to(dtype)
    return Batch(query, key, value, torch.tensor([0, *lengths]).cumsum(0))


def biases_of(batch: Batch) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    times = torch.randint(0, 40, (len(batch.query),), generator=generator)
    for begin, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        times[begin:end] = times[begin:end].cumsum(0)
    heads = batch.query.shape[1]
    return {
        "position_bias": torch.randn(heads, 9, generator=generator),
        "time_bias": torch.randn(heads, 4, generator=generator),
        "times": times,
        "boundaries": torch.tensor([1, 60, 300]),
    }


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "silu": {"activation": "silu", "divisor": 64.0, "scale": 0.7},
    "targets": {"targets": torch.tensor(TARGETS)},
    "window": {"targets": torch.tensor(TARGETS), "window": 5},
    "context": {"context": 3, "targets": torch.tensor(TARGETS), "window": 9, "activation": "silu"},
    "all": {"causal": False, "targets": torch.tensor(TARGETS)},
    "all in a window": {"causal": False, "window": 4, "context": 2},
}


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("case", CASES)
def test_bits_equal_the_reference(case: str, biased: bool) -> None:
    batch = batch_of(1)
    batch.options = CASES[case] | (biases_of(batch) if biased else {})
    assert same_bits(batch.run("native"), batch.run("reference"))


@pytest.mark.parametrize("instruction_set", _kernels.instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_every_instruction_set_has_the_same_bits(activation: str, dtype: torch.dtype, instruction_set: str) -> None:
    name = "native" if instruction_set == _kernels.instruction_sets()[0] else f"native-{instruction_set}"
    batch = batch_of(2, (3, 33, 12), dtype=dtype, dim=16, width=17)
    batch.options = {"activation": activation, "targets": torch.tensor([1, 4, 0])} | biases_of(batch)
    assert same_bits(batch.run(name), batch.run("reference"))


def mask_of(n: int, targets: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Who attends to whom, and how far apart they are, position by position."""
    history, context = n - targets, min(options.get("context", 0), n - targets)
    window = options.get("window")
    place = [0 if i < context else min(i, history) - max(0, context - 1) for i in range(n)]
    mask, distance = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.int64)
    for i in range(n):
        for j in range(n):
            distance[i, j] = abs(place[i] - place[j])
            near = window is None or distance[i, j] <= window
            before = j <= i or not options.get("causal", True)
            mask[i, j] = i == j or (j < history and (i < context or (near and before)))
    return mask, distance


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_plain_torch(case: str, activation: str) -> None:
    batch = batch_of(3)
    batch.options = CASES[case] | {"activation": activation} | biases_of(batch)
    if activation == "softmax":
        batch.options.pop("divisor", None)
    options = batch.options
    rows = [x.double().requires_grad_() for x in (batch.query, batch.key, batch.value)]
    position_bias, time_bias = (options[name].double().requires_grad_() for name in ("position_bias", "time_bias"))
    scale = options.get("scale", 1 / math.sqrt(batch.query.shape[2]))
    outputs = []
    for sequence, n in enumerate(LENGTHS):
        begin = int(batch.offsets[sequence])
        query, key, value = (x[begin : begin + n].transpose(0, 1) for x in rows)
        mask, distance = mask_of(n, int(options["targets"][sequence]) if "targets" in options else 0, options)
        times = options["times"][begin : begin + n]
        bucket = torch.bucketize((times[:, None] - times[None]).abs(), options["boundaries"], right=True)
        scores = query @ key.transpose(1, 2) * scale
        scores = scores + position_bias[:, distance.clamp(max=8)] + time_bias[:, bucket]
        if activation == "softmax":
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        else:
            weights = torch.nn.functional.silu(scores) * mask / options.get("divisor", 1.0)
        outputs.append((weights @ value).transpose(0, 1))
    output = torch.cat(outputs)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).double())
    expected = [output.detach(), *(x.grad for x in (*rows, position_bias, time_bias))]
    for ours, theirs in zip(batch.run("native"), expected, strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_neighbours_and_threads_change_no_bit(activation: str) -> None:
    batch = batch_of(4)
    batch.options = {"activation": activation, "targets": torch.tensor(TARGETS)}
    together = batch.run("native")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert same_bits(batch.run("native"), together)
    finally:
        torch.set_num_threads(threads)
    at = int(batch.offsets[3])
    poisoned = Batch(batch.query.clone(), batch.key, batch.value, batch.offsets, batch.options)
    poisoned.query[at + 10] = torch.nan
    others = torch.ones(len(batch.query), dtype=torch.bool)
    others[at : at + LENGTHS[3]] = False
    for ours, clean in zip(poisoned.run("native"), together, strict=True):
        assert torch.equal(ours[others], clean[others])
        assert ours[~others].isnan().any()
    # Neither do later positions change earlier ones.
    assert torch.equal(poisoned.run("native")[0][at : at + 10], together[0][at : at + 10])


def test_nested_tensors_and_slices_of_one_projection() -> None:
    batch = batch_of(5, width=20)
    expected = batch.run("native")
    together = torch.stack([batch.query, batch.key, batch.value], 2).flatten(1)
    query, key, value = together.unflatten(1, (2, 3, 20)).unbind(2)
    assert not query.is_contiguous()
    assert torch.equal(jagged_attention(query, key, value, batch.offsets), expected[0])
    nested = [torch.nested.nested_tensor_from_jagged(x, batch.offsets) for x in (batch.query, batch.key, batch.value)]
    output = jagged_attention(*nested)
    assert output.is_nested
    assert torch.equal(output.values(), expected[0])


def test_a_nested_tensor_of_heads_first_is_named() -> None:
    batch = batch_of(5, width=20)
    nested = [torch.nested.nested_tensor_from_jagged(x, batch.offsets) for x in (batch.query, batch.key, batch.value)]
    with pytest.raises(ArgumentError, match=r"use transpose\(1, 2\)"):
        jagged_attention(*(x.transpose(1, 2) for x in nested))
    with pytest.raises(ArgumentError, match="offsets beside nested tensors"):
        jagged_attention(nested[0], nested[1], nested[2], batch.offsets)
    shorter = torch.nested.nested_tensor_from_jagged(batch.value, torch.tensor([0, *LENGTHS[::-1]]).cumsum(0))
    with pytest.raises(ArgumentError, match="value has other lengths than the query"):
        jagged_attention(nested[0], nested[1], shorter)


def _doubled(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, **options: Any) -> Tensor:
    return jagged_attention(query, key, value, offsets, **options) * 2


def test_it_can_be_compiled() -> None:
    batch = batch_of(6, (5, 9))
    batch.options = biases_of(batch)
    compiled: Any = torch.compile(_doubled, backend="aot_eager")
    rows = [x.clone().requires_grad_() for x in (batch.query, batch.key, batch.value)]
    plain = [x.clone().requires_grad_() for x in (batch.query, batch.key, batch.value)]
    one = compiled(*rows, batch.offsets, **batch.options)
    other = _doubled(plain[0], plain[1], plain[2], batch.offsets, **batch.options)
    one.sum().backward()
    other.sum().backward()
    assert torch.equal(one, other)
    for a, b in zip(rows, plain, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_a_long_history_in_a_window_takes_little_memory() -> None:
    """10⁵ events: 48 rows of scores over a window of 100 are held, not 48 over all events."""
    batch = batch_of(7, (100_000,), heads=1, dim=16, width=16)
    output = jagged_attention(batch.query, batch.key, batch.value, batch.offsets, window=100)
    last = slice(100_000 - 101, 100_000)
    expected = jagged_attention(batch.query[last], batch.key[last], batch.value[last], torch.tensor([0, 101]))
    torch.testing.assert_close(output[-1], expected[-1])


def test_fused_rounds_once() -> None:
    """Also where the sum in float64 is rounded to the middle of two float32 numbers."""
    x, z = torch.tensor([1 + 2.0**-12] * 3), torch.tensor([0.0, 2.0**-60, -(2.0**-60)])
    # The product is 1 + 2^-11 + 2^-24, in the middle; to even is down.
    low, high = 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23
    assert fused(x, x, z).tolist() == [low, high, low]
    many = torch.randn(3, 100_000, dtype=torch.float64).float() * torch.tensor([1.0, 1.0, 1e-8])[:, None]
    wide = fused(many[0], many[1], many[2])
    for a, b, c, result in zip(*many[:, :300].tolist(), wide[:300].tolist(), strict=True):
        true = Fraction(a) * Fraction(b) + Fraction(c)
        around = [float(torch.nextafter(torch.tensor(result), torch.tensor(s * torch.inf))) for s in (-1, 1)]
        assert all(abs(true - Fraction(result)) <= abs(true - Fraction(other)) for other in around)


def test_exponential_is_near_the_true_one() -> None:
    x = torch.linspace(-87, 87, 100_001)
    true = x.double().exp()
    unit = torch.exp2(true.log2().floor() - 23)
    assert float(((exponential(x).double() - true).abs() / unit).max()) < 1.01
    assert exponential(torch.tensor([torch.nan])).isnan().all()


def bad(message: str, **changes: Any) -> Any:
    return pytest.param(changes, message, id=message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        bad("offsets from 0 to 29; allowed: from 0 to the number of rows, 30", offsets=torch.tensor([0, 10, 29])),
        bad(
            "offsets from 0 to 0; allowed: from 0 to the number of rows, 30",
            offsets=torch.tensor([0]),
            time_bias=torch.zeros(2, 2),
            boundaries=torch.tensor([5]),
            times=torch.zeros(30, dtype=torch.int64),
        ),
        bad("offsets: torch.int32", offsets=torch.tensor([0, 10, 30], dtype=torch.int32)),
        bad("sequence 1: 21 targets; allowed: 0 to its length, 20", targets=torch.tensor([1, 21])),
        bad("activation 'relu'; allowed: softmax, silu", activation="relu"),
        bad("divisor 2.0 with softmax", divisor=2.0),
        bad("divisor 0.0; allowed: above 0", divisor=0.0, activation="silu"),
        bad("scale nan; allowed", scale=math.nan),
        bad("window -1; allowed: 0 or more, or None", window=-1),
        bad("context -2; allowed", context=-2),
        bad(r"position_bias: torch.float32 \[3, 4\]; allowed: float32 \[2, entries\]", position_bias=torch.zeros(3, 4)),
        bad("time_bias without times and boundaries", time_bias=torch.zeros(2, 3)),
        bad("times or boundaries without time_bias", times=torch.zeros(30, dtype=torch.int64)),
        bad(
            "sequence 1, position 2: time 3 after 7; allowed: times of a history that do not fall",
            time_bias=torch.zeros(2, 2),
            boundaries=torch.tensor([5]),
            times=torch.tensor([0] * 11 + [7, 3] + [9] * 17),
        ),
        bad(
            "boundaries .*; allowed: rising, above 0",
            time_bias=torch.zeros(2, 3),
            boundaries=torch.tensor([5, 5]),
            times=torch.zeros(30, dtype=torch.int64),
        ),
        bad("implementation 'fast'; allowed", implementation="fast"),
        bad("no offsets; allowed", offsets=None),
        bad(r"value \[29, 2, 8\]; allowed: \[rows, heads, dim\]", value=torch.zeros(29, 2, 8)),
        bad("key torch.bfloat16; allowed: float32 or bfloat16", key=torch.zeros(30, 2, 8, dtype=torch.bfloat16)),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    rows = {name: torch.zeros(30, 2, 8) for name in ("query", "key", "value")}
    with pytest.raises(ArgumentError, match=message):
        jagged_attention(**rows | {"offsets": torch.tensor([0, 10, 30])} | changes)


def test_times_of_candidates_may_be_any() -> None:
    batch = batch_of(8, (4,))
    batch.options = biases_of(batch) | {"targets": torch.tensor([2]), "times": torch.tensor([5, 9, 400, 9])}
    assert same_bits(batch.run("native"), batch.run("reference"))


def test_no_sequence_at_all() -> None:
    empty = torch.zeros(0, 2, 8, requires_grad=True)
    output = jagged_attention(empty, empty, empty, torch.tensor([0]))
    output.sum().backward()
    assert output.shape == (0, 2, 8)
