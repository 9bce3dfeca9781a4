# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, and how each is loaded. Every rank loads the same samples; batches are cut later.

Others than those of sennit are added by `register`, by an entry point of an installed package (group
`sennit.data_sets`, the data set's name = its function), or named as `package.module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from sennit import user_code
from sennit.runtime.data import adult, flights, movielens, parquet, synthetic
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.files import DataFile, check_once, find_files
from sennit.runtime.data.packages import check_installed, package_file
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import Schema, read_schema
from sennit.runtime.data.source import Source

Load = Callable[[Source, int], RawSamples | Samples]
"""`load(source, seed)` returns all samples, the same on every rank."""

ENTRY_POINTS: Final = "sennit.data_sets"

# name -> (package, one of its files): enough to report early that something is not installed.
PACKAGED = {
    "flights": (flights.PACKAGE, "data/flights.csv.zip"),
    "movielens": (movielens.PACKAGE, "ml-100k/ml-100k.inter"),
    "adult": (adult.PACKAGE, "datasets/data/adult.parquet.brotli"),
}


def _synthetic(source: Source, seed: int) -> Samples:
    return synthetic.load(
        sample_count=source.samples, row_limit=source.row_limit, zipf_exponent=source.zipf_exponent, seed=seed
    )


_registered: dict[str, Load] = {
    "flights": lambda source, seed: flights.load(),
    "movielens": lambda source, seed: movielens.load(),
    "adult": lambda source, seed: adult.load(),
    "synthetic": _synthetic,
}
NAMES: Final = tuple(_registered)
"""The data sets of sennit."""

MADE: Final = ("synthetic-stream", "synthetic-yambda")
"""Streams that are made when they are read (`stream/synthetic_data.py`). They are no files, and have no samples to load
at once."""


def register(name: str, load: Load) -> None:
    """Makes the samples that `load(source, seed)` returns the data set `name`, in this process.

    `source` has the options of the run, `seed` its seed. Raises DataError for a name that is taken, or that is written
    as a path or as `package.module:function`.
    """
    if name in _registered:
        raise DataError(f"data set {name!r} exists already; allowed: another name")
    if _is_path(name) or user_code.is_name(name):
        raise DataError(f"data set {name!r}; allowed: a name without any of / . * :")
    _registered[name] = load


def check(source: Source) -> None:
    """Checks names, packages and files at once, and raises what `load` would raise for missing ones.

    Imports none of the user's code.
    """
    if not is_named(source.data):
        check_once((*_files(source), *find_files(source.evaluation)))
        _check_frequency(source, [part.encode for part in schema_of(source).sparse])
        return
    if source.further:
        raise DataError(f"data sets {source.data!r} and {source.further[0]!r}; allowed: one, or several paths")
    if source.evaluation:
        raise DataError(f"--eval-data belongs to files, but the data set is {source.data!r}")
    if source.schema is not None:
        raise DataError(f"--schema belongs to files, but the data set is {source.data!r}")
    purpose = f"the data set {source.data}"
    check_installed("pyarrow", purpose=purpose)
    if source.data in PACKAGED:
        package_file(*PACKAGED[source.data], purpose=purpose)


def check_code(source: Source) -> None:
    """Imports the function of a data set of the user's. Raises ConfigError or DataError that says what is wrong."""
    if is_named(source.data):
        _find(source.data)


def load(source: Source, *, seed: int, histories: bool = False) -> RawSamples:
    """Loads the data set, before anything is fitted to it. `seed` is for `synthetic` and for users' data sets.

    `histories`: with the features that are only for histories, if the data set has any.
    """
    check(source)
    raw = _load_named(source, seed) if is_named(source.data) else _load_parquet(source)
    raw = raw if histories else raw.without_history()
    _check_frequency(source, [feature.kind for feature in raw.features])
    return replace(raw, features=tuple(feature.at_least(source.min_frequency) for feature in raw.features))


def _check_frequency(source: Source, kinds: Collection[str]) -> None:
    """Raises DataError if values are to be counted that nobody counts. `kinds`: `encode` of each column of ids."""
    if source.min_frequency != 1 and "dictionary" not in kinds:
        raise DataError(
            f"--min-frequency {source.min_frequency}, but no column of {source.data} has a dictionary; allowed: with "
            "encode = 'dictionary', whose values are counted"
        )


def _load_named(source: Source, seed: int) -> RawSamples:
    found: Any = _find(source.data)(source, seed)
    if isinstance(found, Samples):
        found = RawSamples.of(found)
    if not isinstance(found, RawSamples):
        raise DataError(
            f"data set {source.data} returned a {type(found).__name__}; allowed: Samples or RawSamples of "
            "sennit.runtime.data"
        )
    return found


def _find(name: str) -> Load:
    if name in _registered:
        return _registered[name]
    for point in entry_points(group=ENTRY_POINTS, name=name):
        function: Load = point.load()
        return function
    function = user_code.find("data set", name)
    if not callable(function):
        raise DataError(f"data set {name} is a {type(function).__name__}; allowed: a function that returns samples")
    user_code.check_arguments("data set", name, function, "source", "seed")
    return function


def is_named(name: str) -> bool:
    """Whether it is not a path."""
    if name in _registered or user_code.is_name(name):
        return True
    return not _is_path(name) and bool(entry_points(group=ENTRY_POINTS, name=name))


def _is_path(name: str) -> bool:
    return any(sign in name for sign in "/.*") or Path(name).exists()


def _load_parquet(source: Source) -> RawSamples:
    return parquet.load(source.name, _files(source), schema_of(source).without_history(), find_files(source.evaluation))


def _files(source: Source) -> tuple[DataFile, ...]:
    if not _is_path(source.data):
        names = (*_registered, *MADE)
        raise DataError(
            f"data set {source.data!r}; allowed: {', '.join(names)}, package.module:function, or files, and no file or "
            f"folder of that name is here"
        )
    return find_files((source.data, *source.further))


def schema_of(source: Source) -> Schema:
    """The schema of files. Raises DataError if there is none, or if it cannot be used."""
    if source.schema is None:
        raise DataError(f"data set {source.data!r}: files need --schema FILE, which names their label and columns")
    return read_schema(source.schema)
