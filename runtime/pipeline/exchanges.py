# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of tables in a thread of their own, while the step computes what does not need them.

Sums of bags travel under the bottom MLP. Their gradients travel, and rows are updated, under the bottom MLP's backward
pass, the AllReduce of dense gradients and the optimizer's step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from sennit.runtime.backend.process_group import second_group
from sennit.runtime.pipeline.failure import abort, explained
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.pipeline.task import Task
from sennit.runtime.sharded.module import ShardedTables

EXCHANGE: Final = "exchange"


class Exchanges:
    """The exchanges of vectors and gradients of some modules of tables."""

    def __init__(
        self, scheduler: Scheduler, tables: Sequence[ShardedTables], *, group: dist.ProcessGroup | None = None
    ) -> None:
        """Collective if there are several ranks: makes a group. Tables on a GPU stay as they are."""
        self.step = 0
        """Of the tasks from now on."""

        self._scheduler = scheduler
        self._tables = [module for module in tables if module.device.type == "cpu"]
        self._group = second_group(group) if dist.get_world_size(group) > 1 else None
        self._last: Task | None = None
        for module in self._tables:
            module.overlap(self._run, self._group)

    def finish(self) -> None:
        """Waits for the updates of the step. Raises their errors."""
        for module in self._tables:
            module.finish()

    def close(self, *, failed: bool = False) -> None:
        """Ends the group; tables are as before. `failed`: this rank gives up, so that nobody waits for it."""
        group, self._group = self._group, None
        if failed and group is not None and self._last is not None and not self._last.is_done:
            abort(group)
        for module in self._tables:
            # What is raised already tells more than what it has caused.
            with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
                module.overlap(None)
        if group is not None and not failed:
            dist.destroy_process_group(group)

    def _run(self, name: str, function: Callable[[], Any]) -> Task:
        self._last = self._scheduler.submit(name, explained(function, self._group), thread=EXCHANGE, step=self.step)
        return self._last
