# SPDX-License-Identifier: Apache-2.0
"""Training data as a stream: blocks of rows on files, one order, and the batches of one rank.

`StreamLoader` is for a loop of one's own. `open_stream`, `fit` and `StreamSource` are what it and `sennit train` are
made of.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.stream.fitting import fit as fit
    from sennit.runtime.stream.loader import StreamLoader as StreamLoader
    from sennit.runtime.stream.order import StreamOrder as StreamOrder
    from sennit.runtime.stream.settings import StreamSettings as StreamSettings
    from sennit.runtime.stream.settings import open_stream as open_stream
    from sennit.runtime.stream.source import StreamSource as StreamSource
    from sennit.runtime.stream.spooling import spool as spool
    from sennit.runtime.stream.synthetic import SyntheticDay as SyntheticDay

__getattr__ = exporter(
    __name__,
    {
        "fit": "fitting",
        "StreamLoader": "loader",
        "StreamOrder": "order",
        "StreamSettings": "settings",
        "open_stream": "settings",
        "StreamSource": "source",
        "spool": "spooling",
        "SyntheticDay": "synthetic",
    },
)
