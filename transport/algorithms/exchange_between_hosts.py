# SPDX-License-Identifier: Apache-2.0
"""Alltoall and allgather that code between hosts alone, of counts at run time (exchange_coded.py).

An alltoall leaves the parts that stay on a host as they are. So its bits depend on which ranks share a host.

An allgather gives Q of each part to all ranks, as if it coded everywhere. But a part goes to each other host once, to
the rank that stands for its giver there. Inside a host it travels decoded.
"""

from __future__ import annotations

from typing import Final

from sennit.transport.algorithms.exchange_coded import Exchange
from sennit.transport.algorithms.ranges import peers_after, peers_before
from sennit.transport.plans.coding import Coding
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Operand, Plan
from sennit.transport.plans.signature import Kind

# A message that a neighbour passes on has this slot plus the giver's rank. A giver's own messages have lower slots.
PASSED_ON_SLOT: Final = 2


def alltoall_between_hosts(*, world: int, rank: int, hosts: Hosts, dtype: Dtype, coding: Coding) -> Plan:
    """Buffers: `[input, output]`. Counts: `alltoall_counts`. `coding.between_hosts` is set."""
    plan = Exchange(Kind.ALLTOALL, world, rank, dtype, coding, elements_at=1, parts=2 * world, output=1 + world)
    near = _neighbours(hosts, rank)
    for peer in peers_after(rank, world):
        source = CountRange(1, 1 + peer)
        if peer in near:
            plan.send_plain(peer, 0, peer, Operand(0, source))
        else:
            plan.send(peer, [peer], source=source, first_index=CountRange(0, 1 + peer))
    plan.copy(rank, world + rank, source=CountRange(1, 1 + rank))
    for peer in peers_before(rank, world):
        if peer in near:
            plan.receive_plain(peer, 0, world + peer)
        else:
            plan.receive(peer, world + peer)
    return plan.build()


def allgather_between_hosts(*, world: int, rank: int, hosts: Hosts, dtype: Dtype, coding: Coding) -> Plan:
    """Buffers: `[input, output]`. Counts: `allgather_counts`. `coding.between_hosts` is set."""
    plan = Exchange(Kind.ALLGATHER, world, rank, dtype, coding, elements_at=0, parts=world, output=0)
    home, near = hosts.of_rank(rank), _neighbours(hosts, rank)
    others = list(peers_after(home, len(hosts.spans)))
    plan.send(rank, [hosts.relay(host, rank) for host in others], source=0, first_index=CountRange(0, rank))
    made = plan.keep(rank, rank, source=0, first_index=CountRange(0, rank))
    for peer in near:
        plan.send_plain(peer, 0, rank, Operand(1, CountRange(0, rank)), after=[made])
    for peer in near:
        plan.receive_plain(peer, 0, peer)
    # All ranks of a host have this order, so that they take what is passed on as it is sent.
    for peer in (peer for host in reversed(others) for peer in range(*hosts.spans[host])):
        relay = hosts.relay(home, peer)
        if relay == rank:
            made = plan.receive(peer, peer)
            for other in near:
                plan.send_plain(other, PASSED_ON_SLOT + peer, peer, Operand(1, CountRange(0, peer)), after=[made])
        else:
            plan.receive_plain(relay, PASSED_ON_SLOT + peer, peer)
    return plan.build()


def _neighbours(hosts: Hosts, rank: int) -> list[int]:
    return [peer for peer in range(*hosts.spans[hosts.of_rank(rank)]) if peer != rank]
