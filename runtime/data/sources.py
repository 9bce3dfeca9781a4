# SPDX-License-Identifier: Apache-2.0
"""The names of data sets, and how each is loaded. Every rank loads the same samples; batches are cut later."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from sennit.runtime.data import adult, flights, movielens, parquet, synthetic
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile, find_files
from sennit.runtime.data.packages import check_installed, package_file
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.schema import Schema, read_schema
from sennit.runtime.data.source import Source

# name -> (package, one of its files): enough to report early that something is not installed.
PACKAGED = {
    "flights": (flights.PACKAGE, "data/flights.csv.zip"),
    "movielens": (movielens.PACKAGE, "ml-100k/ml-100k.inter"),
    "adult": (adult.PACKAGE, "datasets/data/adult.parquet.brotli"),
}
NAMES = (*PACKAGED, "synthetic")


def check(source: Source) -> None:
    """Checks names, packages and files at once, and raises what `load` would raise for missing ones."""
    if source.data not in NAMES:
        _files(source)
        _schema(source)
        return
    if source.further:
        raise DataError(f"data sets {source.data!r} and {source.further[0]!r}; allowed: one, or several Parquet paths")
    if source.schema is not None:
        raise DataError(f"--schema belongs to Parquet files, but the data set is {source.data!r}")
    if source.data in PACKAGED:
        purpose = f"the data set {source.data}"
        check_installed("pyarrow", purpose=purpose)
        package_file(*PACKAGED[source.data], purpose=purpose)


def load(source: Source, *, seed: int) -> RawSamples:
    """Loads the data set, before anything is fitted to it. `seed` is for `synthetic`."""
    check(source)
    match source.data:
        case "flights":
            return flights.load()
        case "movielens":
            return movielens.load()
        case "adult":
            return adult.load()
        case "synthetic":
            return RawSamples.of(
                synthetic.load(
                    sample_count=source.samples,
                    row_limit=source.row_limit,
                    zipf_exponent=source.zipf_exponent,
                    seed=seed,
                )
            )
    return _load_parquet(source)


def _load_parquet(source: Source) -> RawSamples:
    name = PurePosixPath(source.data).name or source.data
    return parquet.load(name, _files(source), _schema(source))


def _files(source: Source) -> tuple[DataFile, ...]:
    is_path = any(sign in source.data for sign in "/.*") or Path(source.data).exists()
    if not is_path:
        raise DataError(f"data set {source.data!r}; allowed: {', '.join(NAMES)}, or where Parquet files are")
    return find_files((source.data, *source.further))


def _schema(source: Source) -> Schema:
    if source.schema is None:
        raise DataError(f"data set {source.data!r}: Parquet files need --schema FILE (docs/reference/data-sets.md)")
    return read_schema(source.schema)
