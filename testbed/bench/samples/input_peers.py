# SPDX-License-Identifier: Apache-2.0
"""Loaders of others that `sennit bench input --against` lets read the Parquet file, each in the way it is fastest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader

from sennit.runtime.data.packages import require

DATASETS, MOSAIC = "datasets", "mosaicml-streaming"
AGAINST: Final = (DATASETS, MOSAIC)
_PURPOSE: Final = "sennit bench input --against"

Read = Callable[[], int]
"""Reads all rows in batches, and returns how many there were."""


def check(name: str) -> None:
    """Raises `MissingPackage` if the peer is not installed."""
    # Files are on this machine. Nothing is asked of a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    require({DATASETS: "datasets", MOSAIC: "streaming"}[name], package=name, purpose=_PURPOSE)


def reader(name: str, path: Path, table: Any, *, batch_rows: int) -> Read:
    """`table`: the rows of the file, which mosaicml-streaming gets in its own format, beside the file."""
    return _hugging_face(path, batch_rows) if name == DATASETS else _mosaic(path, table, batch_rows)


def _hugging_face(path: Path, batch_rows: int) -> Read:
    """Its stream, which gives batches of tensors."""
    datasets: Any = require("datasets", package=DATASETS, purpose=_PURPOSE)
    rows = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", streaming=True, cache_dir=str(path.parent / "cache")
    ).with_format("torch")
    return lambda: sum(len(next(iter(batch.values()))) for batch in rows.iter(batch_size=batch_rows))


def _mosaic(path: Path, table: Any, batch_rows: int) -> Read:
    """Its shards have rows, which a DataLoader joins."""
    streaming: Any = require("streaming", package=MOSAIC, purpose=_PURPOSE)
    folder = path.with_suffix(".mds")
    kinds = {field.name: {"float": "float32"}.get(str(field.type), str(field.type)) for field in table.schema}
    with streaming.MDSWriter(out=str(folder), columns=kinds) as out:
        for row in table.to_pylist():
            out.write(row)
    rows = streaming.StreamingDataset(local=str(folder), shuffle=False, batch_size=batch_rows)
    loader = DataLoader(rows, batch_size=batch_rows)
    return lambda: sum(len(next(iter(batch.values()))) for batch in loader)
