# SPDX-License-Identifier: Apache-2.0
"""Collectives as pure functions to a `Plan`, one file each.

All take only keyword arguments, `world` and `rank` among them. They are deterministic: ranks that pass matching
arguments get plans that fit. Their docstrings list the buffers that a caller must post, in order, and the counts if
the plan takes any. Data movement knows elements only by `item_bytes`. Its `type_code` goes into the signature, so that
ranks with different types find out (a `Dtype`, or any other byte that the caller assigns to a type).
"""

from sennit.transport.algorithms.allgather import allgather
from sennit.transport.algorithms.allgather_by_host import allgather_by_host
from sennit.transport.algorithms.allreduce import allreduce
from sennit.transport.algorithms.allreduce_coded import allreduce_coded
from sennit.transport.algorithms.allreduce_dissemination import allreduce_dissemination
from sennit.transport.algorithms.allreduce_halving import allreduce_halving
from sennit.transport.algorithms.allreduce_round_trip import allreduce_round_trip
from sennit.transport.algorithms.alltoall import alltoall
from sennit.transport.algorithms.alltoall_bruck import alltoall_bruck
from sennit.transport.algorithms.alltoall_by_host import alltoall_by_host
from sennit.transport.algorithms.barrier import barrier
from sennit.transport.algorithms.between_hosts import allreduce_between_hosts, reduce_scatter_between_hosts
from sennit.transport.algorithms.broadcast import broadcast
from sennit.transport.algorithms.exchange_between_hosts import allgather_between_hosts, alltoall_between_hosts
from sennit.transport.algorithms.exchange_coded import (
    allgather_coded,
    allgather_counts,
    alltoall_coded,
    alltoall_counts,
)
from sennit.transport.algorithms.gather import gather
from sennit.transport.algorithms.gather_tree import gather_tree
from sennit.transport.algorithms.point_to_point import recv, send
from sennit.transport.algorithms.reduce import reduce
from sennit.transport.algorithms.reduce_scatter import reduce_scatter
from sennit.transport.algorithms.reduce_scatter_coded import coded_pieces, reduce_scatter_coded, reduce_scatter_counts
from sennit.transport.algorithms.reduce_scatter_counted import reduce_scatter_counted
from sennit.transport.algorithms.reduce_scatter_halving import reduce_scatter_halving
from sennit.transport.algorithms.reduce_tree import reduce_tree
from sennit.transport.algorithms.scatter import scatter

__all__ = [
    "allgather",
    "allgather_between_hosts",
    "allgather_by_host",
    "allgather_coded",
    "allgather_counts",
    "allreduce",
    "allreduce_between_hosts",
    "allreduce_coded",
    "allreduce_dissemination",
    "allreduce_halving",
    "allreduce_round_trip",
    "alltoall",
    "alltoall_between_hosts",
    "alltoall_bruck",
    "alltoall_by_host",
    "alltoall_coded",
    "alltoall_counts",
    "barrier",
    "broadcast",
    "coded_pieces",
    "gather",
    "gather_tree",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_between_hosts",
    "reduce_scatter_coded",
    "reduce_scatter_counted",
    "reduce_scatter_counts",
    "reduce_scatter_halving",
    "reduce_tree",
    "scatter",
    "send",
]
