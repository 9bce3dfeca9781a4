# SPDX-License-Identifier: Apache-2.0
"""Allgather by host: a part goes to each other host once, and there from rank to rank in shared memory.

On every other host one rank stands for the giver (`Hosts.relay`). That rank passes on what it gets. So all ranks of a
host receive equally much, and the link between two hosts carries each part once, not once for each rank.
"""

from __future__ import annotations

from typing import Final

from sennit.transport.algorithms.allgather import allgather_builder
from sennit.transport.algorithms.ranges import copy_part, peers_after, recv_part, send_part
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Operand, Plan
from sennit.transport.plans.signature import BY_HOST, Kind, signature

# A message that a neighbour passes on has this slot plus the rank that gave it.
PASSED_ON_SLOT: Final = 1


def allgather_by_host(
    *,
    world: int,
    rank: int,
    hosts: Hosts,
    item_bytes: int,
    type_code: int = Dtype.U8,
    in_place: bool = False,
    list_output: bool = False,
) -> Plan:
    """Counts and buffers are those of `allgather`."""
    builder, own, outputs = allgather_builder(
        "allgather by host",
        world=world,
        rank=rank,
        mark=signature(Kind.ALLGATHER, type_code=type_code, root=BY_HOST),
        item_bytes=item_bytes,
        in_place=in_place,
        list_output=list_output,
    )
    home = hosts.of_rank(rank)
    neighbours = [peer for peer in peers_after(rank, world) if hosts.of_rank(peer) == home]
    others = list(peers_after(home, len(hosts.spans)))
    for host in others:
        send_part(builder, hosts.relay(host, rank), own)
    for peer in neighbours:
        send_part(builder, peer, own)
    for peer in reversed(neighbours):
        recv_part(builder, peer, outputs[peer])
    # All ranks of a host have this order, so that they take what is passed on as it is sent.
    for giver in (giver for host in reversed(others) for giver in range(*hosts.spans[host])):
        part, relay = outputs[giver], hosts.relay(home, giver)
        if relay != rank:
            builder.recv(relay, PASSED_ON_SLOT + giver, part.buffer, part.offset, part.size_bytes)
            continue
        came = builder.recv(giver, 0, part.buffer, part.offset, part.size_bytes)
        for peer in neighbours:
            source = Operand(part.buffer, part.offset)
            builder.send(peer, PASSED_ON_SLOT + giver, source, part.size_bytes, after=[came])
    if not in_place:
        copy_part(builder, own, outputs[rank])
    return builder.build()
