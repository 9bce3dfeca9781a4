# SPDX-License-Identifier: Apache-2.0
"""Measures what no placement changes: passes of the model over the slices of a rank, its optimizer, and its input."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import tree_leaves
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.model.factory import build, dense_optimizer, reads_histories
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.model.loss import Loss
from sennit.runtime.model.trial import Trial
from sennit.runtime.planner.one_thread import one_thread
from sennit.runtime.planner.problem import Fixed
from sennit.runtime.replicas.cutting import CutArguments
from sennit.runtime.replicas.gradient_rows import Bucket, Layout
from sennit.runtime.replicas.reduction import Reduction
from sennit.runtime.replicas.replicas import SlicedReplicas
from sennit.runtime.sharded.slices import Slices

# Seconds of one measurement. A run that starts takes the short ones.
BUDGET_S, SHORT_BUDGET_S = 1.0, 0.1
TURNS_MIN, TURNS_MAX = 3, 25
# Bytes read between two calls: more than a core's part of the caches holds.
OTHERS_BYTES: Final = 32 << 20


def measure(
    model_name: str,
    inputs: ModelInputs,
    *,
    slices: Slices,
    batch: int,
    dense_optimizer_name: str = "adagrad",
    lengths: Mapping[str, Sequence[int]] | None = None,
    budget_s: float = BUDGET_S,
) -> Fixed:
    """Builds the model of `inputs` and runs it on one thread, on random samples, three measurements in all.

    `SlicedReplicas` run it on the slices of a rank. Their sums of gradients are a part of a step: of the passes of a
    small model 7 %. `lengths`: the ids of some samples by table, for a model that reads histories:
    attention grows with the square, so their mean alone would not do.
    """
    with torch.random.fork_rng(devices=[]), one_thread():
        return _measure(model_name, inputs, slices, batch, dense_optimizer_name, lengths or {}, budget_s)


def _measure(
    model_name: str,
    inputs: ModelInputs,
    slices: Slices,
    batch: int,
    optimizer_name: str,
    lengths: Mapping[str, Sequence[int]],
    budget_s: float,
) -> Fixed:
    model = build(model_name, inputs)
    optimizer = dense_optimizer(optimizer_name, model.parameters(), rate=1e-6, weight_decay=0.0)
    own, samples = _own_slices(slices, batch)
    dense, labels = torch.randn(samples, inputs.dense_count), (torch.rand(inputs.logits_shape(samples)) < 0.5).float()
    found = Trial(inputs, samples, reads_histories=reads_histories(model_name), lengths=lengths, make=_rows)
    replica, loss = _Alone(model, own), Loss()

    def passes() -> None:
        for vector in found.leaves.values():
            vector.grad = None
        optimizer.zero_grad()
        logits = replica(dense, *found.arguments(), global_batch=samples)
        losses = replica.each_slice(loss, logits, labels, global_batch=samples)
        torch.autograd.backward(replica.loss(losses, samples))

    early: Any = getattr(model, "early", None)

    def early_passes() -> None:
        for _, (given,) in CutArguments((dense,), own, samples):
            found = [one for one in tree_leaves(early(given, None)) if isinstance(one, Tensor) and one.requires_grad]
            if found:
                torch.autograd.backward(found, [torch.ones_like(one) for one in found])

    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return Fixed(
        slice_s=typical(passes, budget_s) / own.count,
        early_s=0.0 if early is None else typical(early_passes, budget_s) / own.count,
        update_s=typical(optimizer.step, budget_s),
        gradient_bytes=size_bytes,
    )


def _rows(count: int, dim: int) -> Tensor:
    return (torch.randn(count, dim) * 0.1).requires_grad_()


def _own_slices(slices: Slices, batch: int) -> tuple[Slices, int]:
    """A power of two of this rank's slices, as those of a rank without others, and how many samples they have."""
    span = slices.own
    count = 1 << (span.high - span.low).bit_length() - 1
    return Slices(count=count, rank=0, world_size=1), sum(slices.sizes(span, batch)[:count])


class _OwnSums(Reduction):
    """Sums of a rank without others: its one node is the whole tree."""

    def total(self, layout: Layout, bucket: Bucket, rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        return rows[0, bucket.start : bucket.end].to(bucket.dtype, copy=True)


class _Alone(SlicedReplicas):
    """Replicas of a rank without others. They need no process group: no other rank takes part in a measurement."""

    def __init__(self, module: nn.Module, slices: Slices) -> None:
        nn.Module.__init__(self)
        self._begin(module, slices, 0, None, _OwnSums(slices, None, None, None))


def input_seconds(source: BatchSource, budget_s: float = BUDGET_S, *, copies: bool = False) -> float:
    """Seconds that `source` takes for a sample of this rank, over its first epoch. `copies`: it also copies batches."""
    samples, number = 0, 0
    count = min(source.order.steps_per_epoch, source.order.step_count)

    def take() -> None:
        nonlocal samples, number
        batch = source.take(source.order.training_batch(number % count))
        if copies:
            batch.copy()
        samples, number = len(batch.labels), number + 1
        source.release(number)

    with one_thread():
        return typical(take, budget_s) / max(1, samples)


def typical(call: Callable[[], object], budget_s: float = BUDGET_S) -> float:
    """Processor seconds of a call in this thread, after one that is not counted: the first quartile, because other
    programs only add. They take none of this time, but of caches and memory.

    What the call reads is not in caches, as in a step, where lookups and exchanges come between.
    """
    others = torch.zeros(OTHERS_BYTES, dtype=torch.uint8)
    call()
    times: list[float] = []
    begin_s = time.perf_counter()
    while len(times) < TURNS_MIN or (len(times) < TURNS_MAX and time.perf_counter() - begin_s < budget_s):
        others.fill_(len(times))
        start_s = time.thread_time()
        call()
        times.append(time.thread_time() - start_s)
    return sorted(times)[len(times) // 4]
