# SPDX-License-Identifier: Apache-2.0
"""Data sets, and how their values become what a model reads.

`Source` names a data set, `BatchSource` hands out batches. The order of samples is that of `sennit.runtime.stream`.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.data.batch import Batch as Batch
    from sennit.runtime.data.batch_source import BatchSource as BatchSource
    from sennit.runtime.data.errors import DataError as DataError
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
        "DataError": "errors",
        "Feature": "raw_samples",
        "RawSamples": "raw_samples",
        "Preprocessing": "preprocessing",
        "Column": "samples",
        "Samples": "samples",
        "Source": "source",
        "load": "sources",
        "register": "sources",
    },
)
