# SPDX-License-Identifier: Apache-2.0
"""`movielens`: does a user rate a film 4 or 5? (MovieLens 100K, read from the package recbole)

It has 943 users, 1,682 films and 100,000 ratings. A film has one to six genres, which exercises bags of several ids.
With histories, a rating has those of the same user before it: films, times, and ratings.
MovieLens has its own terms of use (research); this repository holds no copy of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import package_file, require
from sennit.runtime.data.raw_samples import Feature, RawSamples, dense_fields
from sennit.runtime.data.schema import History

PACKAGE = "recbole"
GOOD_RATING = 4
RATINGS = 5
HISTORY = History(of="user", last=200, columns=("film", "rated_at_s"), past=("rating",))
_PURPOSE = "the data set movielens"


def load() -> RawSamples:
    """Reads ratings, users and films, in the order of time."""
    ratings, users, films = (_table(f"ml-100k.{kind}") for kind in ("inter", "user", "item"))
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    arrow = require("pyarrow", package="pyarrow", purpose=_PURPOSE)
    ratings = ratings.take(compute.sort_indices(ratings, sort_keys=[("timestamp", "ascending")]))
    user = _row_of(compute, users["user_id"], ratings["user_id"])
    film = _row_of(compute, films["item_id"], ratings["item_id"])

    genres = [sorted(set((text or "").split())) for text in films["class"].to_pylist()]
    bags = arrow.array(genres, arrow.list_(arrow.string())).take(film)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(bags.value_lengths().to_numpy(), np.int64))])
    features = [Feature.categories(name, ratings[name]) for name in ("user_id", "item_id")]
    features += [Feature.categories(name, users[name].take(user)) for name in ("age", "gender", "occupation")]
    features.append(Feature.categories("genre", bags.flatten(), offsets))
    names = {"user_id": "user", "item_id": "film"}

    rated_at = np.asarray(ratings["timestamp"].to_numpy(), np.float64)
    seconds_of_day = rated_at % 86_400
    years = [_year(text) for text in films["release_year"].to_pylist()]
    dense = {
        "release_year": np.array(years, np.float64)[film.to_numpy()],
        "rated_at": rated_at,
        "hour_sin": np.sin(2 * np.pi * seconds_of_day / 86_400),
        "hour_cos": np.cos(2 * np.pi * seconds_of_day / 86_400),
    }
    stars = np.asarray(ratings["rating"].to_numpy())
    seconds = np.asarray(ratings["timestamp"].to_numpy(), np.int64)
    features += [
        Feature(name="rated_at_s", row_count=1, values=seconds, is_value=True),
        Feature(name="rating", row_count=RATINGS + 1, values=stars.astype(np.int64)),
    ]
    return RawSamples(
        name="movielens",
        # Float32 would keep a time in seconds only to minutes.
        dense=torch.from_numpy(np.stack(list(dense.values()), 1)),
        dense_fields=dense_fields(dense),
        labels=torch.from_numpy((stars >= GOOD_RATING).astype(np.float32)),
        features=tuple(replace(part, name=names.get(part.name, part.name)) for part in features),
        times=seconds,
        history=HISTORY,
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


def _row_of(compute: Any, known: Any, wanted: Any) -> Any:
    """The index of each `wanted` value in `known`, as Arrow integers."""
    rows = compute.index_in(wanted.combine_chunks(), value_set=known.combine_chunks())
    if rows.null_count:
        missing = wanted.filter(rows.is_null())[0].as_py()
        raise DataError(f"movielens: a rating names id {missing}, which has no description")
    return rows


def _year(text: str | None) -> float:
    """NaN if the value is not known."""
    return float(text) if text and text.isdigit() else float("nan")
