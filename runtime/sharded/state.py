# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a module of sharded tables: its shards, what has changed of them, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.sharded.changes import CHANGED_ROWS, ChangedRows
from sennit.runtime.sharded.digest import digest_of
from sennit.runtime.sharded.loading import load
from sennit.runtime.sharded.shards import Held, tensors_of
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ArgumentError


class HeldTables(nn.Module):
    """The shards of this rank, as `state_dict` and checkpoints have them."""

    tables: tuple[Table, ...]
    _steps: TableSteps
    _group: dist.ProcessGroup | None

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[ChangedRows] = []

    def finish(self) -> None:
        """Waits for what runs in another thread. Raises errors of updates."""
        raise NotImplementedError

    def held(self) -> Iterator[Held]:
        """The shards that this rank holds, one after the other. Those in files are copied to files without names."""
        self.finish()
        for engines in self._steps.engines:
            yield from engines.held()

    def track_changes(self) -> None:
        """From now on `changed_rows` knows which rows change: a byte of memory for each row that this rank holds.

        Another call forgets what has changed.
        """
        self.finish()
        self._changes = [ChangedRows(one) for pair in self._steps.engines for one in (pair.sharded, pair.replicated)]

    def _track_moved(self) -> None:
        """Tracks changes of the shards that this rank has after a move, if it did before: all rows have changed."""
        if self._changes:
            self.track_changes()
            for changes in self._changes:
                changes.mark_all()

    def changed_rows(self, *, clear: bool = True) -> dict[str, Tensor]:
        """Int64 [n], rising, by shard: the rows that changed since `track_changes` or the last call with `clear`.

        A shard that this rank holds and that is not there (a tensor train) counts as changed in all its parts. After
        `load_state_dict` all rows have changed. Raises `ArgumentError` without `track_changes`.
        """
        self.finish()
        if not self._changes:
            raise ArgumentError("changed_rows without track_changes; allowed: after it")
        return {name: rows for changes in self._changes for name, rows in changes.rows(clear=clear)}

    def changes(self) -> dict[str, Tensor]:
        """What has changed of the `state_dict` of this rank; forgets it. In host memory, copied but for cores of
        tensor trains.

        Of a shard with changed rows it has `SHARD.changed_rows`, int64 [n], and these rows of each of its tensors;
        nothing of a shard without.
        """
        rows = self.changed_rows()
        found = {f"{shard}.{CHANGED_ROWS}": of_shard for shard, of_shard in rows.items() if len(of_shard)}
        for engines in self._steps.engines:
            for key, tensor in engines.changes(rows):
                if key.rpartition(".")[0] not in rows or len(tensor):
                    found[key] = tensor
        return found | {"steps": self._step_counts()}

    @property
    def in_files(self) -> frozenset[str]:
        """Shards of this rank whose rows are in a file. `state_dict` has copies of them."""
        return frozenset(name for engines in self._steps.engines for name in engines.sharded.in_files)

    def digest(self) -> str:
        """SHA-256 of all weights and optimizer states. Collective; the same on all ranks, whoever holds what.

        Raises `SennitError` if replicas of a table differ.
        """
        return digest_of(self.held(), self._group)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds the shards that this rank holds, by names that no placement changes: the tables' own memory, or copies
        in files without names if rows are in files.

        So `torch.distributed.checkpoint` saves each shard once, and loads it into any world and placement.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for held in self.held():
            destination.update({prefix + key: tensor for key, tensor in tensors_of(held).items()})
        destination[f"{prefix}steps"] = self._step_counts()

    def _step_counts(self) -> Tensor:
        # Of each group; all engines of one have taken the same steps.
        step_of = {engines.group: engines.step for engines in self._steps.engines}
        return torch.tensor([step_of[group] for group in sorted(step_of)])

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes over the shards that this rank holds (`load`)."""
        self.finish()
        for changes in self._changes:
            changes.mark_all()
        load(
            self._steps.engines,
            self.tables,
            state_dict,
            prefix,
            missing=missing_keys,
            unexpected=unexpected_keys,
            errors=error_msgs,
        )
