# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training with a parameter server: the baseline of Mudigere et al. 2022 (Neo), section 2.

Rank 0 holds all parameters and never waits for anybody. Each other rank takes a small batch, asks for the rows and the
dense parameters as they are now, and sends gradients. Meanwhile other ranks change the parameters, so gradients are
stale, by as many updates as there are other workers, more or less. Messages go over the same transport.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.training import launch
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import Quality
from sennit.testbed.bench.training.plain_torch import PlainTorch
from sennit.testbed.bench.training.turns import joined

SERVER: Final = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What asynchronous training came to."""

    quality: Quality
    staleness: float
    """The mean number of updates by others between a worker's reading and its update."""

    seconds: float
    """Seconds of training, without loading data and evaluation."""

    steps: int
    """Updates of all workers together."""


def train(config: TrainingConfig, workers: int) -> Outcome:
    """Trains for all epochs with so many workers, and one server."""
    outcome: Outcome = launch.run_ranks(_rank, config, workers + 1, timeout_s=config.timeout_s)[SERVER]
    return outcome


def _rank(config: TrainingConfig, rank: int, world_size: int, store: Store) -> Outcome | None:
    with joined(rank, world_size, store, timeout_s=config.timeout_s):
        plain = PlainTorch(config)
        # The clock starts when all have loaded their data.
        dist.barrier()
        if rank != SERVER:
            _work(plain, rank, world_size - 1)
            return None
        return _Server(plain, world_size - 1).run()


def _steps(plain: PlainTorch, worker: int, workers: int) -> range:
    return range(worker - 1, plain.order.step_count, workers)


class _Server:
    def __init__(self, plain: PlainTorch, workers: int) -> None:
        self._plain, self._workers = plain, workers
        self._lock = threading.Lock()
        self._updates = self._staleness = 0
        self._failures: list[BaseException] = []

    def run(self) -> Outcome:
        threads = [threading.Thread(target=self._serve, args=(worker,)) for worker in range(1, self._workers + 1)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        if self._failures:
            raise self._failures[0]
        staleness = self._staleness / max(1, self._updates)
        return Outcome(quality=self._plain.evaluate(), staleness=staleness, seconds=seconds, steps=self._updates)

    def _serve(self, worker: int) -> None:
        try:
            for _ in _steps(self._plain, worker, self._workers):
                self._answer(worker)
        except BaseException as error:
            self._failures.append(error)

    def _answer(self, worker: int) -> None:
        weights = self._plain.weights
        counts = _receive(torch.empty(len(weights), dtype=torch.int64), worker)
        ids = _receive(torch.empty(int(counts.sum()), dtype=torch.int64), worker).split(counts.tolist())
        with self._lock, torch.no_grad():
            read = self._updates
            rows = torch.cat([weight[some] for weight, some in zip(weights.values(), ids, strict=True)])
            dense = parameters_to_vector(self._plain.model.parameters())
        dist.send(dense, worker)
        dist.send(rows, worker)
        dense_gradient = _receive(torch.empty_like(dense), worker)
        gradients = _receive(torch.empty_like(rows), worker).split(counts.tolist())
        with self._lock:
            self._staleness += self._updates - read
            at = 0
            for parameter in self._plain.model.parameters():
                parameter.grad = dense_gradient[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
            by_table = zip(weights, ids, gradients, strict=True)
            self._plain.update(self._updates, {name: (some, gradient) for name, some, gradient in by_table})
            self._updates += 1


def _work(plain: PlainTorch, worker: int, workers: int) -> None:
    parameters = list(plain.model.parameters())
    for step in _steps(plain, worker, workers):
        batch = plain.batch(step)
        asked = {name: torch.unique(ids) for name, (_, ids) in plain.ids(batch).items()}
        counts = torch.tensor([len(ids) for ids in asked.values()])
        dist.send(counts, SERVER)
        dist.send(torch.cat(list(asked.values())), SERVER)
        dense = _receive(torch.empty(sum(parameter.numel() for parameter in parameters)), SERVER)
        dim = plain.config.embedding_dim
        rows = _receive(torch.empty(int(counts.sum()), dim), SERVER).split(counts.tolist())
        vector_to_parameters(dense, parameters)
        weights: dict[str, Tensor] = {}
        for (name, ids), found in zip(asked.items(), rows, strict=True):
            with torch.no_grad():
                plain.weights[name][ids] = found
            weights[name] = plain.weights[name].detach().requires_grad_()
        plain.model.zero_grad()
        torch.autograd.backward(plain.loss(batch, weights))
        dist.send(torch.cat([_given(parameter).flatten() for parameter in parameters]), SERVER)
        gradients = [_given(weight).coalesce() for weight in weights.values()]
        # The bags have the ids that were asked for, and no others.
        dist.send(torch.cat([gradient.values() for gradient in gradients]), SERVER)


def _given(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _receive(into: Tensor, source: int) -> Any:
    dist.recv(into, source)
    return into
