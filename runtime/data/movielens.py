# SPDX-License-Identifier: Apache-2.0
"""`movielens`: does a user rate a film 4 or 5? (MovieLens 100K, read from the package recbole)

943 users, 1,682 films, 100,000 ratings; a film has one to six genres, so that bags of several ids are
exercised. MovieLens has its own terms of use (research); no copy of it is in this repository.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import package_file, require
from sennit.runtime.data.samples import Column, Samples, vocabulary

PACKAGE = "recbole"
GOOD_RATING = 4
_PURPOSE = "the data set movielens"


def load() -> Samples:
    """Reads ratings, users and films, in the order of time."""
    ratings, users, films = (_table(f"ml-100k.{kind}") for kind in ("inter", "user", "item"))
    rated_at = ratings["timestamp"].to_numpy().astype(np.int64)
    order = np.argsort(rated_at, kind="stable")
    rated_at = rated_at[order]
    user = _row_of(users["user_id"], ratings["user_id"])[order]
    film = _row_of(films["item_id"], ratings["item_id"])[order]

    genres_of = [sorted(set((text or "").split())) for text in films["class"].to_pylist()]
    names = sorted({genre for genres in genres_of for genre in genres})
    genre_rows = {name: row for row, name in enumerate(names)}
    bags = [np.array([genre_rows[name] for name in genres_of[row]], dtype=np.int64) for row in film]

    columns = [Column.single("user", len(users), user), Column.single("film", len(films), film)]
    for name in ("age", "gender", "occupation"):
        row_count, ids = vocabulary(users[name].to_pylist())
        columns.append(Column.single(name, row_count, ids[user]))
    columns.append(
        Column.bags("genre", len(names), np.concatenate(bags), np.array([len(bag) for bag in bags], dtype=np.int64))
    )
    years = [_year(text) for text in films["release_year"].to_pylist()]
    known = [year for year in years if year is not None]
    year = np.array([float(np.mean(known)) if value is None else value for value in years])[film]
    seconds_of_day = rated_at % 86_400
    dense = {
        "release_year": year,
        "rated_at": rated_at.astype(np.float64),
        "hour_sin": np.sin(2 * np.pi * seconds_of_day / 86_400),
        "hour_cos": np.cos(2 * np.pi * seconds_of_day / 86_400),
    }
    # The mean goes first: in float32 a time in seconds would keep only minutes.
    centred = [column - column.mean() for column in dense.values()]
    good = ratings["rating"].to_numpy()[order] >= GOOD_RATING
    return Samples(
        name="movielens",
        dense=torch.from_numpy(np.stack(centred, 1).astype(np.float32)),
        dense_names=tuple(dense),
        labels=torch.from_numpy(good.astype(np.float32)),
        columns=tuple(columns),
    )


def _table(file_name: str) -> Any:
    """A file of RecBole's atomic format: tab-separated, with the type behind each column's name."""
    csv = require("pyarrow.csv", package="pyarrow", purpose=_PURPOSE)
    path = package_file(PACKAGE, f"ml-100k/{file_name}", purpose=_PURPOSE)
    types = {"release_year:token": "string", "class:token_seq": "string"}
    table = csv.read_csv(
        path,
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types),
    )
    return table.rename_columns([name.split(":")[0] for name in table.column_names])


def _row_of(known: Any, wanted: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    rows = {value: row for row, value in enumerate(known.to_pylist())}
    try:
        return np.array([rows[value] for value in wanted.to_pylist()], dtype=np.int64)
    except KeyError as error:
        raise DataError(f"movielens: a rating names id {error.args[0]}, which has no description") from None


def _year(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None
