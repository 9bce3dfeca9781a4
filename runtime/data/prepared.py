# SPDX-License-Identifier: Apache-2.0
"""A data set as one run trains on it: split, preprocessed by its training rows, and in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sennit.runtime.data.features import RawSamples
from sennit.runtime.data.fingerprint import fingerprint
from sennit.runtime.data.order import Order
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.samples import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """Made once a run; it does not depend on the number of ranks."""

    samples: Samples
    order: Order
    preprocessing: Preprocessing
    fingerprint: str
    """Of the data before preprocessing (`fingerprint`)."""

    @classmethod
    def of(cls, data: RawSamples | Samples, order: Order) -> Self:
        """DataError if they cannot be trained on."""
        raw = RawSamples.of(data) if isinstance(data, Samples) else data
        preprocessing = Preprocessing.fit(raw, order.is_training())
        return cls(
            samples=preprocessing.apply(raw).samples(),
            order=order,
            preprocessing=preprocessing,
            fingerprint=fingerprint(raw),
        )
