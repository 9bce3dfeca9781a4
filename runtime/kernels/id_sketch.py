# SPDX-License-Identifier: Apache-2.0
"""How often ids without rows have come, estimated: a count-min sketch (Cormode and Muthukrishnan, Journal of Algorithms
55, 2005) in the memory of one state of a dynamic table.

It never counts an id too low until it halves its counts, and it forgets no id for others. `offload.sketch` is the
sketch of ids in feeders: with samples, fewer cells, and no updates that depend on what was there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from sennit.offload import hashing
from sennit.runtime.kernels.checks import check_entries

LINES: Final = 4
"""Cells of an id. Its count is too high only if other ids are in all of them."""

CELLS_PER_ROW: Final = 4
"""Cells of a line in each row of memory."""

COUNT_MAX: Final = (1 << 8) - 1
"""What a cell can count to."""

IDS_PER_CELL: Final = 1 / 8
"""Counts are halved when so many ids for each cell of a line have come, times the count that is asked for (the "reset"
of Einziger et al., TinyLFU, 2017). They would only rise otherwise, until each new id seems to be frequent. Cells are
Poisson-distributed at most: of ids that come for the first time, less than (1 - e^(-2/8))^4 = 0.24 % seem to come for
the second, and less than 10^-9 for the fifth."""

_SEED: Final = 0x61646D6974


class IdSketch:
    """Counts of ids. What they are depends on the batches alone, and not on the order of ids in a batch."""

    def __init__(self, entries: Tensor, asked: int) -> None:
        """`entries`: int64 [rows, 2], 2 rows or more, contiguous, in host memory; zeros for a new sketch. The sketch
        changes it. Row 0 has how many ids have come since counts were halved; each other row has four cells, a byte
        each, of each of four lines. `asked`: the count that is asked for, up to 255.
        """
        check_entries(entries)
        self.entries = entries
        self._cells = entries.view(torch.uint8).view(-1)
        self._width = CELLS_PER_ROW * (len(entries) - 1)
        self.most = max(1, int(asked * self._width * IDS_PER_CELL))
        """How many ids come before counts are halved."""
        self._before: list[tuple[Tensor, Tensor]] | None = None
        """Cells and what they had before, in order, for `undo`; None: nobody will ask."""

    def begin(self) -> None:
        """What changes from now on can be taken back, until `keep` or `undo`."""
        self._before = []

    def keep(self) -> None:
        """What has changed since `begin` stays."""
        self._before = None

    def undo(self) -> None:
        """Takes back what has changed since `begin`."""
        before, self._before = self._before or [], None
        for cells, counts in reversed(before):
            self._cells[cells] = counts

    def add(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Counts `ids`, int64 [n], each once, `counts` times, int [n]. Int64 [n]: how often each has come by now, up to
        255.

        A cell rises no further than the highest count of its ids needs (the "conservative update" of Estan and
        Varghese, SIGCOMM 2002), so the order of ids does not matter.
        """
        self._halve(int(counts.sum()))
        cells = self._cells_of(ids)
        self._remember(cells.flatten())
        totals = (self._cells[cells].amin(0).to(torch.int64) + counts).clamp_(max=COUNT_MAX)
        risen = totals.to(torch.uint8).expand(LINES, -1)
        self._cells.scatter_reduce_(0, cells.flatten(), risen.flatten(), "amax")
        return totals

    def _halve(self, more: int) -> None:
        """Notes that `more` ids come. Halves all counts before them, if it is time."""
        if int(self.entries[0, 0]) >= self.most:
            self._remember(torch.arange(len(self._cells)))
            self.entries[0] = 0
            self._cells.bitwise_right_shift_(1)
        else:
            self._remember(torch.arange(self.entries[0].nbytes))
        self.entries[0, 0] += more

    def _remember(self, cells: Tensor) -> None:
        if self._before is not None:
            self._before.append((cells, self._cells[cells]))

    def _cells_of(self, ids: Tensor) -> Tensor:
        """Int64 [lines, n]: the cell of each id in each line. Two halves of one hash make all of them (Kirsch and
        Mitzenmacher, 2006).
        """
        hashed = hashing.splitmix64(_SEED, ids.numpy().view(np.uint64))
        first, second = hashed >> np.uint64(32), hashed & np.uint64(0xFFFF_FFFF)
        lines = np.arange(LINES, dtype=np.uint64)[:, None]
        cells = (first + lines * second) % np.uint64(self._width)
        # After row 0: line after line in each row.
        row, place = np.divmod(cells, np.uint64(CELLS_PER_ROW))
        found = ((row + np.uint64(1)) * np.uint64(LINES) + lines) * np.uint64(CELLS_PER_ROW) + place
        return torch.from_numpy(found.astype(np.int64))
