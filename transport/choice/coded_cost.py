# SPDX-License-Identifier: Apache-2.0
"""What a collective with a codec costs: the work of cost_model.py, and the time to encode and decode.

No choice of algorithm depends on it, because a codec changes bits, and only the caller may do that. `sennit explain
--codec` uses it to say whether a codec pays. The model adds the time of coding to the rest, as if one thread did both.
It does not subtract what a slow link hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from sennit.transport.algorithms.coded_parts import DEFAULT_CHUNK_ELEMENTS, chunk_limit
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.reduce_scatter_coded import coded_pieces
from sennit.transport.choice.cost_model import Traffic, Work
from sennit.transport.choice.costs import Collective
from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.coding import CodecKind, Coding
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.hosts import Hosts

CODED: Final = (Collective.ALLREDUCE, Collective.REDUCE_SCATTER, Collective.ALLGATHER, Collective.ALLTOALL)
_SUM_BYTES: Final = Dtype.F32.item_bytes
# 8 Tbit/s and 8 kbit/s: every link lies between them.
_SLOWEST_BYTE_S, _FASTEST_BYTE_S = 1e-3, 1e-12
_HALVINGS: Final = 60


class CodecSpeed(LightTuple):
    """Seconds of one thread of this processor for an element."""

    encode_element_s: float
    """To nearest."""
    encode_stochastic_element_s: float
    decode_element_s: float


def _speed(encode: float, encode_stochastic: float, decode: float) -> CodecSpeed:
    """From GB of float32 a second."""
    return CodecSpeed(
        encode_element_s=_SUM_BYTES / encode / 1e9,
        encode_stochastic_element_s=_SUM_BYTES / encode_stochastic / 1e9,
        decode_element_s=_SUM_BYTES / decode / 1e9,
    )


# An AMD EPYC of the fifth generation, with AVX-512 (docs/lab/codecs.md). `sennit calibrate` measures others.
SPEEDS: Final[Mapping[CodecKind, CodecSpeed]] = {
    CodecKind.FP16: _speed(20.3, 16.6, 28.0),
    CodecKind.BF16: _speed(33.3, 18.5, 47.4),
    CodecKind.FP8_E4M3: _speed(15.5, 9.5, 19.9),
    CodecKind.FP8_E5M2: _speed(15.6, 9.5, 20.3),
    CodecKind.INT8: _speed(34.0, 12.3, 25.8),
    CodecKind.MX4: _speed(14.0, 9.3, 21.8),
}


class CodedWork(LightTuple):
    """What the busiest rank does in one collective with a codec."""

    work: Work
    encoded_elements: float
    decoded_elements: float

    def coding_seconds(self, coding: Coding, speed: CodecSpeed) -> float:
        encode_s = speed.encode_stochastic_element_s if coding.stochastic else speed.encode_element_s
        return self.encoded_elements * encode_s + self.decoded_elements * speed.decode_element_s


def coded_work(
    collective: Collective,
    *,
    hosts: Hosts,
    elements: int,
    coding: Coding,
    dtype: Dtype = Dtype.F32,
    leaves: Leaves | None = None,
) -> CodedWork | None:
    """Returns the work for `elements` of `dtype`, or None if the collective takes no such codec.

    `leaves`: of an allreduce; by default one a rank.
    """
    if collective not in CODED:
        return None
    given = Leaves(hosts.world) if leaves is None else leaves
    if coding.between_hosts:
        if len(hosts.spans) == 1:
            return None
        if collective in (Collective.ALLGATHER, Collective.ALLTOALL):
            return _moved_between_hosts(collective is Collective.ALLGATHER, hosts, elements, coding, dtype)
        return _between_hosts(collective is Collective.ALLREDUCE, hosts, elements, coding, dtype, given)
    share = elements / hosts.world
    coded_bytes = coding.coded_bytes(math.ceil(share))
    if collective in (Collective.ALLGATHER, Collective.ALLTOALL):
        return CodedWork(
            work=_direct(hosts, 1, 1, coded_bytes, 0),
            encoded_elements=share if collective is Collective.ALLGATHER else elements,
            decoded_elements=elements,
        )
    gathers = collective is Collective.ALLREDUCE
    pieces = coded_pieces([math.ceil(share)], coding)
    if gathers:
        pieces = max(math.ceil(share / chunk_limit(coding, DEFAULT_CHUNK_ELEMENTS)), 1)
    rows = -(-given.count // given.world)
    # A rank with several leaves codes and decodes them at home, and sends the sums of its nodes.
    nodes = max(len(given.nodes(span)) for span in given.of_rank)
    given_bytes = coded_bytes if rows == 1 else nodes * share * _SUM_BYTES
    folded_bytes = elements * _SUM_BYTES * (1 if rows == 1 else rows + 2 * nodes)
    return CodedWork(
        work=_direct(hosts, 1 + gathers, pieces, given_bytes + gathers * coded_bytes, folded_bytes),
        encoded_elements=rows * elements + gathers * share,
        decoded_elements=rows * elements + gathers * elements,
    )


def _between_hosts(
    gathers: bool, hosts: Hosts, elements: int, coding: Coding, dtype: Dtype, leaves: Leaves
) -> CodedWork:
    """See cost_model.py for the same without a codec."""
    sizes = [span.high - span.low for span in hosts.spans]
    near, stood_for = max(sizes) - 1, -(-hosts.world // min(sizes))
    by_host = [len(leaves.nodes(leaves.of_ranks(*span))) for span in hosts.spans]
    share, nodes = elements / hosts.world, max(by_host)
    coded_bytes, phases = coding.coded_bytes(math.ceil(share)), 1 + gathers
    pieces = max(math.ceil(share / chunk_limit(coding, DEFAULT_CHUNK_ELEMENTS)), 1)
    # A rank gives its neighbours what they stand for, and gets what it stands for.
    near_shares, wider = hosts.world * near / (near + 1), _SUM_BYTES / dtype.item_bytes
    return CodedWork(
        work=Work(
            near=Traffic(
                phases,
                math.ceil(phases * near_shares * pieces),
                near,
                near_shares * share * dtype.item_bytes * (leaves.width(leaves.of_rank[0], wider) + gathers),
            ),
            far=Traffic(
                phases,
                (stood_for - 1) * pieces * (nodes + gathers),
                stood_for - 1,
                (stood_for - 1) * coded_bytes * (nodes + gathers),
            ),
            folded_bytes=elements * dtype.item_bytes + 3 * stood_for * nodes * share * _SUM_BYTES,
        ),
        encoded_elements=stood_for * nodes * share + gathers * share,
        decoded_elements=sum(by_host) * share + gathers * stood_for * share,
    )


def _moved_between_hosts(gathers: bool, hosts: Hosts, elements: int, coding: Coding, dtype: Dtype) -> CodedWork:
    (near, far), share = hosts.peers, elements / hosts.world
    coded_bytes, part_bytes = coding.coded_bytes(math.ceil(share)), share * dtype.item_bytes
    # A part of an allgather goes to each other host once, and from there to the neighbours.
    far_messages = -(-hosts.world // (near + 1)) - 1 if gathers else far
    near_messages = near * (1 + far_messages) if gathers else near
    return CodedWork(
        work=Work(
            near=Traffic(int(gathers), near_messages, near, near_messages * part_bytes),
            far=Traffic(1, far_messages, far_messages, far_messages * coded_bytes),
            folded_bytes=0,
        ),
        encoded_elements=share if gathers else far * share,
        decoded_elements=share * (1 + far_messages) if gathers else far * share,
    )


def _direct(hosts: Hosts, phases: int, pieces: int, sent_bytes: float, folded_bytes: float) -> Work:
    """`sent_bytes`: to each peer, in `phases` messages for each piece."""
    near, far = hosts.peers
    return Work(
        near=Traffic(0 if far else phases, phases * pieces * near, near, near * sent_bytes),
        far=Traffic(phases if far else 0, phases * pieces * far, far, far * sent_bytes),
        folded_bytes=folded_bytes,
    )


def break_even_byte_s(gain_s: Callable[[float], float]) -> float | None:
    """Returns the `byte_s` of a link from which on a codec pays, by bisection.

    `gain_s`: the seconds that the codec saves on a link of that `byte_s`. None if it pays on every link, or on none.
    """
    low, high = _FASTEST_BYTE_S, _SLOWEST_BYTE_S
    if gain_s(low) > 0 or gain_s(high) <= 0:
        return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gain_s(middle) > 0 else (middle, high)
    return high
