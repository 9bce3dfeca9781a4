# SPDX-License-Identifier: Apache-2.0
# Torch types hooks and futures thinly:
# mypy: disable-error-code="name-defined,arg-type"
"""AllReduce of tensors with a codec, and DDP's gradients through it (docs/reference/codecs.md).

model = DistributedDataParallel(network)
model.register_comm_hook(None, coded_hook(Codec(kind=CodecKind.INT8, stochastic=True)))
"""

# No postponed annotations: DDP reads those of a hook.
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sennit.runtime.backend.process_group import communicator
from sennit.runtime.backend.reductions import known_reduction
from sennit.transport.array_collectives import Operation
from sennit.transport.codecs import Codec
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import Dtype, ReduceOp

_TYPES: Final = {torch.float32: Dtype.F32, torch.float16: Dtype.F16, torch.bfloat16: Dtype.BF16}
# PREMUL_SUM needs a factor, which torch's name for the operation does not hold.
_OPS: Final = {op.name: op for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)}


def all_reduce_coded(
    tensor: torch.Tensor,
    codec: Codec,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    lost: torch.Tensor | None = None,
) -> None:
    """Reduces `tensor` in place, as `dist.all_reduce`; numbers travel coded and are summed in float32.

    `lost` is error feedback, float32, as many elements as the tensor, which is float32, too. It is added to the tensor
    first, and then holds what coding took away.

    All ranks give equal codecs; for stochastic rounding, a new seed with each call. Waits for the result. Raises
    ArgumentError, before anything is sent, for a codec without fixed size, and for tensors that are not of float32,
    float16 or bfloat16, contiguous and in host memory.
    """
    if lost is not None:
        tensor.copy_(_with_lost(tensor, lost, codec, group))
    _post(tensor, codec, op, group, background=False).wait()


class CodedHook:
    """A communication hook of DDP (`coded_hook`). A model needs one of its own."""

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None, *, feedback: bool) -> None:
        # DDP asks for both.
        self.__name__ = self.__qualname__ = type(self).__qualname__
        self._codec, self._group, self._feedback = codec, group, feedback
        self._calls = 0
        # What coding took, of each parameter: parts of the tensor of its bucket. DDP changes buckets after a step.
        self._lost: dict[int, torch.Tensor] = {}
        self._buckets: dict[tuple[int, ...], torch.Tensor] = {}
        # Futures end when an operation does. One thread is enough: operations end in about the order of their starts.
        self._waiter = ThreadPoolExecutor(1, "coded hook")

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the AllReduce of a bucket, in DDP's order, which is the same on all ranks."""
        gradients = bucket.buffer()
        codec = replace(self._codec, seed=(self._codec.seed + self._calls) % (1 << 64))
        self._calls += 1
        sent = gradients
        if self._feedback:
            sent = _with_lost(gradients.detach().float(), self._lost_of(bucket), codec, self._group)
        operation = _post(sent, codec, dist.ReduceOp.AVG, self._group, background=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def finish() -> None:
            try:
                operation.wait()
                future.set_result(sent.to(gradients.dtype))
            except Exception as error:
                future.set_exception(error)

        self._waiter.submit(finish)
        return future

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """What this rank needs to go on after a restart: copies of what coding took, float32, by parameter names.

        `model` has the parameters, inside of DDP or not. Every rank saves its own.
        """
        core = communicator(self._group)
        lost = {
            name: self._lost[id(parameter)].view(parameter.shape).clone()
            for name, parameter in _named(model)
            if id(parameter) in self._lost
        }
        return {"rank": core.rank, "world": core.world, "calls": self._calls, "lost": lost}

    def load_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`. Buckets, codec and seed may have changed since: parameters are found by name.

        Raises ArgumentError, and changes nothing, if the state is that of another rank or of a world of another size,
        or has a name or shape that the model does not have.
        """
        core, parameters = communicator(self._group), dict(_named(model))
        if (state["rank"], state["world"]) != (core.rank, core.world):
            raise ArgumentError(
                f"error feedback of rank {state['rank']} of {state['world']}; allowed: of rank {core.rank} of "
                f"{core.world}"
            )
        for name, lost in state["lost"].items():
            if name not in parameters or parameters[name].shape != lost.shape:
                wanted = f"the shape {tuple(parameters[name].shape)}" if name in parameters else "names of the model"
                raise ArgumentError(f"error feedback of {name}, shape {tuple(lost.shape)}; allowed: {wanted}")
        self._calls, self._buckets = int(state["calls"]), {}
        self._lost = {
            id(parameters[name]): lost.detach().to(torch.float32).flatten().clone()
            for name, lost in state["lost"].items()
        }

    def _lost_of(self, bucket: dist.GradBucket) -> torch.Tensor:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            parts = [self._lost.get(id(one), torch.zeros(one.numel())) for one in parameters]
            self._buckets = {old: lost for old, lost in self._buckets.items() if not set(old) & set(key)}
            self._buckets[key] = torch.cat(parts)
            self._lost |= zip(key, torch.split(self._buckets[key], [part.numel() for part in parts]), strict=True)
        return self._buckets[key]


def coded_hook(codec: Codec, group: dist.ProcessGroup | None = None, *, feedback: bool = True) -> CodedHook:
    """Returns a communication hook for `DistributedDataParallel.register_comm_hook`: gradients are averaged coded.

    With `feedback` each rank adds to a gradient what coding took from the one before (error feedback), in float32.
    `state_dict` and `load_state_dict` of the hook save that. The k-th bucket of a run is rounded by the seed
    `codec.seed` + k. All ranks give equal codecs. A model needs a hook of its own.
    """
    if feedback and codec.between_hosts:
        # What is rounded is a sum of the host. No rank knows what it alone has lost.
        raise ArgumentError("error feedback with a codec between hosts alone; allowed: feedback=False")
    return CodedHook(codec, group, feedback=feedback)


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by their names outside of DDP."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner.named_parameters()


def _with_lost(given: torch.Tensor, lost: torch.Tensor, codec: Codec, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns given + lost, and keeps in `lost` what coding takes of it now: the same that the collective takes."""
    total = given + lost
    first_index = communicator(group).rank * given.numel()
    codec.encode(given.numpy(), first_index=first_index, residual=lost.numpy())
    return total


def _post(
    tensor: torch.Tensor, codec: Codec, op: Any, group: dist.ProcessGroup | None, *, background: bool
) -> Operation:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ArgumentError(f"a tensor on {tensor.device} with strides {tensor.stride()}; allowed: contiguous, on cpu")
    dtype = _TYPES.get(tensor.dtype)
    if dtype is None:
        raise ArgumentError(f"dtype {tensor.dtype}; allowed: float32, float16, bfloat16")
    if not isinstance(codec, Codec):
        raise ArgumentError(f"codec {codec!r}; allowed: a sennit.transport.codecs.Codec")
    reduction = known_reduction(op, _OPS)
    memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return communicator(group).post_coded(
        memory, None, dtype, reduction, codec, elements=tensor.numel(), background=background
    )
