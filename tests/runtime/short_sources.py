# SPDX-License-Identifier: Apache-2.0
"""Sources of batches for samples that a test has made: short streams, opened and fitted as by `sennit train`."""

from __future__ import annotations

import torch.distributed as dist

from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.samples import Samples
from sennit.runtime.stream.fitting import fit
from sennit.runtime.stream.settings import OpenedStream, short_stream
from sennit.runtime.stream.source import StreamSource
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.streamed import stream_source


def opened(data: RawSamples | Samples, config: TrainingConfig) -> OpenedStream:
    return short_stream(data, config.stream, config.order_settings)


def fitted(found: OpenedStream, known: Preprocessing | None = None) -> Preprocessing:
    """Each rank makes the whole pass."""
    stream = found.stream
    return fit(stream.name, stream.index, stream.schema, found.order.training_part(), found.fitted, known=known)


def short_source(
    data: RawSamples | Samples, config: TrainingConfig, known: Preprocessing | None = None
) -> StreamSource:
    """This rank's source in the default group."""
    found = opened(data, config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return stream_source(config, found, fitted(found, known), rank=rank, world_size=world_size)
