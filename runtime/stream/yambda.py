# SPDX-License-Identifier: Apache-2.0
"""`synthetic-yambda` as a file of a stream, made when it is read: Yambda's columns of `multi_event`, and a label."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.schema import Schema, parse_schema
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.planted import indices
from sennit.runtime.stream.yambda_planted import EVENTS, PlantedYambda, SyntheticYambda

BLOCK_ROWS: Final = 1 << 16
TIME: Final = "timestamp"
LABEL: Final = "listen_plus"
ACTIONS: Final = ("listen", LABEL, *tuple(EVENTS)[1:])
"""What `action` counts: an event's type, with listens by half apart."""


@dataclass(frozen=True)
class YambdaFile:
    """All events, a `StreamFile`. Columns, as Yambda has them: `uid`, `item_id`, `timestamp` (seconds since the stream
    begins), `is_organic`, `played_ratio_pct` (null but for listens), `event_type`; and `action` and `listen_plus`.
    """

    settings: SyntheticYambda
    name: str = "synthetic-yambda"
    is_sequential: bool = False
    skipped_rows: int = 0

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.settings.identity).encode()).hexdigest()

    @cached_property
    def block_rows(self) -> tuple[int, ...]:
        full, rest = divmod(self.settings.rows, BLOCK_ROWS)
        return (BLOCK_ROWS,) * full + (rest,) * (rest > 0)

    @property
    def schema(self) -> Any:
        arrow = require("pyarrow", package="pyarrow", purpose=self.name)
        return arrow.schema(
            [
                arrow.field("uid", arrow.uint32(), nullable=False),
                arrow.field("item_id", arrow.uint32(), nullable=False),
                arrow.field(TIME, arrow.int64(), nullable=False),
                arrow.field("is_organic", arrow.uint8(), nullable=False),
                arrow.field("played_ratio_pct", arrow.uint16()),
                arrow.field("event_type", arrow.string(), nullable=False),
                arrow.field("action", arrow.uint8(), nullable=False),
                arrow.field(LABEL, arrow.int8(), nullable=False),
            ]
        )

    def where(self, block: int, row: int | None = None) -> str:
        return f"block {block}" if row is None else f"block {block}, row {row}"

    def read(self, block: int, columns: Sequence[str], *, begin: int = 0) -> Iterator[Any]:
        """As `StreamFile.read`. Raises DataError for columns that there are not."""
        for name in columns:
            if name not in self.schema.names:
                raise DataError(f"{self.name}: no column {name!r}; allowed: {', '.join(self.schema.names)}")
        planted, first = PlantedYambda(self.settings), block * BLOCK_ROWS
        end = first + self.block_rows[block]
        for piece in range(first + begin, end, PIECE_ROWS):
            yield self._events(planted, piece, min(piece + PIECE_ROWS, end), columns)

    def span(self, block: int, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest time of a block. Of other columns nothing is known."""
        if column != TIME:
            return None
        first = block * BLOCK_ROWS
        ends = np.array([first, first + self.block_rows[block] - 1], np.uint64)
        return tuple(PlantedYambda(self.settings).times(ends).tolist())

    def _events(self, planted: PlantedYambda, begin: int, end: int, columns: Sequence[str]) -> Any:
        arrow = require("pyarrow", package="pyarrow", purpose=self.name)
        rows = indices(begin, end)
        made: dict[str, Any] = {TIME: planted.times(rows)}
        if {"uid", "item_id"} & set(columns):
            events = planted.events(rows)
            made |= {"uid": events.users, "item_id": planted.items(events)}
        if set(columns) - made.keys() - {"uid", "item_id"}:
            # All of these follow from the label.
            logits = planted.logits(rows)
            labels = planted.labels(rows, logits)
            types = planted.types(rows, logits, labels)
            played = arrow.array(planted.played(rows, labels), mask=types != 0)
            made |= {"is_organic": planted.is_organic(rows, types), "played_ratio_pct": played, LABEL: labels}
            made |= {"event_type": arrow.array(list(EVENTS)).take(arrow.array(types))}
            made |= {"action": np.where(types == 0, labels, types + 1)}
        kinds = arrow.schema([self.schema.field(name) for name in columns])
        arrays = [arrow.array(made[field.name]).cast(field.type) for field in kinds]
        return arrow.record_batch(arrays, schema=kinds)


def schema_of(settings: SyntheticYambda) -> Schema:
    """What the columns mean: a label that is to be predicted from the user, the item, and the user's history."""
    return parse_schema(
        {
            "label": LABEL,
            "time": TIME,
            "sparse": {
                "uid": {"rows": settings.users},
                "item_id": {"rows": settings.items},
                TIME: {"encode": "value"},
                "action": {"rows": len(ACTIONS)},
                "is_organic": {"rows": 2},
            },
            "history": {
                "of": "uid",
                "last": settings.last,
                "columns": ["item_id", TIME],
                "past": ["action", "is_organic"],
            },
        }
    )
