# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a data set: two data sets with the same one train the same model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.features import RawSamples


def fingerprint(raw: RawSamples) -> str:
    """SHA-256 in hexadecimal over labels, dense features and ids with what is to be done to them.

    Its name and the names and cuts of its files are not part of it.
    """
    digest = hashlib.sha256()

    def add(about: list[Any], array: npt.NDArray[Any]) -> None:
        if array.dtype == object:
            # Text: lengths keep apart what lies side by side.
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
        # Ids may be of 32 or 64 bits.
        values = part.values.astype(np.int64, copy=False)
        add(["ids", part.name, part.row_count, part.salt, part.first], values)
        for name, array in (("offsets", part.offsets), ("dictionary", part.dictionary)):
            if array is not None:
                add([name], array)
    return digest.hexdigest()
