# SPDX-License-Identifier: Apache-2.0
"""Alltoall: rank i's part j becomes rank j's part i.

Parts may be uneven or empty. Empty parts are sent too, so that ranks that disagree about splits find out.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.transport.algorithms.ranges import (
    buffer_sizes,
    check_counts,
    copy_local,
    peers_after,
    peers_before,
    places,
    recv_part,
    send_part,
)
from sennit.transport.elements import Dtype
from sennit.transport.errors import ArgumentError
from sennit.transport.plan import Plan, PlanBuilder
from sennit.transport.signature import Kind, signature


def alltoall(
    *,
    world: int,
    rank: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    item_bytes: int,
    type_code: int = Dtype.U8,
    list_input: bool = False,
    list_output: bool = False,
    segment_bytes: int | None = None,
) -> Plan:
    """Sends `send_counts[j]` elements to rank j, and receives `recv_counts[j]` from it.

    Buffers: `[input, output]`. With `list_input` or `list_output`, `world` buffers replace that one. `segment_bytes`
    cuts messages (`ranges.segments`).
    """
    check_counts("send_counts", send_counts, world)
    check_counts("recv_counts", recv_counts, world)
    if send_counts[rank] != recv_counts[rank]:
        raise ArgumentError(
            f"rank {rank} sends itself {send_counts[rank]} elements but receives {recv_counts[rank]}; allowed: the same"
        )
    input_bytes = buffer_sizes(send_counts, item_bytes, list_input)
    builder = PlanBuilder(
        "alltoall",
        world=world,
        rank=rank,
        signature=signature(Kind.ALLTOALL, type_code=type_code),
        buffer_bytes=[*input_bytes, *buffer_sizes(recv_counts, item_bytes, list_output)],
    )
    inputs = places(send_counts, item_bytes, 0, list_input)
    outputs = places(recv_counts, item_bytes, len(input_bytes), list_output)
    for peer in peers_after(rank, world):
        buffer, part = inputs[peer]
        send_part(builder, peer, buffer, part, segment_bytes)
    for peer in peers_before(rank, world):
        buffer, part = outputs[peer]
        recv_part(builder, peer, buffer, part, segment_bytes)
    (source, source_part), (target, target_part) = inputs[rank], outputs[rank]
    copy_local(builder, source, source_part.offset, target, target_part.offset, target_part.size_bytes)
    return builder.build()
