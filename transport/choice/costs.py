# SPDX-License-Identifier: Apache-2.0
"""What the cost model (cost_model.py) is told: the collective, and how long its parts take between two ranks."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from sennit.transport.light_tuple import LightTuple


class Collective(StrEnum):
    """The collectives that have several algorithms."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    ALLGATHER = "allgather"
    GATHER = "gather"
    """A gather of equal parts."""
    ALLTOALL = "alltoall"
    """An alltoall of equal parts."""


class Costs(LightTuple):
    """Seconds that the parts of a collective take, for one way between ranks."""

    round_s: float
    """From the send of a small message until its receiver can go on."""
    message_s: float
    """Processor time of a message on one rank, at both ends together."""
    byte_s: float
    """Seconds for each byte that a rank sends."""
    peer_share: float
    """The share by which each further peer, up to PEERS_MAX, makes a byte dearer: acknowledgements are more, bursts
    shorter."""
    fold_byte_s: float
    """Seconds for each byte that a reduction reads."""


SHARED_MEMORY: Final = Costs(round_s=2.5e-6, message_s=0.8e-6, byte_s=0.05e-9, peer_share=0, fold_byte_s=0.08e-9)
NETWORK: Final = Costs(round_s=8e-6, message_s=5e-6, byte_s=1e-9, peer_share=0.1, fold_byte_s=0.08e-9)
