# SPDX-License-Identifier: Apache-2.0
"""Collectives as pure functions to a `Plan`, one file each.

All take only keyword arguments, `world` and `rank` among them. They are deterministic: ranks that pass matching
arguments get plans that fit. Their docstrings list the buffers that a caller must post, in order, and the counts if
the plan takes any. Data movement knows elements only by `item_bytes`. Its `type_code` goes into the signature, so that
ranks with different types find out (a `Dtype`, or any other byte that the caller assigns to a type).
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.transport.algorithms.allgather import allgather as allgather
    from sennit.transport.algorithms.allgather_by_host import allgather_by_host as allgather_by_host
    from sennit.transport.algorithms.allreduce import allreduce as allreduce
    from sennit.transport.algorithms.allreduce_aggregated import allreduce_aggregated as allreduce_aggregated
    from sennit.transport.algorithms.allreduce_aggregated import is_summed as is_summed
    from sennit.transport.algorithms.allreduce_coded import allreduce_coded as allreduce_coded
    from sennit.transport.algorithms.allreduce_dissemination import allreduce_dissemination as allreduce_dissemination
    from sennit.transport.algorithms.allreduce_halving import allreduce_halving as allreduce_halving
    from sennit.transport.algorithms.allreduce_round_trip import allreduce_round_trip as allreduce_round_trip
    from sennit.transport.algorithms.alltoall import alltoall as alltoall
    from sennit.transport.algorithms.alltoall_bruck import alltoall_bruck as alltoall_bruck
    from sennit.transport.algorithms.alltoall_by_host import alltoall_by_host as alltoall_by_host
    from sennit.transport.algorithms.barrier import barrier as barrier
    from sennit.transport.algorithms.between_hosts import allreduce_between_hosts as allreduce_between_hosts
    from sennit.transport.algorithms.between_hosts import reduce_scatter_between_hosts as reduce_scatter_between_hosts
    from sennit.transport.algorithms.broadcast import broadcast as broadcast
    from sennit.transport.algorithms.exchange_between_hosts import allgather_between_hosts as allgather_between_hosts
    from sennit.transport.algorithms.exchange_between_hosts import alltoall_between_hosts as alltoall_between_hosts
    from sennit.transport.algorithms.exchange_coded import allgather_coded as allgather_coded
    from sennit.transport.algorithms.exchange_coded import allgather_counts as allgather_counts
    from sennit.transport.algorithms.exchange_coded import alltoall_coded as alltoall_coded
    from sennit.transport.algorithms.exchange_coded import alltoall_counts as alltoall_counts
    from sennit.transport.algorithms.gather import gather as gather
    from sennit.transport.algorithms.gather_tree import gather_tree as gather_tree
    from sennit.transport.algorithms.point_to_point import recv as recv
    from sennit.transport.algorithms.point_to_point import send as send
    from sennit.transport.algorithms.reduce import reduce as reduce
    from sennit.transport.algorithms.reduce_scatter import reduce_scatter as reduce_scatter
    from sennit.transport.algorithms.reduce_scatter_coded import coded_pieces as coded_pieces
    from sennit.transport.algorithms.reduce_scatter_coded import reduce_scatter_coded as reduce_scatter_coded
    from sennit.transport.algorithms.reduce_scatter_coded import reduce_scatter_counts as reduce_scatter_counts
    from sennit.transport.algorithms.reduce_scatter_counted import piece_counts as piece_counts
    from sennit.transport.algorithms.reduce_scatter_counted import pieces_of as pieces_of
    from sennit.transport.algorithms.reduce_scatter_counted import reduce_scatter_counted as reduce_scatter_counted
    from sennit.transport.algorithms.reduce_scatter_halving import reduce_scatter_halving as reduce_scatter_halving
    from sennit.transport.algorithms.reduce_tree import reduce_tree as reduce_tree
    from sennit.transport.algorithms.scatter import scatter as scatter

# Loaded when they are first used: a group needs few of them, and all would take longer than to make the group.
__getattr__ = exporter(
    __name__,
    {
        "allgather": "allgather",
        "allgather_by_host": "allgather_by_host",
        "allreduce": "allreduce",
        "allreduce_aggregated": "allreduce_aggregated",
        "is_summed": "allreduce_aggregated",
        "allreduce_coded": "allreduce_coded",
        "allreduce_dissemination": "allreduce_dissemination",
        "allreduce_halving": "allreduce_halving",
        "allreduce_round_trip": "allreduce_round_trip",
        "alltoall": "alltoall",
        "alltoall_bruck": "alltoall_bruck",
        "alltoall_by_host": "alltoall_by_host",
        "barrier": "barrier",
        "allreduce_between_hosts": "between_hosts",
        "reduce_scatter_between_hosts": "between_hosts",
        "broadcast": "broadcast",
        "allgather_between_hosts": "exchange_between_hosts",
        "alltoall_between_hosts": "exchange_between_hosts",
        "allgather_coded": "exchange_coded",
        "allgather_counts": "exchange_coded",
        "alltoall_coded": "exchange_coded",
        "alltoall_counts": "exchange_coded",
        "gather": "gather",
        "gather_tree": "gather_tree",
        "recv": "point_to_point",
        "send": "point_to_point",
        "reduce": "reduce",
        "reduce_scatter": "reduce_scatter",
        "coded_pieces": "reduce_scatter_coded",
        "reduce_scatter_coded": "reduce_scatter_coded",
        "reduce_scatter_counts": "reduce_scatter_coded",
        "piece_counts": "reduce_scatter_counted",
        "pieces_of": "reduce_scatter_counted",
        "reduce_scatter_counted": "reduce_scatter_counted",
        "reduce_scatter_halving": "reduce_scatter_halving",
        "reduce_tree": "reduce_tree",
        "scatter": "scatter",
    },
)
