# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,attr-defined,union-attr,arg-type,misc"
"""The models and checks that torch installs for tests of FSDP2, DTensor and DCP, over sennit."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.runtime.frameworks.over_sennit import group_over_sennit

STEPS = 3


def transformer() -> tuple[Any, Any]:
    """torch's small transformer, and its class. Without dropout, whose masks depend on the placement."""
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    torch.manual_seed(7)
    return Transformer(ModelArgs(dropout_p=0.0)), Transformer


def tokens(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    arguments = model.model_args
    return torch.randint(arguments.vocab_size, (2, arguments.max_seq_len), generator=generator)


def sharded(world: int) -> tuple[Any, Any, torch.optim.Optimizer]:
    """The transformer, its copy with each layer in shards, and the copy's optimiser."""
    model, _ = transformer()
    copied = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in copied.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(copied, mesh=mesh)
    return model, copied, torch.optim.Adam(copied.parameters(), lr=0.01)


def fsdp2(rank: int, world: int, folder: str) -> None:
    """After each backward pass torch's `check_sharded_parity` compares with a replica whose gradients are averaged."""
    with group_over_sennit(rank, world, folder, "fsdp2"):
        import unittest

        from torch.testing._internal.common_fsdp import check_sharded_parity
        from torch.testing._internal.common_utils import TestCase

        check: unittest.TestCase = TestCase()
        model, copied, optimizer = sharded(world)
        reference = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(STEPS):
            losses = []
            for one in (model, copied):
                losses.append(one(tokens(model, 10 * step + rank)).square().mean())
                losses[-1].backward()
            for weight in model.parameters():
                dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
            check_sharded_parity(check, model, copied)
            torch.testing.assert_close(losses[1], losses[0])
            for one in (reference, optimizer):
                one.step()
                one.zero_grad()
        check_sharded_parity(check, model, copied)


def checkpoint(rank: int, world: int, folder: str) -> None:
    """DCP saves shards of weights and of Adam, and loads them into a new model: torch's `VerifyStateDictMixin`."""
    with group_over_sennit(rank, world, folder, "checkpoint"):
        from torch.testing._internal.common_utils import TestCase
        from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

        class Check(VerifyStateDictMixin, TestCase):
            pass

        check = Check()
        model, copied, optimizer = sharded(world)
        reference = torch.optim.Adam(model.parameters(), lr=0.01)
        for one, its_optimizer in ((model, reference), (copied, optimizer)):
            one(tokens(model, 1)).square().mean().backward()
            its_optimizer.step()
        weights, states = get_state_dict(copied, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/saved")
        _, fresh, its_optimizer = sharded(world)
        weights, states = get_state_dict(fresh, its_optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=f"{folder}/saved")
        set_state_dict(fresh, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        weights, states = get_state_dict(fresh, its_optimizer)
        check._verify_msd(model.state_dict(), weights)
        check._verify_osd(model, reference, reference.state_dict(), states)


def tensor_parallel(rank: int, world: int, folder: str) -> None:
    """torch's transformer, parallelised by its own plan, gives the loss and the gradients of one process.

    DTensor runs on functional collectives: torch's CommDebugMode counts them. Attention itself is local: DTensor
    has none on CPUs.
    """
    with group_over_sennit(rank, world, folder, "tensor_parallel"):
        mesh = init_device_mesh("cpu", (world,))
        for use_sequence in (False, True):
            model, kind = transformer()
            parallel = kind.parallelize(copy.deepcopy(model), mesh, use_sequence, local_output_for_attn=True)
            given = tokens(model, 3)
            with CommDebugMode() as calls:
                loss = parallel(given).square().mean()
                loss.backward()
            expected = model(given).square().mean()
            expected.backward()
            torch.testing.assert_close(whole(loss), expected)
            for mine, reference in zip(parallel.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(whole(mine.grad), reference.grad, atol=1e-5, rtol=1e-4)
            counts = calls.get_comm_counts()
            assert sum(counts.values()) > 0
            kinds = torch.ops.c10d_functional
            assert counts[kinds.reduce_scatter_tensor if use_sequence else kinds.all_reduce] > 0, counts


def compiled(rank: int, world: int, folder: str) -> None:
    """The parallel transformer and its collectives in one compiled graph: the bits of the same one, not compiled."""
    with group_over_sennit(rank, world, folder, "compiled"):
        mesh = init_device_mesh("cpu", (world,))
        model, kind = transformer()
        parallel = kind.parallelize(model, mesh, False, local_output_for_attn=True)
        given = tokens(model, 4)
        expected = whole(parallel(given))
        graph = torch.compile(parallel, backend="aot_eager", fullgraph=True)
        assert torch.equal(whole(graph(given)), expected)


def dtensor(rank: int, world: int, folder: str) -> None:
    """torch's DTensorConverter puts the arguments of a function into every placement: the results are the same."""
    with group_over_sennit(rank, world, folder, "dtensor"):
        from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter

        mesh = init_device_mesh("cpu", (world,))
        generator = torch.Generator().manual_seed(5)
        left, right = (torch.randn(4 * world, 4 * world, generator=generator) for _ in range(2))
        functions: list[tuple[Any, tuple[Any, ...]]] = [
            (torch.add, (left, right)),
            (torch.mm, (left, right)),
            (torch.sum, (left, 0)),
            (torch.mean, (left,)),
            (torch.amax, (left, 1)),
            (torch.softmax, (left, 1)),
            (torch.transpose, (left, 0, 1)),
            (torch.cat, ([left, right], 0)),
            (torch.nn.functional.layer_norm, (left, (4 * world,))),
        ]
        for function, arguments in functions:
            expected = function(*arguments)
            converter = DTensorConverter(mesh, arguments, {})
            for given, _ in converter:
                torch.testing.assert_close(whole(function(*given)), expected)
            assert converter.successful()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
