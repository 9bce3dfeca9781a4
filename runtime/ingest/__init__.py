# SPDX-License-Identifier: Apache-2.0
"""Fed runs: feeders send samples over the network, which become batches of the trainer.

`FedSource` is the trainer's end, `sennit feed` (`command`) the feeder's; docs/reference/ingest.md.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.ingest.fed import FedSource as FedSource
    from sennit.runtime.ingest.feed import FeedReport as FeedReport

__getattr__ = exporter(
    __name__,
    {
        "FedSource": "fed",
        "FeedReport": "feed",
    },
)
