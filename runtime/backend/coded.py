# SPDX-License-Identifier: Apache-2.0
# Torch types hooks and futures thinly:
# mypy: disable-error-code="name-defined,arg-type"
"""AllReduce of tensors with a codec, and DDP's gradients through it (docs/reference/codecs.md).

model = DistributedDataParallel(network)
model.register_comm_hook(None, coded_hook(Codec(kind=CodecKind.INT8, stochastic=True)))
"""

# No postponed annotations: DDP reads those of a hook.
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from sennit.runtime.backend.process_group import communicator
from sennit.transport.array_collectives import Operation
from sennit.transport.codecs import Codec
from sennit.transport.elements import Dtype, ReduceOp
from sennit.transport.errors import ArgumentError

_TYPES: Final = {torch.float32: Dtype.F32, torch.float16: Dtype.F16, torch.bfloat16: Dtype.BF16}
# PREMUL_SUM needs a factor, which torch's name for the operation does not hold.
_OPS: Final = {op.name: op for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)}


def all_reduce_coded(
    tensor: torch.Tensor, codec: Codec, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Reduces `tensor` in place, as `dist.all_reduce`; numbers travel coded and are summed in float32.

    All ranks give equal codecs; for stochastic rounding, a new seed with each call. Waits for the result. Raises
    ArgumentError, before anything is sent, for a codec without fixed size, and for tensors that are not of float32,
    float16 or bfloat16, contiguous and in host memory.
    """
    _post(tensor, codec, op, group, background=False).wait()


Hook: TypeAlias = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class _Hook:
    def __init__(self, codec: Codec, group: dist.ProcessGroup | None, *, feedback: bool) -> None:
        self._codec, self._group, self._feedback = codec, group, feedback
        self._calls = 0
        # By the parameters of a bucket, which DDP changes after the first step.
        self._lost: dict[tuple[int, ...], torch.Tensor] = {}
        # Futures end when an operation does. One thread is enough: operations end in about the order of their starts.
        self._waiter = ThreadPoolExecutor(1, "coded hook")

    def average(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the AllReduce of a bucket, in DDP's order, which is the same on all ranks."""
        gradients = bucket.buffer()
        codec = replace(self._codec, seed=(self._codec.seed + self._calls) % (1 << 64))
        self._calls += 1
        sent = self._with_lost(bucket, gradients, codec) if self._feedback else gradients
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

    def _with_lost(self, bucket: dist.GradBucket, gradients: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Adds what was lost before, and keeps what coding takes now. It is the same that the collective takes."""
        key = tuple(id(parameter) for parameter in bucket.parameters())
        given = gradients.detach().float()
        if key not in self._lost:
            self._lost[key] = torch.zeros_like(given)
        lost = self._lost[key]
        total = given + lost
        first_index = communicator(self._group).rank * given.numel()
        codec.encode(given.numpy(), first_index=first_index, residual=lost.numpy())
        return total


def coded_hook(codec: Codec, group: dist.ProcessGroup | None = None, *, feedback: bool = True) -> Hook:
    """Returns a communication hook for `DistributedDataParallel.register_comm_hook`: gradients are averaged coded.

    With `feedback` each rank adds to a gradient what coding took from the one before (error feedback), in float32.
    The k-th bucket of a run is rounded by the seed `codec.seed` + k. All ranks give equal codecs. A model needs
    a hook of its own.
    """
    if feedback and codec.between_hosts:
        # What is rounded is a sum of the host. No rank knows what it alone has lost.
        raise ArgumentError("error feedback with a codec between hosts alone; allowed: feedback=False")
    return _Hook(codec, group, feedback=feedback).average


def _post(
    tensor: torch.Tensor, codec: Codec, op: Any, group: dist.ProcessGroup | None, *, background: bool
) -> Operation:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ArgumentError(f"a tensor on {tensor.device} with strides {tensor.stride()}; allowed: contiguous, on cpu")
    dtype = _TYPES.get(tensor.dtype)
    if dtype is None:
        raise ArgumentError(f"dtype {tensor.dtype}; allowed: float32, float16, bfloat16")
    if op.name not in _OPS:
        raise ArgumentError(f"reduce op {op.name}; allowed: {', '.join(_OPS)}")
    memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return communicator(group).post_coded(
        memory, None, dtype, _OPS[op.name], codec, elements=tensor.numel(), background=background
    )
