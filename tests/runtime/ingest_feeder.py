# SPDX-License-Identifier: Apache-2.0
"""A feeder of synthetic samples as a process: `python ingest_feeder.py HOST PORT SAMPLES ROW_LIMIT`."""

from __future__ import annotations

import functools
import sys

import torch

from sennit.offload.ingest.feeder import Feeder
from sennit.offload.ingest.protocol import Terms
from sennit.offload.records import Rows
from sennit.runtime.data import sources
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.sources import Source
from sennit.runtime.ingest.facts import facts_of, rows_of
from sennit.runtime.ingest.order import Order

TIMEOUT_S = 60.0


def main(host: str, port: int, source: Source) -> None:
    torch.set_num_threads(1)
    samples = sources.load(source, seed=1)

    @functools.cache
    def prepared(**settings: int) -> tuple[Order, Samples]:
        order = Order(name=samples.name, sample_count=len(samples), **settings)  # type: ignore[arg-type]
        return order, samples.standardised(order.train_rows)

    def records(terms: Terms, batch: int) -> Rows:
        order, standardised = prepared(**terms.order)
        return rows_of(standardised, order.part(batch, terms.rank, terms.world_size))

    with Feeder("test", facts_of(samples), records, timeout_s=TIMEOUT_S) as feeder:
        feeder.run(host, port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Source(data="synthetic", samples=int(sys.argv[3]), row_limit=int(sys.argv[4])))
