# SPDX-License-Identifier: Apache-2.0
"""Measures what no placement changes: the passes of the model over a slice, its optimizer, and taking a batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.model.factory import build
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.model.optimizer import dense_optimizer
from sennit.runtime.planner.cost import Fixed

BUDGET_S: Final = 1.0
TURNS_MIN, TURNS_MAX = 3, 15


def measure(
    model_name: str, inputs: ModelInputs, *, slice_samples: int, dense_optimizer_name: str = "adagrad"
) -> Fixed:
    """Builds the model of `inputs` and runs it on one thread, on random samples, for about two seconds at most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    try:
        return _measure(model_name, inputs, max(1, slice_samples), dense_optimizer_name)
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)


def _measure(model_name: str, inputs: ModelInputs, samples: int, optimizer_name: str) -> Fixed:
    model = build(model_name, inputs)
    optimizer = dense_optimizer(optimizer_name, model.parameters(), rate=1e-6, weight_decay=0.0)
    dense, labels = torch.randn(samples, inputs.dense_count), (torch.rand(samples) < 0.5).float()
    vectors = {table.name: (torch.randn(samples, table.dim) * 0.1).requires_grad_() for table in inputs.tables}

    def passes() -> None:
        logits = model(dense.clone(), {name: vector.clone() for name, vector in vectors.items()})
        F.binary_cross_entropy_with_logits(logits, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]

    slice_s = typical(passes)
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return Fixed(slice_s=slice_s, update_s=typical(optimizer.step), gradient_bytes=size_bytes)


def input_seconds(source: BatchSource, number: int) -> float:
    """Of a sample of this rank, as `source` hands out batch `number`."""
    samples = 0

    def take() -> None:
        nonlocal samples
        samples = len(source.take(number).labels)
        source.release(number)

    return typical(take) / max(1, samples)


def typical(call: Callable[[], object]) -> float:
    """Seconds of a call, after one that is not counted: the first quartile, because other programs only add."""
    call()
    times: list[float] = []
    begin_s = time.perf_counter()
    while len(times) < TURNS_MIN or (len(times) < TURNS_MAX and time.perf_counter() - begin_s < BUDGET_S):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return statistics.quantiles(times, n=4)[0]
