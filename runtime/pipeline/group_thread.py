# SPDX-License-Identifier: Apache-2.0
"""A thread that alone uses a group of ranks. So the thread makes the same calls in the same order on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sennit.runtime.backend import torch_versions
from sennit.runtime.backend.process_group import failure_of, second_group
from sennit.runtime.pipeline.scheduler import Scheduler
from sennit.runtime.pipeline.task import Task
from sennit.transport.errors import PeerError

Result = TypeVar("Result")


class GroupThread:
    """A thread of a scheduler, and its group."""

    def __init__(self, scheduler: Scheduler, name: str, group: dist.ProcessGroup | None = None) -> None:
        """Collective if there are several ranks: makes a group of the ranks of `group`."""
        self.group = second_group(group) if dist.get_world_size(group) > 1 else None
        self._scheduler, self._name = scheduler, name
        self._last: Task | None = None

    def submit(self, name: str, function: Callable[..., Any], *inputs: Task, step: int) -> Task:
        """As `Scheduler.submit`. A task that fails because the group has failed raises `PeerError`."""
        explaining = explained(function, self.group)
        self._last = self._scheduler.submit(name, explaining, *inputs, thread=self._name, step=step)
        return self._last

    def close(self, finish: Callable[[], object], *, failed: bool = False) -> None:
        """Calls `finish`, which waits for what is under way, and ends the group.

        `failed`: this rank gives up, so that nobody waits for it, and raises nothing.
        """
        group, self.group = self.group, None
        if failed and group is not None and self._last is not None and not self._last.is_done:
            torch_versions.abort(group)
        # The caller's error tells more than the errors that it has caused.
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            finish()
        if group is not None and not failed:
            dist.destroy_process_group(group)


def explained(function: Callable[..., Result], group: dist.ProcessGroup | None) -> Callable[..., Result]:
    """Returns `function` with `PeerError` in place of any error, if its `group` has failed.

    The default group may work still, but it cannot go on without the rank that is missing in `group`.
    """

    def call(*arguments: object) -> Result:
        try:
            return function(*arguments)
        except Exception as error:
            if group is not None and (reason := failure_of(group)):
                raise PeerError(reason) from error
            raise

    return call
