# SPDX-License-Identifier: Apache-2.0
"""What a run or a feeder loads. `sources` loads it, and imports NumPy and pandas; `--help` has the options without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from sennit.options import Option, check


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A data set. `sennit train` and `sennit feed` have its options; each names the data in its own way."""

    data: str = "flights"
    """One of `sources.NAMES`, or the place of files: a path, a pattern or a folder, under any protocol of
    fsspec."""

    further: tuple[str, ...] = ()
    """More places of files, appended to the first as one data set."""

    evaluation: tuple[str, ...] = ()
    """Places of files whose rows are the evaluation rows, and no others. Empty: a share of the rows."""

    schema: Annotated[Path | None, Option()] = None
    """Schema of the files (TOML or JSON). It is described in `data/schema.py`."""

    min_frequency: Annotated[int, Option(metavar="N", low=1, high=2**63 - 1)] = 1
    """Values of a dictionary that training rows have less often than N times share row 0, and train it. A schema may
    say otherwise for a column."""

    samples: Annotated[int, Option(low=1)] = 32_768
    """Synthetic: number of samples. Other data sets have their own."""

    row_limit: Annotated[int, Option(low=1)] = 100_000
    """Synthetic: rows of the largest tables. MLPerf's own limit is 40 million."""

    zipf_exponent: Annotated[float, Option(flag="--zipf", low=0)] = 1.05
    """Synthetic: skew of the rows. It is the exponent of Zipf's law; 0 is uniform."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def name(self) -> str:
        """The name of the data set, for messages: of a path, its last part."""
        return PurePosixPath(self.data).name or self.data
