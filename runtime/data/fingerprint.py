# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a data set. Two data sets with the same fingerprint train the same model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.raw_samples import RawSamples


def fingerprint(raw: RawSamples) -> str:
    """SHA-256 in hexadecimal over labels, dense features, ids, and the preprocessing of the ids.

    The names of the data set and of its files, and how it is cut into files, are not part of it.
    """
    digest = hashlib.sha256()

    def add(about: list[Any], array: npt.NDArray[Any]) -> None:
        if array.dtype == object:
            # The lengths separate adjacent texts.
            parts = [text.encode() for text in array]
            add([*about, "lengths"], np.array([len(part) for part in parts], np.int64))
            digest.update(b"".join(parts))
            return
        content = np.ascontiguousarray(array)
        content = content.astype(content.dtype.newbyteorder("<"), copy=False)
        digest.update(json.dumps([about, str(content.dtype), content.shape]).encode())
        if content.size:
            digest.update(content.view(np.uint8).data)

    add(["labels"], raw.labels.numpy())
    add(["dense", [[part.name, part.clamp, part.log1p] for part in raw.dense_fields]], raw.dense.numpy())
    for part in raw.features:
        # Ids have 32 or 64 bits.
        values = part.values.astype(np.int64, copy=False)
        add(["ids", part.name, part.row_count, part.salt, part.first], values)
        for name, array in (("offsets", part.offsets), ("dictionary", part.dictionary)):
            if array is not None:
                add([name], array)
    return digest.hexdigest()
