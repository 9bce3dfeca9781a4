# SPDX-License-Identifier: Apache-2.0
"""What a `synthetic-stream` has. A file of its own, as its options are in the help of a command, without NumPy."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from sennit.options import Option, check
from sennit.runtime.data.errors import DataError

VERSION: Final = 1
"""Incremented when the same settings give other samples."""

FORMATS: Final = ("parquet", "arrow", "csv", "tsv")
"""What `sennit make-stream` can write."""


def counts(text: str) -> tuple[int, ...]:
    """Numbers of ids that live, for each table. Raises DataError for what is no list of numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DataError(f"--living {text!r}; allowed: a number for each table, with commas between them") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticStream:
    """Which stream. All fields decide bits."""

    days: Annotated[int, Option(low=1, high=36_500)] = 7
    """Days that the stream has."""

    rows_per_day: Annotated[int, Option(low=1, high=1 << 40)] = 100_000
    """Samples of a day, evenly spread over it."""

    living: Annotated[
        tuple[int, ...], Option(metavar="N,...", parse=counts, text=lambda counts: ",".join(map(str, counts)))
    ] = (20_000, 5_000, 1_000, 100)
    """Ids that live at any one time, for each table."""

    life_days: Annotated[float, Option(above=0, high=36_500)] = 20.0
    """Days from the birth of an id to its death: `living` / `life_days` are born each day."""

    drift_days: Annotated[float, Option(above=0, high=36_500)] = 20.0
    """Days in which the correlation of a weight with itself falls to 1/e."""

    zipf: Annotated[float, Option(low=0, high=4)] = 1.05
    """Exponent of Zipf's law among the ids that live; 0 is uniform."""

    dense: Annotated[int, Option(low=1, high=1_024)] = 4
    """Dense features."""

    base_rate: Annotated[float, Option(above=0, below=1)] = 0.2
    """Share of clicks that is planned; it moves with the weights."""

    seed: Annotated[int, Option(low=0, high=2**63 - 1)] = 1
    """Decides samples and weights."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`, and `DataError` for numbers of ids."""
        check(self)
        if not self.living or not all(1 <= count <= 1 << 31 for count in self.living):
            raise DataError(f"living {self.living}; allowed: a number for each table, 1 to {1 << 31:,}")

    @property
    def row_count(self) -> int:
        return self.days * self.rows_per_day

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(f"dense_{number:02d}" for number in range(self.dense))

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(f"table_{number:02d}" for number in range(len(self.living)))

    @property
    def hashed_rows(self) -> tuple[int, ...]:
        """Rows of each table into which its ids may be hashed: four times as many as ids in the whole stream, up to
        the next power of two."""
        every = (living * (1 + self.days / self.life_days) for living in self.living)
        return tuple(1 << max(1, math.ceil(4 * ids) - 1).bit_length() for ids in every)

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal over what decides the samples."""
        return hashlib.sha256(json.dumps([VERSION, asdict(self)], sort_keys=True).encode()).hexdigest()
