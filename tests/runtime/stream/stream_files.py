# SPDX-License-Identifier: Apache-2.0
"""Small files of a stream: numbers with nulls, ids of every encoding, lists, and a column of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sennit.runtime.data.seeds import numpy_stream

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

HOUR_S = 3600
SCHEMA = """
label = "clicked"
time = "at"
sample_weight = "worth"
[dense.price]
clamp = [-2.0, 2.0]
[dense.age]
log1p = true
[sparse.user]
rows = 40
[sparse.seen]
encode = "hash"
rows = 30
salt = 3
first = 2
[sparse.city]
encode = "dictionary"
"""

# Blocks have 125 rows: three batches of 40.
RUNNING = SCHEMA.replace("[dense.price]", "[dense.price]\nrunning = 2_000").replace(
    "[dense.age]", "[dense.age]\nrunning = 3_000"
)


def table(seed: int, count: int = 1200) -> Any:
    """Rows over 12 hours. Cities of later hours are new ones."""
    stream = numpy_stream(seed, "stream files")
    user, price = stream.integers(0, 40, count), stream.standard_normal(count)
    hour = np.arange(count) * 12 // count
    lengths = stream.integers(0, 4, count)
    seen = stream.integers(-(2**62), 2**62, int(lengths.sum()))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    clicked = price + np.sin(user) + stream.standard_normal(count) > 0
    return pa.table(
        {
            "clicked": pa.array(clicked),
            "at": pa.array(np.arange(count) * (12 * HOUR_S) // count, pa.timestamp("s")),
            "worth": pa.array(stream.random(count)),
            "price": pa.array(price, mask=stream.random(count) < 0.1),
            "age": pa.array(stream.integers(0, 90, count), pa.int16()),
            "user": pa.array(user, pa.int32()),
            "seen": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(seen)),
            "city": pa.array([f"city {number}" for number in stream.integers(0, 9, count) + hour]),
        }
    )


def write(folder: Path, rows: Any, *, files: int = 3, group: int = 90, schema: str = SCHEMA) -> list[str]:
    """Writes Parquet files and a schema. Returns the options that name them."""
    folder.mkdir(exist_ok=True)
    for number in range(files):
        begin, end = (of * len(rows) // files for of in (number, number + 1))
        pq.write_table(rows.slice(begin, end - begin), folder / f"part-{number}.parquet", row_group_size=group)
    (folder / "schema.toml").write_text(schema)
    return ["--data", str(folder), "--schema", str(folder / "schema.toml")]
