# SPDX-License-Identifier: Apache-2.0
"""Samples that one thread makes and another one is done with leave no memory behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from sennit.runtime.data.arrow_columns import PartOfFile, Piece, raw_samples
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import parse_schema
from sennit.runtime.stream.encoder import Encoder

pa = pytest.importorskip("pyarrow")

ROWS, NUMBERS = 16_384, 96


def own_memory_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_a_thread_that_reads_ahead_leaves_no_memory_behind() -> None:
    names = [f"n{number}" for number in range(NUMBERS)]
    numbers = np.random.default_rng(1).standard_normal((NUMBERS, ROWS), dtype=np.float32)
    columns = {"label": np.zeros(ROWS, np.int8), "user": np.zeros(ROWS, np.int64)}
    rows = pa.record_batch(columns | dict(zip(names, numbers, strict=True)))
    schema = parse_schema({"label": "label", "dense": names, "sparse": {"user": {"rows": 10}}})
    place = PartOfFile("rows", "all")
    raw = raw_samples("rows", [Piece(rows.slice(0, 64), place)], schema)
    encoder = Encoder(schema, Preprocessing.fit(raw, torch.ones(64, dtype=torch.bool)))
    size = ROWS * NUMBERS * 4
    with ThreadPoolExecutor(1) as ahead:
        made = ahead.submit(encoder.encode, rows, place).result()
        before = own_memory_bytes()
        for _ in range(60):
            made = ahead.submit(encoder.encode, rows, place).result()
        # Spare buffers have 64 MiB, about ten of these.
        assert own_memory_bytes() - before < 25 * size
    assert len(made) == ROWS
