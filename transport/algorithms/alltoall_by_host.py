# SPDX-License-Identifier: Apache-2.0
"""Alltoall of equal parts by host: few large messages between two hosts, in place of one for each pair of ranks.

What the ranks of one host send to those of another goes in streams. A stream serves some of the receiving ranks. One
rank of the sending host gathers all parts for them in shared memory, and sends them as one message. One of those ranks
receives it, and gives the others theirs (Träff and Rougier, "MPI collectives and datatypes for hierarchical all-to-all
communication", 2014). The ranks of a host take turns in this, so all of them send if there are enough streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sennit.transport.algorithms.ranges import Part, copy_part, counted_parts, peers_after, recv_part, send_part
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import BY_HOST, Kind, signature

SCRATCH: Final = 2
ONE_PART: Final = CountRange(0, 1)


@dataclass(frozen=True, slots=True)
class _Stream:
    """From one host to another."""

    source: int
    """The host that sends."""
    width: int
    """How many ranks it has."""
    targets: range
    sender: int
    receiver: int
    """One of the targets."""

    @property
    def parts(self) -> int:
        return self.width * len(self.targets)


def alltoall_by_host(
    *,
    world: int,
    rank: int,
    hosts: Hosts,
    streams: int,
    part_bytes_max: int,
    item_bytes: int,
    type_code: int = Dtype.U8,
) -> Plan:
    """Count: the elements of a part, `part_bytes_max` at most. `streams`: the most from one host to another.

    Buffers: `[input, output]`.
    """
    home = hosts.of_rank(rank)
    low, high = hosts.spans[home]
    neighbours = [peer for peer in peers_after(rank, world) if low <= peer < high]
    # The ranks of a host must list them in one order.
    others = list(peers_after(home, len(hosts.spans)))
    leaving = [stream for host in others for stream in _streams(hosts, home, host, streams)]
    coming = [stream for host in reversed(others) for stream in _streams(hosts, host, home, streams)]
    sent = [stream for stream in leaving if stream.sender == rank]
    given = [stream for stream in coming if stream.receiver == rank and len(stream.targets) > 1]
    # Where in scratch the parts of a stream begin, in rows of one source each. A second time: of one target each.
    first: dict[_Stream, int] = {}
    parts = 0
    for stream in [*sent, *given]:
        first[stream], parts = parts, parts + stream.parts * (1 if stream in sent else 2)
    builder = PlanBuilder(
        "alltoall by host",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLTOALL, type_code=type_code, root=BY_HOST),
        buffer_bytes=[CountRange(0, world)] * 2,
        scratch_bytes=parts * part_bytes_max,
        count_count=max(world, parts),
        unit_bytes=item_bytes,
        equal_counts=True,
    )
    inputs = counted_parts(world, first_count=0, first_buffer=0, in_list=False)
    outputs = counted_parts(world, first_count=0, first_buffer=1, in_list=False)

    def turn(stream: _Stream, column: int, buffer: int, to: int, taken: int) -> list[int]:
        """Copies a target's parts, which are apart because each source sent its own together."""
        return [
            builder.copy(
                Operand(SCRATCH, CountRange(0, first[stream] + row * len(stream.targets) + column)),
                buffer,
                CountRange(0, to + row),
                ONE_PART,
                after=[taken],
            )
            for row in range(stream.width)
        ]

    # First what others send on: further messages depend on it.
    for stream in leaving:
        if stream.sender != rank:
            source = Operand(0, inputs[stream.targets[0]].offset)
            builder.send(stream.sender, 1 + stream.targets[0], source, CountRange(0, len(stream.targets)))
    gathered = []
    for stream in sent:
        row, slot = CountRange(0, len(stream.targets)), 1 + stream.targets[0]
        places = [CountRange(0, first[stream] + place * len(stream.targets)) for place in range(stream.width)]
        came = [builder.copy(Operand(0, inputs[stream.targets[0]].offset), SCRATCH, places[rank - low], row)]
        for peer in reversed(neighbours):
            came.append(builder.recv(peer, slot, SCRATCH, places[peer - low], row))
        gathered.append((stream, came))
    for stream, came in gathered:
        source = Operand(SCRATCH, CountRange(0, first[stream]))
        builder.send(stream.receiver, 0, source, CountRange(0, stream.parts), after=came)
    for peer in neighbours:
        send_part(builder, peer, inputs[peer])

    kept: list[tuple[_Stream, int, int]] = []
    for stream in coming:
        output = Part(1, outputs[hosts.spans[stream.source].low].offset, CountRange(0, stream.width))
        slot = 1 + world + stream.source
        if stream.receiver == rank and len(stream.targets) == 1:
            recv_part(builder, stream.sender, output)
        elif stream.receiver == rank:
            taken = builder.recv(stream.sender, 0, SCRATCH, CountRange(0, first[stream]), CountRange(0, stream.parts))
            for column, target in enumerate(stream.targets):
                if target == rank:
                    kept.append((stream, column, taken))
                    continue
                packed = first[stream] + stream.parts + column * stream.width
                packs = turn(stream, column, SCRATCH, packed, taken)
                builder.send(target, slot, Operand(SCRATCH, CountRange(0, packed)), output.size_bytes, after=packs)
    for peer in reversed(neighbours):
        recv_part(builder, peer, outputs[peer])
    for stream in coming:
        if rank in stream.targets and stream.receiver != rank:
            offset = outputs[hosts.spans[stream.source].low].offset
            builder.recv(stream.receiver, 1 + world + stream.source, 1, offset, CountRange(0, stream.width))
    for stream, column, taken in kept:
        turn(stream, column, 1, hosts.spans[stream.source].low, taken)
    copy_part(builder, inputs[rank], outputs[rank])
    return builder.build()


def _streams(hosts: Hosts, source: int, target: int, limit: int) -> Iterator[_Stream]:
    """Those from one host to another."""
    low, high = hosts.spans[source]
    begin, end = hosts.spans[target]
    count = min(limit, end - begin)
    far = len(hosts.spans)
    for number in range(count):
        targets = range(begin + (end - begin) * number // count, begin + (end - begin) * (number + 1) // count)
        sender = low + ((target - source - 1) % far * count + number) % (high - low)
        yield _Stream(source, high - low, targets, sender, targets[(source - target - 1) % far % len(targets)])
