# SPDX-License-Identifier: Apache-2.0
"""Which row of a shard each id of a dynamic table has: rows are given to ids as they come, and taken away again.

Which ids have rows is a function of the batches that were trained on, and so is which row each has. Ids that come in
one batch get rows in the order of the ids. So it depends neither on ranks nor on the order in which they send.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.id_directory import Eviction, IdDirectory, counted, initial_rows
from sennit.runtime.kernels.id_sketch import IdSketch
from sennit.runtime.kernels.layout import zeros
from sennit.runtime.kernels.spec import Pooling, ShardSpec
from sennit.runtime.sharded.shards import Announced, Evicted, Shards
from sennit.runtime.sharded.tables import Shard, Table
from sennit.transport.errors import ConfigError

CPU: Final = torch.device("cpu")
SPARE_ROWS_MIN: Final = 1 << 16

EXPIRY_LOOKS: Final = 16
"""How often rows are looked at in the steps after which they expire."""

Phase = Callable[[str], AbstractContextManager[object]]

COUNTED: Final = ("lookups", "hits", "admitted", "evicted", "expired", "without_row")
"""What is counted of a shard's ids."""


def spare_rows(spec: ShardSpec) -> int:
    """How many rows an engine has behind those of a dynamic shard, for ids of a step that have no row. Memory that is
    never used is never there, so many cost nothing.
    """
    return max(spec.row_count, SPARE_ROWS_MIN) if spec.directories else 0


def rows_for_ids(table: Table, spec: ShardSpec) -> int:
    """How many rows of a dynamic shard are given to ids. The one behind them is shared, if the table has such a row."""
    assert table.ids is not None
    return spec.row_count - (table.ids.unadmitted == "shared")


class RowNumbers:
    """The rows and ids of one shard."""

    def __init__(
        self, table: Table, shard: Shard, spec: ShardSpec, number: int, rows: Shards, seed: int, phase: Phase
    ) -> None:
        """`number`: of the shard in `rows`. `spec`: without spare rows. `phase`: measures the time of a phase."""
        assert table.ids is not None
        self.table, self.rules, self.spec, self.seed = table, table.ids, spec, seed
        self._columns = table.column_range(shard.column)
        self._stream = dataclasses.replace(spec, stream_name=table.name).stream
        self._number, self._rows, self._phase = number, rows, phase
        self.entries = {name: zeros((spec.row_count, 2), torch.int64, CPU) for name in spec.directories}
        self.counters = Counter(dict.fromkeys(COUNTED, 0))
        self.is_counted = shard.column == 0
        own = rows_for_ids(table, spec)
        self._shared = own if own < spec.row_count else None
        """The row of ids that have none, which no id gets."""

        self._before = 0, 0, self.counters
        self._gone: list[tuple[Tensor, Tensor]] = []
        """Rows that went in this batch, and the ids that they had."""

        self._new: list[tuple[Tensor, Tensor]] = []
        """Rows that begin in this batch, and their ids."""

        self.open()

    def begin_shared(self) -> None:
        """Gives the shared row, if there is one, its first values."""
        if self._shared is None:
            return
        rows = torch.tensor([self._shared])
        announced = self._rows.announce(
            Batch(
                table_of_block=(self._number,),
                bags_of_block=(1,),
                lengths=torch.ones(1, dtype=torch.int32),
                values=rows,
                pooling=Pooling.NONE,
            )
        )
        self._rows.fetch(announced)
        # An id of its own for each row shard: initial rows differ by id.
        initial = self._initial(torch.tensor([self.spec.first_row]))
        self._rows.begin_rows(announced, self._number, rows, initial)
        self._rows.release(announced, is_dirty=True)

    def open(self) -> None:
        """Reads the directories anew, after their entries have changed. No step is under way then."""
        self._step = self._next_spare = 0
        self.directory = self.directory_of(self.entries)
        self.candidates = IdDirectory(self.entries["candidates"]) if "candidates" in self.entries else None
        self.sketch = IdSketch(self.entries["sketch"], self.rules.admit_after) if "sketch" in self.entries else None

    def directory_of(self, entries: Mapping[str, Tensor]) -> IdDirectory:
        """The directory of the rows that ids get. Raises `ArgumentError` for entries that are none."""
        return IdDirectory(entries["ids"][: self._shared])

    def begin(self) -> None:
        """A batch that may be refused comes now. Until `settle` nothing is lost."""
        self._before = self._step, self._next_spare, Counter(self.counters)
        self._gone, self._new = [], []
        for one in self._counting:
            one.begin()

    def undo(self) -> None:
        """Takes back the batch that has come since `begin`."""
        self._step, self._next_spare, self.counters = self._before
        for one in self._counting:
            one.undo()

    def gone(self) -> list[Evicted]:
        """The rows that went in this batch, with their values, before others begin in them."""
        columns = slice(self._columns.low, self._columns.high)
        return [
            Evicted(table=self.table.name, ids=ids, rows=self._rows.weights(self._number, rows), columns=columns)
            for rows, ids in self._gone
        ]

    def settle(self, announced: Announced) -> None:
        """The batch stays: new rows begin. `announced`: the batch of its rows."""
        for one in self._counting:
            one.keep()
        for rows, ids in self._new:
            self._rows.begin_rows(announced, self._number, rows, self._initial(ids))

    @property
    def _counting(self) -> list[IdDirectory | IdSketch]:
        return [one for one in (self.directory, self.candidates, self.sketch) if one is not None]

    @property
    def begun(self) -> Tensor:
        """Int64 [n]: the rows of the shard that begin in this batch. Spare ones are behind them."""
        rows = torch.cat([rows for rows, _ in self._new]) if self._new else torch.empty(0, dtype=torch.int64)
        return rows[rows < self.spec.row_count]

    @property
    def freed(self) -> Tensor:
        """Int64 [n]: the rows that went in this batch."""
        return torch.cat([rows for rows, _ in self._gone]) if self._gone else torch.empty(0, dtype=torch.int64)

    def copied(self) -> dict[str, Tensor]:
        """Copies of the entries of each directory."""
        return {name: one.clone() for name, one in self.entries.items()}

    def rows_of(self, ids: Tensor, step: int, *, trains: bool, once: bool, admits: bool) -> Tensor:
        """Int64 [n]: the row of each of `ids`.

        `trains`: a batch of step `step`, which counts, and gives rows to new ids. An id without a row has a spare one
        for this batch, or the shared one. `once`: an id counts once in a step. `admits`: each id gets a row now.
        Raises `ConfigError` if there are not enough rows.
        """
        if trains and step != self._step:
            self._step, self._next_spare = step, 0
            self._expire(step)
        found_rows, missing = self.directory.find(ids, step if trains else 0, once=once)
        self.counters["lookups"] += len(ids)
        self.counters["hits"] += len(ids) - missing
        if not missing:
            return found_rows
        rows = found_rows.clone()
        without = rows < 0
        new, counts = counted(ids[without])
        found = torch.full_like(new, -1)
        if once:
            counts.fill_(1)
        if trains:
            is_due, totals = self._due(new, counts, step, all_of_them=admits)
            if count := int(is_due.sum()):
                self._make_room(count, step)
                found[is_due] = self._begun(self.directory.admit(new[is_due], totals[is_due], step), new[is_due])
                self.counters["admitted"] += count
        rest = found < 0
        if count := int(rest.sum()):
            if self._shared is None:
                found[rest] = self._begun(self._spares(count, trains=trains), new[rest])
            else:
                found[rest] = self._shared
            self.counters["without_row"] += count
        rows[without] = found[torch.searchsorted(new, ids[without])]
        return rows

    def _expire(self, step: int) -> None:
        """Frees the rows that have not been in a training batch for too long. Looks at them every few steps."""
        after = self.rules.expire_after
        if after is None or step <= after or step % max(1, after // EXPIRY_LOOKS):
            return
        rows = self.directory.idle(step - after)
        self._evict(rows)
        self.counters["expired"] += len(rows)
        if self.candidates is not None:
            self.candidates.evict(self.candidates.idle(step - after))

    def _evict(self, rows: Tensor) -> None:
        if len(rows):
            self._gone.append((rows, self.directory.ids[rows]))
            self.directory.evict(rows)

    def _due(self, new: Tensor, counts: Tensor, step: int, *, all_of_them: bool) -> tuple[Tensor, Tensor]:
        """Which of the ids without rows get one now, and how often each has come. `counts`: in this batch."""
        known = self.candidates
        if self.sketch is not None:
            totals = self.sketch.add(new, counts)
            return totals >= (1 if all_of_them else self.rules.admit_after), totals
        if known is None:
            return torch.ones(len(new), dtype=torch.bool), counts
        places, missing = known.find(new)
        totals = counts.to(torch.int64)
        is_known = places >= 0
        # This dates them, so that they are not among those that are forgotten.
        totals[is_known] += known.count(places[is_known], counts[is_known], step)
        if missing > known.free:
            known.evict(self._victims(known, max(missing - known.free, self._share), step))
        is_due = totals >= (1 if all_of_them else self.rules.admit_after)
        known.evict(places[is_known & is_due])
        # Of a batch with more new ids than candidates have room, the others are forgotten.
        begun = (~is_known & ~is_due).nonzero().flatten()[: known.free]
        known.admit(new[begun], counts[begun], step)
        return is_due, totals

    def _make_room(self, count: int, step: int) -> None:
        """Frees rows for `count` ids, if there are not enough."""
        lack = count - self.directory.free
        if lack <= 0:
            return
        with self._phase("evict ids"):
            freed = self._victims(self.directory, max(lack, self._share), step)
        if len(freed) < lack:
            raise ConfigError(
                f"table {self.table.name}: {count} new ids in a batch, but shard {self.spec.name} has "
                f"{self.directory.free + len(freed)} of its {self.spec.row_count} rows for them, because ids that came "
                "since the last step keep theirs; allowed: more rows, a smaller batch, or a step of the table before"
            )
        self._evict(freed)
        self.counters["evicted"] += len(freed)

    def _victims(self, directory: IdDirectory, count: int, step: int) -> Tensor:
        """The rows of a directory to give up first."""
        rule = self.rules.eviction
        if isinstance(rule, Eviction):
            return directory.victims(count, rule, step)
        used = (directory.last > 0).nonzero().flatten()
        ids, counts = directory.ids[used], directory.counts[used]
        scores = torch.zeros(len(directory.entries), dtype=torch.float64)
        try:
            found = rule(ids, counts, step - directory.last[used])
        except Exception as error:
            raise ConfigError(f"table {self.table.name}: its score: {type(error).__name__}: {error}") from error
        scores[used] = _checked(found, ids, self.table.name)
        return directory.victims(count, Eviction.LRU, step, scores)

    @property
    def _share(self) -> int:
        return int(self.spec.row_count * self.rules.evicted_share)

    def _spares(self, count: int, *, trains: bool) -> Tensor:
        """Rows for ids of this batch that have none. Those of training are used until the next step."""
        first = self._next_spare
        if first + count > (allowed := spare_rows(self.spec)):
            raise ConfigError(
                f"table {self.table.name}: {first + count} ids without rows in shard {self.spec.name} in a step; "
                f"allowed: {allowed}, or more rows"
            )
        if trains:
            self._next_spare += count
        return torch.arange(first, first + count) + self.spec.row_count

    def _begun(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows that get their first values when the batch is settled."""
        self._new.append((rows, ids))
        return rows

    def _initial(self, ids: Tensor) -> Tensor:
        """Float32 [ids, columns of the shard]: a function of the seed, the table and the id alone."""
        low, columns = self._columns.low, self._columns.size
        if self.table.initial is None:
            return initial_rows(
                ids,
                first_column=low,
                columns=columns,
                seed=self.seed,
                stream=self._stream,
                bound=self.table.rows**-0.5,
            )
        rows = torch.empty(len(ids), self.table.dim)
        for place, one in enumerate(ids.tolist()):
            self.table.initial(rows[place : place + 1], torch_stream(self.seed, "table", self.table.name, one))
        return rows[:, low : low + columns]


def _checked(scores: object, ids: Tensor, table: str) -> Tensor:
    """Float64 [n]: what a user's function has returned for `ids`. Raises `ConfigError` if these are no scores."""
    if not isinstance(scores, Tensor) or scores.shape != ids.shape:
        given = f"a {type(scores).__name__}" if not isinstance(scores, Tensor) else f"of shape {tuple(scores.shape)}"
        raise ConfigError(f"table {table}: scores are {given}; allowed: a tensor of ({len(ids)},), one for each id")
    found = scores.detach().to("cpu", torch.float64)
    if len(wrong := found.isnan().nonzero()):
        raise ConfigError(f"table {table}: the score of id {int(ids[wrong[0]])} is NaN; allowed: numbers")
    return found
