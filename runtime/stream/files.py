# SPDX-License-Identifier: Apache-2.0
"""What a stream is made of: files, each a list of blocks of rows. Formats implement `StreamFile`.

Why blocks: docs/decisions/0071-a-stream-is-blocks-in-one-order.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from sennit.runtime.data.packages import require

PIECE_ROWS: Final = 1 << 14
"""Rows that `read` yields at once, at most. Memory of a reader goes with it, and not with the size of blocks."""


def arrow_threads() -> bool:
    """Whether Arrow is to decode in its own threads. Where it has one processor, they cost a sixth of the time.

    Arrow counts as OMP_NUM_THREADS says, which torchrun sets to 1.
    """
    arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
    return bool(arrow.cpu_count() > 1)


class StreamFile(Protocol):
    """One file of a stream, as it was when the index was made. It can be pickled, and each `read` opens it anew."""

    @property
    def name(self) -> str:
        """As the user would write it, for messages."""

    @property
    def block_rows(self) -> tuple[int, ...]:
        """The rows of each block. A block may be empty."""

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal over what tells this content from another.

        For Parquet and Arrow these are the size and the footer, for text it is all of it.
        """

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the whole file."""

    @property
    def is_sequential(self) -> bool:
        """Whether a block can be reached only through the blocks before it.

        Then a shuffled order would read the file from its beginning for each block.
        """

    @property
    def skipped_rows(self) -> int:
        """The rows, broken or refused, that were left out, as the user asked for. `block_rows` does not count them."""

    def where(self, block: int, row: int | None = None) -> str:
        """A block, or a row of it, in words for messages: "row group 3, row 17", or "line 1718" of a text."""

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        """Yields the rows of a block from `begin` on, as `pyarrow.RecordBatch`es with these columns.

        Raises DataError, with the file's name and the block, for rows that cannot be read, and for a file that is no
        longer what it was when the index was made.
        """

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest value of a column in a block, if the format knows them without reading rows.

        Times and dates are integers in the unit of the column's type. None for a column with nulls.
        """
