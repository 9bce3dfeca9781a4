# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of a module of sharded tables in another thread, in the order in which they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.runtime.kernels.checks import GradientError
from sennit.runtime.sharded.overlap import Arrive
from sennit.runtime.sharded.pending import Pending, RunBeside, Running
from sennit.runtime.sharded.sent import Sent

if TYPE_CHECKING:
    from sennit.runtime.sharded.module import ShardedTables


class Beside:
    """What `ShardedTables.overlap` begins, and what is under way of it."""

    def __init__(self, tables: ShardedTables, run: RunBeside, group: dist.ProcessGroup | None) -> None:
        self._tables, self._run, self._group = tables, run, group
        # Each update waits for the one before, and so tells of its error.
        self._update: Running | None = None
        self._lookup: Running | None = None
        self._untold: list[Running] = []

    @property
    def looks_ahead(self) -> bool:
        """Whether a batch may be looked up before its step. Files can be copied only while no rows are in use."""
        return not self._tables.tables_in_files

    def look_up(self, sent: Sent) -> tuple[Tensor, ...] | None:
        """The vectors of a batch that no call has taken yet, in the thread that calls this.

        None where a call has to make its lookup itself, because weights require gradients.
        """
        return None if self._tables._weights(sent.step) is not None else self._found(sent.step)

    def has_begun(self, lookup: Running) -> None:
        """`look_up` runs, or will."""
        self._lookup = lookup

    def pending(self, step: Any, lookup: Running | None) -> Pending:
        """The vectors of a step. `lookup`: where it has begun already."""
        if lookup is None:
            self.finish()
            lookup = self._run("lookup", lambda: self._found(step))
            self.has_begun(lookup)
        running = lookup

        def wait() -> dict[str, Tensor]:
            with self._tables._wire.phase("wait for lookup"):
                found = running.result()
            vectors = Arrive.apply(self._tables._anchor[0], lambda given: self._begin_update(step, given), found)  # type: ignore[no-untyped-call]
            return dict(zip(self._tables.feature_names, vectors, strict=True))

        return Pending(wait)

    def _found(self, step: Any) -> tuple[Tensor, ...]:
        with torch.no_grad(), self._tables._wire.over(self._group), self._tables._wire.phase("lookup"):
            return self._tables._found(step)

    def _begin_update(self, step: Any, gradients: Sequence[Tensor]) -> None:
        tables, before = self._tables, self._update
        rates = tables._rates()

        def update() -> GradientError | None:
            if before is not None:
                before.result()
            with torch.no_grad(), tables._wire.over(self._group), tables._wire.phase("sparse update"):
                return tables._update(step, gradients, rates)[0]

        self._update = self._run("sparse update", update)
        self._untold.append(self._update)

    def untold(self) -> list[Running]:
        """The updates of which nobody was told whether gradients were finite. Their results say so."""
        found, self._untold = self._untold, []
        return found

    def finish(self) -> None:
        """Waits for updates, and raises their errors. Waits for lookups; their errors are for who needs them."""
        if self._lookup is not None and not self._lookup.is_done:
            with contextlib.suppress(Exception):
                self._lookup.result()
        if self._update is not None:
            running = not self._update.is_done
            with self._tables._wire.phase("wait for sparse update") if running else contextlib.nullcontext():
                self._update.result()
