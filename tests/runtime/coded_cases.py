# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""AllReduce with codecs: run on each rank by test_coded.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend import all_reduce_coded, coded_hook
from sennit.transport import codec_reference
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.errors import ArgumentError

INT8 = Codec(kind=CodecKind.INT8, block=64, stochastic=True, seed=11)


def coded(values: torch.Tensor, first_index: int, seed: int = INT8.seed) -> torch.Tensor:
    codec = Codec(kind=CodecKind.INT8, block=64, stochastic=True, seed=seed)
    data = values.detach().numpy()
    codes = codec_reference.encode(codec, data, first_index=first_index)
    return torch.from_numpy(codec_reference.decode(codec, codes, data.size))


def made(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size))


def in_place(rank: int, world: int) -> None:
    for size in (0, 1, 1_000, 100_003):
        tensor = made(rank, size)
        all_reduce_coded(tensor, INT8)
        parts = [coded(made(peer, size), peer * size) for peer in range(world)]
        assert torch.equal(tensor, coded(sum(parts[1:], parts[0]), world * size))
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.full((5, 7), rank + 1.0, dtype=dtype)
        all_reduce_coded(tensor, Codec(kind=CodecKind.BF16), dist.ReduceOp.MAX)
        assert torch.equal(tensor, torch.full((5, 7), float(world), dtype=dtype))
    for wrong, match in (
        (torch.zeros(4, 4).t(), r"strides \(1, 4\)"),
        (torch.zeros(4, device="meta"), "a tensor on meta"),
        (torch.zeros(4, dtype=torch.int32), "dtype torch.int32; allowed: float32"),
    ):
        with pytest.raises(ArgumentError, match=match):
            all_reduce_coded(wrong, INT8)
    with pytest.raises(ArgumentError, match="reduce op BXOR"):
        all_reduce_coded(torch.zeros(4), INT8, dist.ReduceOp.BXOR)
    with pytest.raises(ArgumentError, match="LOSSLESS in a collective"):
        all_reduce_coded(torch.zeros(4), Codec(kind=CodecKind.LOSSLESS))


def hooked(rank: int, world: int, feedback: bool) -> None:
    """The gradients of DDP are those of the definition, step by step, and all ranks have the same."""
    model = DistributedDataParallel(torch.nn.Linear(300, 1, bias=False), bucket_cap_mb=25)
    model.register_comm_hook(None, coded_hook(INT8, feedback=feedback))
    lost = [torch.zeros(300) for _ in range(world)]
    for step in range(4):
        model.zero_grad()
        inputs = [made(10 * step + peer, 300) for peer in range(world)]
        model(inputs[rank].reshape(1, 300)).sum().backward()
        seed, parts = INT8.seed + step, []
        for peer, gradient in enumerate(inputs):
            given = gradient + lost[peer]
            parts.append(coded(given, peer * 300, seed))
            lost[peer] = given - parts[peer] if feedback else lost[peer]
        expected = coded(sum(parts[1:], parts[0]) / world, world * 300, seed)
        got = next(model.parameters()).grad.reshape(-1)
        np.testing.assert_array_equal(got.numpy(), expected.numpy(), err_msg=f"step {step}")


def converges(rank: int, world: int) -> float:
    """Fifteen values a number, of which each rank keeps what is lost. Returns the loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 1, bias=False))
    model.register_comm_hook(None, coded_hook(Codec(kind=CodecKind.MX4)))
    target = made(77, 64).reshape(1, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.zeros(())
    for step in range(300):
        inputs = made(1_000 + 2 * step + rank, 64 * 32).reshape(32, 64)
        loss = (model(inputs) - inputs @ target.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def differs(rank: int, world: int) -> None:
    """A hook whose seed differs: the backward pass of every rank raises, and says both."""
    model = DistributedDataParallel(torch.nn.Linear(300, 1, bias=False))
    codec = Codec(kind=CodecKind.INT8, stochastic=True, seed=5 + rank)
    model.register_comm_hook(None, coded_hook(codec))
    with pytest.raises(RuntimeError) as caught:
        model(made(rank, 300).reshape(1, 300)).sum().backward()
    assert "seed 5" in str(caught.value), caught.value
    assert "seed 6" in str(caught.value), caught.value
