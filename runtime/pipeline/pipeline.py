# SPDX-License-Identifier: Apache-2.0
"""Training steps of any model on sharded tables, with the next batches on their way while one is computed.

with Pipeline(model, optimizer, loader) as pipeline:
    for loss in pipeline:                        # each one is a step
        print(float(loss))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.closing import Closing
from sennit.runtime.backend.torch_versions import tree_map_only
from sennit.runtime.pipeline.ahead import BATCHES_AHEAD_MAX, Batch, BatchesAhead
from sennit.runtime.pipeline.exchanges import Exchanges
from sennit.runtime.pipeline.given import GivenBatches
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.pipeline.task import Record, Task
from sennit.runtime.replicas.replicas import SlicedReplicas
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.sent import InputEnded
from sennit.runtime.timeline.timeline import Timeline
from sennit.transport.errors import ArgumentError, ConfigError


class Pipeline(Closing):
    """An iterator whose items are steps. Each is what the model returned, detached. Every rank iterates."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Iterable[Any],
        *,
        features: Callable[[Any], Any] | None = None,
        global_batch: Callable[[Any], int] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        before_update: Callable[[], object] | None = None,
        batches_ahead: int = 1,
        group: dist.ProcessGroup | None = None,
        before: Callable[[Task], None] | None = None,
        on_task: Callable[[Record], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`model(batch)` returns the loss, or a tuple whose first item is the loss. The model calls its modules of
        sharded tables with objects of the batch.

        `optimizer`: anything with `zero_grad` and `step`. `loader`: this rank's batches.
        `features(batch)`: the object that the model calls its tables with. With several modules of tables, a tuple in
        the order of `model.modules()`. None: the model calls its tables with the batch itself.
        `global_batch(batch)`: the samples of all ranks; needed where slices differ in size.
        `prepare(batch)`: returns the batch after what else is done ahead of its step, such as a copy to a device.
        `before_update`: called between the backward pass and the optimizer's step, to clip gradients for example.
        `batches_ahead`: how many batches are on their way while one is computed. With 0 nothing overlaps.
        `before`, `on_task`: as in `Scheduler`. `timeline`: records every step, in place of `on_task`.

        Weights have the bits of steps that run one after the other, whatever overlaps. Training ends with the rank that
        has the fewest batches. An error of the loader is raised on its rank, `PeerInputError` on the others.
        Writing to a batch that it has given before counts as one (`GivenBatches`).

        Collective. Raises `ConfigError` for a depth that is not allowed, `ArgumentError` for a model without tables.
        """
        if not 0 <= batches_ahead <= BATCHES_AHEAD_MAX:
            raise ConfigError(f"{batches_ahead} batches ahead; allowed: 0 to {BATCHES_AHEAD_MAX}")
        self._tables = [module for module in model.modules() if isinstance(module, ShardedTables)]
        if not self._tables:
            raise ArgumentError("a model without sharded tables; allowed: one with at least one module of them")
        self._model, self._optimizer = model, optimizer
        self._batches = iter(loader)
        self._features, self._global_batch, self._prepare = features, global_batch, prepare
        self._before_update = before_update
        self._given = GivenBatches(batches_ahead)
        self._step = 0
        self._timeline = timeline
        self._scheduler = Scheduler(before=before, on_task=timeline.on_task if timeline is not None else on_task)
        self._ahead = BatchesAhead(self._scheduler, self._tables, depth=batches_ahead, tells=True, group=group)
        self._exchanges: Exchanges | None = None
        if batches_ahead:
            replicas = next((module for module in model.modules() if isinstance(module, SlicedReplicas)), None)
            self._exchanges = Exchanges(self._scheduler, self._tables, self._ahead, replicas=replicas, group=group)

    @property
    def steps(self) -> int:
        """Steps that were taken. The loader may have given more batches, which are on their way."""
        return self._step

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Takes one step. Raises `StopIteration` on all ranks if one has no further batch."""
        if self._timeline is None:
            return self._next()
        with self._timeline.step(self._step):
            return self._next()

    def _next(self) -> Any:
        while len(self._ahead) <= self._ahead.depth:
            self._ahead.begin(self._step + len(self._ahead), self._take)
        try:
            batch = self._ahead.next()
        except InputEnded:
            self.close()
            raise StopIteration from None
        step, self._step = self._step, self._step + 1
        if self._exchanges is not None:
            self._exchanges.step = step
        return self._scheduler.run("step", lambda: self._train(batch), step=step)

    def close(self, *, failed: bool = False) -> None:
        """Ends work ahead. Batches that were taken are lost. `failed`: this rank gives up."""
        if failed:
            self._ahead.abort()
        if self._exchanges is not None:
            self._exchanges.close(failed=failed)
        self._ahead.close(failed=failed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _take(self) -> Batch:
        try:
            samples = next(self._batches)
        except StopIteration:
            raise InputEnded("this rank has no further batch") from None
        if self._prepare is not None:
            samples = self._prepare(samples)
        self._given.add(samples)
        features = samples if self._features is None else self._features(samples)
        return Batch(
            samples=samples,
            features=(features,) if len(self._tables) == 1 else features,
            global_batch=None if self._global_batch is None else self._global_batch(samples),
        )

    def _train(self, batch: Batch) -> Any:
        for module, given, sent in zip(self._tables, batch.features, batch.sent, strict=True):
            module.expect(given, sent)
        self._optimizer.zero_grad()
        found = self._model(batch.samples)
        for module, given in zip(self._tables, batch.features, strict=True):
            if module.expects(given):
                raise ArgumentError(
                    f"the model did not call {type(module).__name__} with the object that was sent; give Pipeline "
                    "`features`, which takes that very object from the batch"
                )
        loss = found[0] if isinstance(found, tuple) else found
        if not isinstance(loss, Tensor):
            raise ArgumentError(
                f"the model returned a {type(loss).__name__}; allowed: a tensor, or a tuple of which the first is one"
            )
        torch.autograd.backward(loss)
        if self._before_update is not None:
            self._before_update()
        self._optimizer.step()
        return tree_map_only(Tensor, Tensor.detach, found)
