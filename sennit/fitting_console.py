# SPDX-License-Identifier: Apache-2.0
"""A console that shows every cell of a table whole, also where the terminal is too narrow for its columns.

Rich cuts cells where columns do not fit. A figure without its last digits is a wrong figure. So headings and texts are
wrapped first. If that is not enough, each row becomes a block with a line for each column.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

INDENT: Final = "  "
MEASURED: Final = 10_000
"""Wider than any table."""


class FittingConsole(Console):
    """Shows tables as `fitted` gives them, also those inside something else."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        options = options or self.options
        # Without headings it is the grid of a progress bar, which fits itself.
        if isinstance(renderable, Table) and renderable.show_header:
            fitting = fitted(renderable, self, options.max_width)
            renderable = Group(*fitting) if isinstance(fitting, list) else fitting
        return super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        """Leaves the error to the command. Rich would end the process."""
        error = sys.exception()
        assert error is not None
        raise error


def fitted(table: Table, console: Console, width: int) -> ConsoleRenderable | list[RenderableType]:
    """The table with columns that fit `width` characters, or the lines of its rows as blocks."""
    wide = console.options.update_width(MEASURED)
    cells = [[column.header, *column.cells] for column in table.columns]
    sizes = [[Measurement.get(console, wide, cell) for cell in column] for column in cells]
    most = [max(size.maximum for size in column) for column in sizes]
    least = [
        high if column.no_wrap else max(size.minimum for size in column_sizes)
        for column, column_sizes, high in zip(table.columns, sizes, most, strict=True)
    ]
    # Borders, and what is between columns.
    around = Measurement.get(console, wide, table).maximum - sum(most)
    if around + sum(most) <= width:
        return table
    free = width - around - sum(least)
    if free < 0:
        return _blocks(table, cells)
    narrow = copy.copy(table)
    narrow.columns = [copy.copy(column) for column in table.columns]
    for column, low, high in zip(narrow.columns, least, most, strict=True):
        column.width = low + min(free, high - low)
        free -= column.width - low
    return narrow


def _blocks(table: Table, cells: Sequence[Sequence[RenderableType]]) -> list[RenderableType]:
    """The first cell of each row, below it a line for each other cell: its heading and it."""
    headings = [_text(column[0]) for column in cells]
    longest = max((heading.cell_len for heading in headings[1:]), default=0)
    lines: list[RenderableType] = [] if table.title is None else [table.title]
    for first, *others in zip(*(column[1:] for column in cells), strict=True):
        lines.append(Text(" ").join(part for part in (headings[0], _text(first)) if part))
        for heading, cell in zip(headings[1:], map(_text, others), strict=True):
            if cell:
                padded = heading.copy()
                padded.align("left", longest)
                lines.append(Text.assemble(INDENT, padded, INDENT, cell))
    return lines if table.caption is None else [*lines, table.caption]


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))
