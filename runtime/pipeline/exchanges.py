# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of tables in a thread of their own, while the step computes what does not need them.

Vectors travel under the bottom MLP. Their gradients travel, and rows are updated, under the bottom MLP's backward pass,
the AllReduce of dense gradients and the optimizer's step. As soon as rows are updated, those of the next batch are
looked up: their vectors travel under what is left of the step, and under what the program does before the next one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from sennit.runtime.backend.process_group import second_group
from sennit.runtime.pipeline.ahead import Arrived, BatchesAhead
from sennit.runtime.pipeline.failure import abort, explained
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.pipeline.task import Task
from sennit.runtime.sharded.beside import Beside
from sennit.runtime.sharded.module import ShardedTables

EXCHANGE: Final = "exchange"
LOOKUP, UPDATE = "lookup", "sparse update"


class Exchanges:
    """The exchanges of vectors and gradients of some modules of tables."""

    def __init__(
        self,
        scheduler: Scheduler,
        tables: Sequence[ShardedTables],
        ahead: BatchesAhead,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`tables`: those of `ahead`. Collective if there are several ranks: makes a group.

        Tables on a GPU stay as they are.
        """
        self.step = 0
        """Of the tasks from now on."""

        self._scheduler, self._ahead = scheduler, ahead
        self._group = second_group(group) if dist.get_world_size(group) > 1 else None
        self._last: Task | None = None
        self._tables = tables
        self._of_table: dict[int, Beside] = {}
        for number, module in enumerate(tables):
            if module.device.type == "cpu":
                beside = module.overlap(functools.partial(self._run, number), self._group)
                assert beside is not None
                self._of_table[number] = beside

    def close(self, *, failed: bool = False) -> None:
        """Waits for what is under way, and ends the group; tables are as before. Raises errors of updates.

        `failed`: this rank gives up, so that nobody waits for it, and raises nothing.
        """
        group, self._group = self._group, None
        if failed and group is not None and self._last is not None and not self._last.is_done:
            abort(group)
        for number in self._of_table:
            # What is raised already tells more than what it has caused.
            with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
                self._tables[number].overlap(None)
        if group is not None and not failed:
            dist.destroy_process_group(group)

    def _run(self, number: int, name: str, function: Callable[[], Any]) -> Task:
        """What a module of tables asks for."""
        found = self._submit(name, function, step=self.step)
        beside = self._of_table[number]
        waiting = self._ahead.oldest
        if name == UPDATE and beside.looks_ahead and waiting is not None:

            def look_up(arrived: Arrived, _: object) -> object:
                return beside.look_up(arrived.sent[number])

            # After an update that has failed no row is right.
            lookup = self._submit(LOOKUP, look_up, waiting.ids, found, step=self.step + 1)
            waiting.lookups[number] = lookup
            beside.has_begun(lookup)
        return found

    def _submit(self, name: str, function: Callable[..., Any], *inputs: Task, step: int) -> Task:
        explaining = explained(function, self._group)
        self._last = self._scheduler.submit(name, explaining, *inputs, thread=EXCHANGE, step=step)
        return self._last
