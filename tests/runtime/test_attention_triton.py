# SPDX-License-Identifier: Apache-2.0
# Torch types some functions thinly:
# mypy: disable-error-code="no-untyped-call"
"""Jagged attention in Triton: the bits of the native kernels in float32, on the CPU in Triton's interpreter.

Sequences are short: each operation of the interpreter takes as long as thousands of numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from sennit.runtime.kernels import jagged_attention, triton_attention
from sennit.runtime.kernels.attention_call import AttentionCall
from sennit.runtime.kernels.triton_attention import AttentionTiles, TritonAttention
from sennit.transport.errors import ArgumentError, Unsupported
from tests.extent import briefly
from tests.runtime import device_double
from tests.runtime.device_double import OnDevice
from tests.runtime.test_attention import Batch, batch_of, biases_of, same_bits

LENGTHS = (9, 0, 1, 21, 18)
TARGETS = torch.tensor([3, 0, 1, 0, 7])

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "silu": {"activation": "silu", "divisor": 64.0, "scale": 0.7},
    "targets": {"targets": TARGETS},
    "targets alone": {"targets": torch.tensor([9, 0, 1, 20, 18]), "context": 2, "window": 3, "activation": "silu"},
    "window": {"targets": TARGETS, "window": 5},
    "window of nothing": {"targets": TARGETS, "window": 0},
    "context": {"context": 3, "targets": TARGETS, "window": 9, "activation": "silu"},
    "context of all": {"context": 40},
    "all": {"causal": False, "targets": TARGETS, "activation": "silu"},
    "all in a window": {"causal": False, "window": 4, "context": 2, "targets": TARGETS},
}

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def tiles(rows: int, columns: int) -> AttentionTiles:
    return AttentionTiles(rows=rows, columns=columns, depth=16, width=16, entries=8, warps=1)


def given(case: str, *, biased: bool, dtype: torch.dtype = torch.float32) -> Batch:
    """One head of 5 columns, values of 18: more than a program has."""
    batch = batch_of(1, LENGTHS, heads=1, dim=5, width=18, dtype=dtype)
    batch.options = CASES[case] | (biases_of(batch) if biased else {})
    return batch


@interpreted
@pytest.mark.parametrize(
    ("case", "rows", "columns"),
    briefly(
        [(case, *shape) for case in CASES for shape in ((16, 32), (32, 16))],
        [("all in a window", 32, 16), ("targets", 16, 32)],
    ),
)
def test_it_has_the_bits_of_the_native_kernels(case: str, rows: int, columns: int) -> None:
    batch = given(case, biased=False)
    with mock.patch.object(triton_attention, "tiles_for", return_value=tiles(rows, columns)):
        found = batch.run("triton")
    assert same_bits(found, batch.run("native"))


@interpreted
@pytest.mark.parametrize("case", briefly(CASES, ["context"]))
def test_gradients_of_biases_have_the_bits_of_the_native_kernels(case: str) -> None:
    """Also where not all gradients of scores are kept at a time."""
    batch = given(case, biased=True)
    with (
        mock.patch.object(triton_attention, "tiles_for", return_value=tiles(16, 16)),
        mock.patch.object(triton_attention, "SCRATCH_FLOATS", 500),
    ):
        found = batch.run("triton")
    assert same_bits(found, batch.run("native"))


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # by NumPy
@pytest.mark.parametrize("activation", briefly(["softmax", "silu"], ["silu"]))
def test_numbers_that_are_none_stay_where_they_may_be_seen(activation: str) -> None:
    batch = batch_of(4, (3, 20), heads=1, dim=5, width=5)
    batch.options = {"activation": activation, "targets": torch.tensor([0, 2])}
    batch.value[12, 0, 1] = torch.inf
    batch.key[13, 0, 2] = torch.nan
    with mock.patch.object(triton_attention, "tiles_for", return_value=tiles(16, 16)):
        found = batch.run("triton")
    for ours, theirs in zip(found, batch.run("native"), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert found[0][:12].isfinite().all()
    assert not found[0][12:].isfinite().all()


@interpreted
@pytest.mark.parametrize("case", briefly(["targets", "silu"], ["silu"]))
def test_bfloat16_is_near_the_native_kernels(case: str) -> None:
    """The order of its sums is that of the device."""
    batch = given(case, biased=False, dtype=torch.bfloat16)
    for ours, theirs in zip(batch.run("triton"), batch.run("native"), strict=True):
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 2.0**-7


@interpreted
def test_nothing_and_slices_of_one_projection() -> None:
    empty = torch.zeros(0, 2, 4, requires_grad=True)
    output = jagged_attention(empty, empty, empty, torch.zeros(3, dtype=torch.int64), implementation="triton")
    output.sum().backward()
    assert output.shape == (0, 2, 4)
    batch = batch_of(5, (6,), heads=1, dim=4, width=4)
    together = torch.stack([batch.query, batch.key, batch.value], 2).flatten(1)
    query, key, value = together.unflatten(1, (1, 3, 4)).unbind(2)
    assert not query.is_contiguous()
    found = jagged_attention(query, key, value, batch.offsets, implementation="triton")
    assert torch.equal(found, jagged_attention(batch.query, batch.key, batch.value, batch.offsets))


def test_a_machine_without_a_gpu_is_named() -> None:
    with (
        mock.patch.object(knobs.runtime, "interpret", False),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(Unsupported, match=r"implementation triton.*no CUDA device"),
    ):
        TritonAttention()


def call_of(**changed: Any) -> tuple[AttentionCall, tuple[Tensor, Tensor, Tensor]]:
    """A call of two sequences on `device_double`, and its rows."""
    arguments: dict[str, Any] = {
        "position_bias": torch.zeros(1, 3),
        "time_bias": torch.zeros(1, 2),
        "offsets": torch.tensor([0, 3, 7]),
        "targets": torch.tensor([1, 0]),
        "times": torch.tensor([4, 5, 1, 0, 2, 2, 9]),
        "boundaries": torch.tensor([3]),
    }
    there: dict[str, Any] = {name: OnDevice(tensor) for name, tensor in arguments.items()} | changed
    fields: list[Any] = [*there.values(), "silu", 1.0, 1.0, True, 0, None]
    query, key, value = (OnDevice(torch.zeros(7, 1, 4)) for _ in range(3))
    return AttentionCall(*fields), (query, key, value)


def test_checks_wait_once_for_a_device() -> None:
    with device_double.Device() as device:
        call, rows = call_of()
        call.check(*rows)
        assert device.waits.total() == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": OnDevice(torch.tensor([0, 3, 8]))}, "offsets from 0 to 8; allowed: from 0 to the number of rows"),
        ({"offsets": OnDevice(torch.tensor([0, 9, 7]))}, "offsets from 0 to 7; .* never falling"),
        (
            {"offsets": OnDevice(torch.tensor([0])), "targets": OnDevice(torch.zeros(0, dtype=torch.int64))},
            "offsets from 0 to 0; allowed: from 0 to the number of rows",
        ),
        ({"targets": OnDevice(torch.tensor([1, 5]))}, "sequence 1: 5 targets; allowed: 0 to its length, 4"),
        ({"times": OnDevice(torch.tensor([4, 5, 1, 0, 2, 1, 9]))}, "sequence 1, position 2: time 1 after 2; allowed"),
        ({"boundaries": OnDevice(torch.tensor([0]))}, r"boundaries \[0\]; allowed: rising, above 0"),
        ({"times": torch.zeros(7, dtype=torch.int64)}, "times on cpu, query on lazy:0; allowed: one device"),
    ],
)
def test_what_does_not_fit_is_named_on_a_device(changed: dict[str, Any], message: str) -> None:
    with device_double.Device():
        call, rows = call_of(**changed)
        with pytest.raises(ArgumentError, match=message):
            call.check(*rows)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_compiled_products_add_up_in_the_order_of_the_reference() -> None:
    """For an H100, which need not be there: fused multiply-adds over rising indices, and nothing else."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("product_order.py"))],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    found = json.loads(done.stdout)
    # 32 threads share the 256 sums.
    assert found == {"orders": [[[k, k] for k in range(16)]] * 8, "others": 0}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "biased"), [("causal", False), ("window", True), ("context", True), ("all in a window", True)]
)
def test_a_gpu_has_the_bits_of_the_native_kernels(case: str, biased: bool) -> None:
    batch = batch_of(1, (9, 0, 1, 210, 180), heads=3, dim=33, width=80)
    batch.options = CASES[case] | (biases_of(batch) if biased else {})
    assert same_bits(on_a_gpu(batch), batch.run("native"))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_bfloat16_on_a_gpu_repeats_and_is_near(activation: str) -> None:
    batch = batch_of(2, (300, 0, 129), heads=2, dim=64, width=64, dtype=torch.bfloat16)
    batch.options = {"activation": activation, "divisor": 300.0 if activation == "silu" else 1.0}
    found = on_a_gpu(batch)
    assert same_bits(on_a_gpu(batch), found)
    # Neighbours change nothing.
    alone = slice(300, 429)
    one = Batch(batch.query[alone], batch.key[alone], batch.value[alone], torch.tensor([0, 129]), batch.options)
    assert torch.equal(on_a_gpu(one)[0], found[0][alone])
    for ours, theirs in zip(found, batch.run("native"), strict=True):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 2.0**-7


def on_a_gpu(batch: Batch) -> list[Tensor]:
    """What `run` gives there, as tensors of the CPU."""
    options = {name: one.cuda() if isinstance(one, Tensor) else one for name, one in batch.options.items()}
    there = Batch(batch.query.cuda(), batch.key.cuda(), batch.value.cuda(), batch.offsets.cuda(), options)
    return [one.cpu() for one in there.run("triton")]
