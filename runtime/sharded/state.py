# SPDX-License-Identifier: Apache-2.0
"""The state of a module of sharded tables: the shards on this rank, their changed rows, saving and loading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import plain_results
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.sharded.engines import groups_of
from sennit.runtime.sharded.passes import Passes
from sennit.runtime.sharded.shards import Held, Shards, expected, parts_of, tensors_of
from sennit.runtime.sharded.table_steps import TableSteps
from sennit.runtime.sharded.tables import shard_spec, shards_of
from sennit.transport.errors import ArgumentError, SennitError, Unsupported

CHANGED_ROWS: Final = "changed_rows"
"""`SHARD.changed_rows` of a state is int64 [n]. The state then has only these rows of each tensor `SHARD.NAME`."""


NO_COPY: Final = (
    "each rank has some of the rows; save and load state_dict() by torch.distributed.checkpoint, or by "
    "sennit.runtime.checkpoint"
)
"""Why a rank's tables cannot be copied or pickled, and what works."""


class HeldTables(nn.Module):
    """The shards of this rank, as `state_dict` and checkpoints have them."""

    def __init__(self, steps: TableSteps, group: dist.ProcessGroup | None) -> None:
        """`steps`: of the tables. `group`: the ranks that have their shards."""
        super().__init__()
        self._steps, self._passes, self._group = steps, Passes(steps), group
        self.tables = steps.tables
        self._changes: list[ChangedRows] = []

    def finish(self) -> None:
        """Waits for what runs in another thread. Raises errors of updates."""
        self._passes.finish()

    def held(self) -> Iterator[Held]:
        """The shards that this rank holds, one after the other. Those in files are copied to files without names."""
        self.finish()
        for engines in self._steps.engines:
            yield from engines.held()

    @property
    def held_names(self) -> tuple[str, ...]:
        """The names of the shards that this rank holds, and of cores of tensor trains."""
        shards = [one for engines in self._steps.engines for one in (engines.sharded, engines.replicated)]
        return tuple(part.name for one in shards for spec in one.specs for part in parts_of(spec))

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

        A tensor train is not in the result: all of its parts count as changed. After `load_state_dict` all rows have
        changed. Raises `ArgumentError` without `track_changes`.
        """
        self.finish()
        if not self._changes:
            raise ArgumentError("changed_rows without track_changes; allowed: after it")
        return {name: rows for changes in self._changes for name, rows in changes.rows(clear=clear)}

    def changes(self) -> dict[str, Tensor]:
        """The part of this rank's `state_dict` that has changed, which counts as unchanged from now on.

        For a shard with changed rows the result has `SHARD.changed_rows`, int64 [n], and these rows of each tensor; for
        a shard without, nothing. Cores of tensor trains are the tables' own memory; everything else is a copy in host
        memory.
        """
        rows = self.changed_rows()
        found = {f"{shard}.{CHANGED_ROWS}": of_shard for shard, of_shard in rows.items() if len(of_shard)}
        for engines in self._steps.engines:
            for key, tensor in engines.changes(rows):
                if key.rpartition(".")[0] not in rows or len(tensor):
                    found[key] = tensor
        return found | {"steps": self.steps}

    @property
    def in_files(self) -> frozenset[str]:
        """The shards of this rank whose rows are in files. `state_dict` has copies of them."""
        return frozenset(name for engines in self._steps.engines for name in engines.sharded.in_files)

    def digest(self) -> str:
        """SHA-256 of all weights and optimizer states. Collective; the same on all ranks, whoever holds what.

        Raises `SennitError` if replicas of a table differ.
        """
        own = {shard.name: _sha256(shard) for shard in self.held()}
        everyone: list[Any] = [own]
        if (world_size := dist.get_world_size(self._group)) > 1:
            everyone = [None] * world_size
            dist.all_gather_object(everyone, own, group=self._group)
        of_shard: dict[str, str] = {}
        for one in everyone:
            for name, value in one.items():
                if of_shard.setdefault(name, value) != value:
                    raise SennitError(f"replicas of shard {name} differ")
        text = "\n".join(f"{name} {of_shard[name]}" for name in sorted(of_shard))
        return hashlib.sha256(text.encode()).hexdigest()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds the shards that this rank holds, by names that no placement changes.

        The tensors are the tables' own memory; rows in files are copied to files without names. So
        `torch.distributed.checkpoint` saves each shard once, and loads it into any world and placement.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)  # What a program has registered here.
        for held in self.held():
            destination.update({prefix + key: tensor for key, tensor in tensors_of(held).items()})
        steps = self.steps
        here = {shard for engines in self._steps.engines for shard in (*engines.number_of, *engines.replica_of)}
        destination[f"{prefix}steps"] = (
            steps if len(here) == len(shards_of(self.tables)) else steps.as_subclass(_OfPart)
        )

    @property
    def steps(self) -> Tensor:
        """Int64 [tables]: the updates so far of each table. Those of a group of equal optimizers have taken as many."""
        step_of = {engines.group: engines.step for engines in self._steps.engines}
        group_of = {number: group for group, numbers in enumerate(groups_of(self.tables)) for number in numbers}
        return torch.tensor([step_of[group_of[number]] for number in range(len(self.tables))])

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
        """Takes over what the state has of the shards that this rank holds (`Engines.lacking`). Collective.

        All ranks name all that is missing. The state may have shards of other ranks, too.
        """
        # Calls hooks, and loads what a program has registered here. To it, shards are unexpected. torch raises
        # afterwards if a key is missing: `strict` is always True here.
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, [], error_msgs)
        self.finish()
        self._steps.writes += 1
        for changes in self._changes:
            changes.mark_all()
        found: list[dict[str, Tensor]] = []
        left_out = set[str]()
        for engines in self._steps.engines:
            own: dict[str, Tensor] = {}
            for key, wanted in engines.expected().items():
                given = state_dict.get(prefix + key)
                if given is not None and (given.shape, given.dtype) == wanted:
                    own[key] = given
                elif given is not None:
                    error_msgs.append(
                        f"{prefix}{key} is {given.dtype} of {tuple(given.shape)}; the model has {wanted.dtype} of "
                        f"{wanted.shape}: were its tables cut into other shards?"
                    )
            found.append(own)
            left_out = left_out.union(*engines.lacking(own))
        steps = state_dict.get(f"{prefix}steps")
        if steps is None or len(steps) != len(self.tables):
            left_out.add("steps")
        if (world_size := dist.get_world_size(self._group)) > 1:
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, left_out, group=self._group)
            left_out.update(*every)
        for engines, own in zip(self._steps.engines, found, strict=True):
            engines.load(own)
        table_of = {
            key: shard.table
            for shard in shards_of(self.tables)
            for key in expected(shard_spec(self.tables, shard), self.tables[shard.table].optimizer)
        }
        missing_keys += [prefix + key for key in (*table_of, "steps") if key in left_out]
        known = {prefix + key for key in (*table_of, "steps")} | {
            prefix + name for name, _ in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        }
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        if "steps" in left_out:
            return
        assert steps is not None
        whole = set(range(len(self.tables))) - {table_of[key] for key in left_out}
        groups = groups_of(self.tables)
        for engines in self._steps.engines:
            # Tables whose optimizers were not equal before go on as the one that has taken the most.
            taken = [int(steps[number]) for number in groups[engines.group] if number in whole]
            engines.step = max(taken, default=engines.step)


class _OfPart(Tensor):
    """Is in a state that has not all shards, so that nobody pickles it for a whole one, as `torch.save` on a rank does.

    Results of functions are plain tensors: `torch.distributed.checkpoint` takes one before it writes.
    """

    __torch_function__ = plain_results

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported("torch.save of sharded tables", NO_COPY)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfPart:
        return self.clone().as_subclass(_OfPart)


class ChangedRows:
    """Which rows of an engine's tables have changed since the last question: a byte for each row.

    No optimizer changes a row that its step did not use, so it is enough to mark the rows of each update. The rows of a
    tensor train are computed and not stored. So it is left out, and all of its cores count as changed.
    """

    def __init__(self, shards: Shards) -> None:
        """Follows the updates of `shards` from now on."""
        self._shards = shards
        self._names = [spec.name for spec in shards.specs]
        self._is_changed = {
            number: torch.zeros(spec.row_count, dtype=torch.bool)
            for number, spec in enumerate(shards.specs)
            if not isinstance(spec, TensorTrainSpec)
        }
        shards.engine.on_update = self._mark
        shards.follow_directories()

    def _mark(self, batch: Batch) -> None:
        for block in batch.blocks():
            if block.table in self._is_changed:
                self._is_changed[block.table].index_fill_(0, self._shards.ids(batch, block), True)

    def mark_all(self) -> None:
        """Marks all rows, after a load or a move."""
        for is_changed in self._is_changed.values():
            is_changed.fill_(True)

    def rows(self, *, clear: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields each table's name and its changed rows, int64 [n], rising. `clear`: forgets them."""
        # A lookup gives rows to ids, and takes rows away, whether an update follows or not.
        for number, rows in self._shards.changed_entries(clear=clear).items():
            self._is_changed[number].index_fill_(0, rows, True)
        for number, is_changed in self._is_changed.items():
            yield self._names[number], is_changed.nonzero().flatten()
            if clear:
                is_changed.zero_()


def _sha256(held: Held) -> str:
    found = hashlib.sha256()
    for tensor in (held.weight, *held.states.values()):
        found.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()
