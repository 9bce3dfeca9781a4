# SPDX-License-Identifier: Apache-2.0
"""`synthetic`: the shape of MLPerf's DLRM-DCNv2 workload, scaled down, with labels that can be learnt.

It has 26 tables with MLPerf's multi-hot sizes, and 13 dense features. Rows follow a Zipf law, because real traces are
as skewed (Bagpipe, SOSP 2023: 1 % of the rows take 92 % of the accesses). Labels are drawn from a planted logistic
model over the dense features and one hidden weight per row, so that AUC shows whether training works.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import numpy_stream

# MLPerf Training, recommendation_v2: multi_hot_sizes and num_embeddings_per_feature (40 M cap).
BAG_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
TABLE_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
DENSE_COUNT = 13


def load(*, sample_count: int, row_limit: int, zipf_exponent: float, seed: int) -> Samples:
    """Makes the samples, a pure function of the arguments.

    `row_limit` caps every table, as MLPerf caps them at 40 M.
    """
    if sample_count < 2:
        raise DataError(f"synthetic: {sample_count} samples; at least 2 are needed")
    if row_limit < 1:
        raise DataError(f"synthetic: a limit of {row_limit} rows; at least 1 is needed")
    if not 0 <= zipf_exponent <= 4:
        raise DataError(f"synthetic: Zipf exponent {zipf_exponent}; allowed: 0 (uniform) to 4")
    stream = numpy_stream(seed, "synthetic", "dense")
    dense = stream.standard_normal((sample_count, DENSE_COUNT))
    score = dense @ (stream.standard_normal(DENSE_COUNT) / DENSE_COUNT**0.5)
    columns = []
    for table, (bag_size, full_rows) in enumerate(zip(BAG_SIZES, TABLE_ROWS, strict=True)):
        row_count = min(full_rows, row_limit)
        stream = numpy_stream(seed, "synthetic", "table", table)
        rows = zipf_rows(stream.random(sample_count * bag_size), row_count, zipf_exponent)
        hidden = stream.standard_normal(row_count)
        score += hidden[rows].reshape(sample_count, bag_size).mean(1) / len(BAG_SIZES) ** 0.5 * bag_size**0.5
        columns.append(
            Column.bags(f"table_{table:02d}", row_count, rows, np.full(sample_count, bag_size, dtype=np.int64))
        )
    chance = 1 / (1 + np.exp(-(2 * score - 1)))
    labels = numpy_stream(seed, "synthetic", "labels").random(sample_count) < chance
    return Samples(
        name="synthetic",
        dense=torch.from_numpy(dense.astype(np.float32)),
        dense_names=tuple(f"dense_{index:02d}" for index in range(DENSE_COUNT)),
        labels=torch.from_numpy(labels.astype(np.float32)),
        columns=tuple(columns),
    )


def zipf_rows(uniform: npt.NDArray[np.float64], row_count: int, exponent: float) -> npt.NDArray[np.int64]:
    """Rows in [0, row_count) with P(row) close to (row + 1)^-exponent, by inversion of the continuous law.

    Row 0 is the most frequent. Exponent 0 is the uniform law; exponent 1 needs the logarithm as a separate case.
    """
    end = row_count + 1.0
    if abs(exponent - 1) < 1e-9:
        place = np.exp(uniform * np.log(end))
    else:
        power = 1 - exponent
        place = (1 + uniform * (end**power - 1)) ** (1 / power)
    rows: npt.NDArray[np.int64] = np.clip(place.astype(np.int64) - 1, 0, row_count - 1)
    return rows
