# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,arg-type,misc"
"""Which bytes a step of sharded tables copies: run on each rank by test_sharded_copies.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.runtime.backend import communicator, is_symmetric
from sennit.runtime.replicas import SlicedReplicas
from sennit.runtime.sharded import Features, ShardedEmbeddingBags, Table

# Operators that write a tensor from another one.
COPIES = ("copy_", "clone", "cat", "index_select", "index", "gather", "contiguous", "_to_copy", "stack", "scatter_")
TABLES, DIM, EACH, SAMPLES = 8, 64, 10, 256


class Copied(TorchDispatchMode):
    """Bytes that torch's operators copy, by the type of element."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in COPIES and isinstance(result, Tensor):
            self.bytes[result.dtype] += result.nbytes
        return result


def counters() -> Counter[str]:
    return Counter(communicator().counters())


def step(rank: int, world: int, placement: str, **shards: int) -> dict[str, Any]:
    """What a step copies and sends, of several tables of one width, in so many `row_shards` and `column_shards`."""
    tables = [Table(name=f"t{number}", rows=1000, dim=DIM, **shards) for number in range(TABLES)]
    module = ShardedEmbeddingBags(tables, rate=0.1, placement=placement, gradients="sum")
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 1000, (TABLES * SAMPLES * EACH,), generator=generator, dtype=torch.int32)
    batch = Features(lengths=torch.full((TABLES, SAMPLES), EACH, dtype=torch.int32), values=ids)
    for _ in range(2):  # The first step makes plans and maps memory.
        sent_before, before = Counter(module.sent_bytes), counters()
        sent = module.send(batch)
        with Copied() as forward:
            found = list(module(sent).values())
        with Copied() as backward:
            torch.autograd.backward(found, [vectors.detach() for vectors in found])
        dist.barrier()
    return {
        "forward": forward.bytes[torch.float32],
        "backward": backward.bytes[torch.float32],
        "sent": dict(Counter(module.sent_bytes) - sent_before),
        "transport": dict(counters() - before),
        "symmetric": all(is_symmetric(vectors) for vectors in found),
    }


def replicas(rank: int, world: int) -> dict[str, int]:
    """What the AllReduce of gradients sends between ranks of one host."""
    module = SlicedReplicas(torch.nn.Linear(900, 900))
    for _ in range(2):
        before = counters()
        outputs = module(torch.ones(8, 900))
        module.loss(outputs.sum(1).view(-1, 8 // len(range(*module.slices.own))).sum(1)).backward()
        dist.barrier()
    return dict(counters() - before)
