# SPDX-License-Identifier: Apache-2.0
"""A data set as one run trains on it: split, preprocessed by its training rows, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sennit.runtime.data.fingerprint import fingerprint
from sennit.runtime.data.order import Order
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.samples import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """Made once per run. Does not depend on the number of ranks."""

    samples: Samples
    order: Order
    preprocessing: Preprocessing
    fingerprint: str
    """The fingerprint of the data before preprocessing."""

    @classmethod
    def of(cls, data: RawSamples | Samples, order: Order) -> Self:
        """Splits and preprocesses the data. Raises DataError if they cannot be trained on."""
        raw = RawSamples.of(data) if isinstance(data, Samples) else data
        preprocessing = Preprocessing.fit(raw, order.is_training())
        return cls(
            samples=preprocessing.apply(raw).samples(),
            order=order,
            preprocessing=preprocessing,
            fingerprint=fingerprint(raw),
        )
