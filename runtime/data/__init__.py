# SPDX-License-Identifier: Apache-2.0
"""Training data: data sets, their encoding, the order of samples, and the batches of one rank.

`Source` names a data set, `Order` says which sample is in which batch, `BatchSource` hands out batches.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.data.batch import Batch as Batch
    from sennit.runtime.data.batch_source import BatchSource as BatchSource
    from sennit.runtime.data.batch_source import MemorySource as MemorySource
    from sennit.runtime.data.batch_source import prepared as prepared
    from sennit.runtime.data.errors import DataError as DataError
    from sennit.runtime.data.order import Order as Order
    from sennit.runtime.data.preprocessing import PreparedData as PreparedData
    from sennit.runtime.data.preprocessing import Preprocessing as Preprocessing
    from sennit.runtime.data.raw_samples import Feature as Feature
    from sennit.runtime.data.raw_samples import RawSamples as RawSamples
    from sennit.runtime.data.samples import Column as Column
    from sennit.runtime.data.samples import Samples as Samples
    from sennit.runtime.data.source import Source as Source
    from sennit.runtime.data.sources import load as load
    from sennit.runtime.data.sources import register as register

__getattr__ = exporter(
    __name__,
    {
        "Batch": "batch",
        "BatchSource": "batch_source",
        "MemorySource": "batch_source",
        "prepared": "batch_source",
        "DataError": "errors",
        "Feature": "raw_samples",
        "RawSamples": "raw_samples",
        "Order": "order",
        "PreparedData": "preprocessing",
        "Preprocessing": "preprocessing",
        "Column": "samples",
        "Samples": "samples",
        "Source": "source",
        "load": "sources",
        "register": "sources",
    },
)
