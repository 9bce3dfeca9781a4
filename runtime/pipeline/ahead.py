# SPDX-License-Identifier: Apache-2.0
"""Batches ahead of the step: they are taken, and their ids travel, while earlier batches are computed.

Two threads work ahead of the step: "input" takes batches, and "ids" sends them to the owners of their rows, over a
group of its own. These threads read nothing that a step changes, so no bit depends on how far ahead they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch.distributed as dist

from sennit.closing import Closing
from sennit.runtime.backend import torch_versions
from sennit.runtime.backend.process_group import second_group
from sennit.runtime.pipeline.group_thread import explained
from sennit.runtime.pipeline.room import check_room
from sennit.runtime.pipeline.scheduler import MAIN, Scheduler
from sennit.runtime.pipeline.task import Task
from sennit.runtime.sharded.module import ShardedTables
from sennit.runtime.sharded.sent import Refused, Sent

BATCHES_AHEAD_MAX: Final = 3
"""The most batches on their way while one is computed. More need more memory, and hide no more."""

INPUT: Final = "input"
IDS: Final = "ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A batch, and the features in it that go to tables."""

    samples: Any
    """The batch as the program has it."""

    features: Sequence[Any]
    """The features for each module of tables, in any form that it takes."""

    global_batch: int | None = None
    sent: Sequence[Sent] = ()
    """What each module of tables has sent, once the owners have the ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A batch on its way."""

    ids: Task
    """The task that sends the ids. Its result is the `Batch`."""

    lookups: dict[int, Task] = field(default_factory=dict)
    """The lookups that have begun already, by the number of the module of tables."""


class BatchesAhead(Closing):
    """Batches on their way, the oldest first."""

    def __init__(
        self,
        scheduler: Scheduler,
        tables: Sequence[ShardedTables],
        *,
        depth: int,
        tells: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`depth`: how many batches are under way while one is computed; with 0 the caller's thread does everything.

        `tells`: an error of `take` goes to all ranks, which then raise as well, instead of waiting.
        Collective if `depth` is above 0 and there are several ranks: makes a group.
        """
        self.depth = depth
        self._scheduler, self._tables, self._tells = scheduler, tuple(tables), tells
        self._waiting: deque[Waiting] = deque()
        self._last: Task | None = None
        self._usual_group, self._room_is_checked = group, False
        self._group = second_group(group) if depth and dist.get_world_size(group) > 1 else None

    def __len__(self) -> int:
        """Batches on their way."""
        return len(self._waiting)

    def begin(self, step: int, take: Callable[[], Batch]) -> None:
        """Takes a batch and sends its ids. All ranks call it in the same order.

        Raises `ConfigError` on all ranks for the second batch if `depth` batches ahead have no room in memory.
        """
        if self._waiting and not self._room_is_checked:
            self._check_room()
        # An error that this thread knows now goes out with this batch, so every run tells of it at the same step.
        senders = [one.sender(self._group) for one in self._tables]
        input_thread, ids_thread = (INPUT, IDS) if self.depth else (MAIN, MAIN)
        taken = self._scheduler.submit("input", lambda: self._take(take), thread=input_thread, step=step)
        # Nothing is sent after a failure, because the other ranks are not there.
        before = () if self._last is None else (self._last,)
        send = explained(lambda one, *_: self._send(senders, one), self._group)
        self._last = self._scheduler.submit("ids", send, taken, *before, thread=ids_thread, step=step)
        self._waiting.append(Waiting(ids=self._last))

    @property
    def oldest(self) -> Waiting | None:
        """The batch that `next` returns."""
        return self._waiting[0] if self._waiting else None

    def next(self) -> Batch:
        """Waits for the oldest batch. Raises what went wrong with it, or with one before."""
        waiting = self._waiting.popleft()
        found: Batch = waiting.ids.result()
        for number, lookup in waiting.lookups.items():
            found.sent[number].lookup = lookup
        return found

    def drop(self) -> None:
        """Forgets the batches that are on their way, when they have come. Waits for them."""
        while self._waiting:
            for module, sent in zip(self._tables, self.next().sent, strict=True):
                module.drop(sent)

    def close(self, *, failed: bool = False) -> None:
        """Waits for what is being sent, and ends the group. `failed`: this rank gives up, and nobody waits for it."""
        if failed:
            self.abort()
        group, self._group = self._group, None
        self._waiting.clear()
        self._scheduler.close()
        # After a failure destroying a group may wait for peers that are gone.
        if group is not None and not failed:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """This rank gives up: nobody waits any longer for ids that are on their way."""
        if self._group is not None and not all(waiting.ids.is_done for waiting in self._waiting):
            torch_versions.abort(self._group)

    def _check_room(self) -> None:
        """Waits for the first batch, which says how large the others will be."""
        self._room_is_checked = True
        try:
            first: Batch = self._waiting[0].ids.result()
        except Exception:  # Any type, because `next` raises it.
            return
        check_room(first, self._tables, first.sent, depth=self.depth, group=self._usual_group)

    def _take(self, take: Callable[[], Batch]) -> Batch | Refused:
        try:
            return take()
        except Exception as error:  # Any type, because the other ranks wait for this one.
            if not self._tells:
                raise
            return Refused(error)

    def _send(self, senders: Sequence[Callable[[Any, int | None], Sent]], batch: Batch | Refused) -> Batch:
        if isinstance(batch, Refused):
            senders[0](batch, None)
            raise AssertionError("a module has sent a batch that was refused")
        features = zip(senders, batch.features, strict=True)
        return replace(batch, sent=[send(given, batch.global_batch) for send, given in features])
