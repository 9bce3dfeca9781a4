# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a data set: two data sets with the same one train the same model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.samples import Samples


def fingerprint(samples: Samples) -> str:
    """SHA-256 in hexadecimal over labels, dense features and ids; its name and its files' names are not part of it."""
    digest = hashlib.sha256()

    def add(name: str, array: npt.NDArray[Any]) -> None:
        content = np.ascontiguousarray(array)
        content = content.astype(content.dtype.newbyteorder("<"), copy=False)
        digest.update(json.dumps([name, str(content.dtype), content.shape]).encode())
        digest.update(memoryview(content).cast("B"))

    add("labels", samples.labels.numpy())
    add("dense", samples.dense.numpy())
    for column in samples.columns:
        add(f"{column.name} {column.row_count}", column.values.numpy())
        if column.offsets is not None:
            add("offsets", column.offsets.numpy())
    return digest.hexdigest()
