# SPDX-License-Identifier: Apache-2.0
"""Names of data sets, and how each is loaded. Every rank loads the same samples; batches are cut later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sennit.runtime.data import adult, flights, movielens, parquet, synthetic
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import package_file, require
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import read_schema

# name -> (package, a file of it): enough to say early that something is not installed.
PACKAGED = {
    "flights": (flights.PACKAGE, "data/flights.csv.zip"),
    "movielens": (movielens.PACKAGE, "ml-100k/ml-100k.inter"),
    "adult": (adult.PACKAGE, "datasets/data/adult.parquet.brotli"),
}
NAMES = (*PACKAGED, "synthetic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What to load."""

    data: str = "flights"
    """One of `NAMES`, or the path of a Parquet file."""

    schema: Path | None = None
    """Schema file of a Parquet data set (`data/schema.py`)."""

    samples: int = 32_768
    """Samples of `synthetic`; the others have their own number."""

    row_limit: int = 100_000
    """Rows of `synthetic`'s largest tables; MLPerf's own limit is 40 million."""

    zipf_exponent: float = 1.05
    """Skew of `synthetic`'s rows; 0 is uniform."""


def check(source: Source) -> None:
    """Raises what `load` would raise for a wrong name, a missing package or a missing file, at once."""
    if source.data in PACKAGED:
        purpose = f"the data set {source.data}"
        require("pyarrow", package="pyarrow", purpose=purpose)
        package_file(*PACKAGED[source.data], purpose=purpose)
    elif source.data != "synthetic":
        path = Path(source.data)
        if path.suffix != ".parquet" and not path.exists():
            raise DataError(f"data set {source.data!r}; allowed: {', '.join(NAMES)}, or the path of a Parquet file")
        if not path.is_file():
            raise DataError(f"data set {source.data!r}: no such file")
        if source.schema is None:
            raise DataError(f"data set {source.data!r}: a Parquet file needs --schema FILE (docs/training.md)")
        read_schema(source.schema)
        return
    if source.schema is not None:
        raise DataError(f"--schema belongs to a Parquet file, but the data set is {source.data!r}")


def load(source: Source, *, seed: int) -> Samples:
    """Loads the data set."""
    check(source)
    match source.data:
        case "flights":
            return flights.load()
        case "movielens":
            return movielens.load()
        case "adult":
            return adult.load()
        case "synthetic":
            return synthetic.load(
                sample_count=source.samples, row_limit=source.row_limit, zipf_exponent=source.zipf_exponent, seed=seed
            )
    assert source.schema is not None
    return parquet.load(Path(source.data), read_schema(source.schema))
