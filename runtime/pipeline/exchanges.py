# SPDX-License-Identifier: Apache-2.0
"""Exchanges in threads of their own, while the step computes what does not need them.

Vectors travel while the bottom MLP is computed. Their gradients travel, and rows are updated, during the backward pass
of the bottom MLP, the AllReduce of dense gradients and the optimizer's step. As soon as rows are updated, the next
batch is looked up: its vectors travel during the rest of the step, and while the program prepares the next one. Each
bucket of dense gradients travels while the backward pass computes the buckets that follow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from sennit.runtime.pipeline.ahead import Batch, BatchesAhead
from sennit.runtime.pipeline.group_thread import GroupThread
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.pipeline.task import Task
from sennit.runtime.replicas.replicas import SlicedReplicas
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.passes import LOOKUP, UPDATE, Passes

EXCHANGE: Final = "exchange"
GRADIENTS: Final = "gradients"


class Exchanges:
    """The exchanges of some modules of tables, and of replicas."""

    def __init__(
        self,
        scheduler: Scheduler,
        tables: Sequence[ShardedTables],
        ahead: BatchesAhead,
        *,
        replicas: SlicedReplicas | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`tables`: the modules whose batches `ahead` sends. Collective if there are several ranks: makes groups.

        Modules on a GPU work in the caller's thread, as before.
        """
        self.step = 0
        """The step that tasks belong to from now on."""

        self._ahead = ahead
        self._thread = GroupThread(scheduler, EXCHANGE, group)
        self._tables, self._replicas = tables, replicas
        self._of_table: dict[int, Passes] = {}
        for number, module in enumerate(tables):
            if module.device.type == "cpu":
                self._of_table[number] = module.overlap(functools.partial(self._run, number), self._thread.group)
        self._gradients: GroupThread | None = None
        if replicas is not None and dist.get_world_size(group) > 1:
            self._gradients = GroupThread(scheduler, GRADIENTS, group)
            replicas.overlap(self._sum, self._gradients.group)

    def close(self, *, failed: bool = False) -> None:
        """Waits for what is under way, and ends the groups. Modules work in the caller's thread again.

        Raises errors of updates.

        `failed`: this rank gives up, so that nobody waits for it, and raises nothing.
        """
        if self._gradients is not None and self._replicas is not None:
            # A backward pass waits for its sums: only one that failed can have left any under way.
            self._gradients.close(functools.partial(self._replicas.overlap, None), failed=failed)
        with contextlib.ExitStack() as stack:
            for number in self._of_table:
                stack.callback(self._tables[number].overlap, None)
            self._thread.close(stack.pop_all().close, failed=failed)

    def _run(self, number: int, name: str, function: Callable[[], Any]) -> Task:
        """Runs what a module of tables asks for. After an update, it also looks the next batch up."""
        found = self._thread.submit(name, function, step=self.step)
        passes = self._of_table[number]
        waiting = self._ahead.oldest
        if name == UPDATE and passes.looks_ahead and waiting is not None:

            def look_up(batch: Batch, _: object) -> object:
                return passes.look_up(batch.sent[number])

            # After an update that has failed no row is right.
            lookup = self._thread.submit(LOOKUP, look_up, waiting.ids, found, step=self.step + 1)
            waiting.lookups[number] = lookup
            passes.has_begun(lookup)
        return found

    def _sum(self, name: str, function: Callable[[], Any]) -> Task:
        """Runs what replicas ask for."""
        assert self._gradients is not None
        return self._gradients.submit(name, function, step=self.step)
