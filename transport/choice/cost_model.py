# SPDX-License-Identifier: Apache-2.0
"""The cost model: what the busiest rank does in a collective, and how long that takes.

The model adds up rounds, messages, bytes and folds (LogGP: Alexandrov, Ionescu, Schauser and Scheiman, 1995), inside a
host and between hosts, and has one term for many peers at once. Its constants were fitted to runs of 4, 6 and 8 ranks
(docs/lab/collectives.md).
"""

from __future__ import annotations

import math
from typing import Final

from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES
from sennit.transport.choice.costs import Collective, Costs
from sennit.transport.config import Algorithm
from sennit.transport.light_tuple import LightTuple
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import MAX_LOAN_BYTES

# The most bytes of the parts that ranks pass on for others. Scratch holds these parts a few times.
STAGED_MAX_BYTES: Final = 1 << 20
# The most bytes of a message in an alltoall by host. Larger messages go faster directly, while parts are still
# gathered.
STREAM_MAX_BYTES: Final = 16_384
# A message of this size goes over shared memory at once. A round trip first waits for its receiver.
EAGER_MAX_BYTES: Final = 8_192
# What an aggregator takes at once (AGGREGATION_BLOCK_BYTES), and from which size on it is asked at all. A core of it
# takes 5 µs for a leaf of float32, as long as a message takes a rank (docs/how-to/aggregate.md).
BLOCK_BYTES: Final = 1_408
AGGREGATE_MIN_BYTES: Final = 16_384
# The price of a byte was measured with up to this many peers.
PEERS_MAX: Final = 8


class Traffic(LightTuple):
    """What the busiest rank sends over one way."""

    rounds: int = 0
    """Messages that wait for one another."""
    messages: int = 0
    peers: int = 0
    sent_bytes: float = 0

    @property
    def further_peers(self) -> int:
        """The peers beyond the first, which make a byte dearer."""
        return max(min(self.peers, PEERS_MAX) - 1, 0)

    def seconds(self, costs: Costs) -> float:
        byte_s = costs.byte_s * (1 + costs.peer_share * self.further_peers)
        return self.rounds * costs.round_s + self.messages * costs.message_s + self.sent_bytes * byte_s


class Work(LightTuple):
    """What the busiest rank does in one collective."""

    near: Traffic
    """With ranks of its host."""
    far: Traffic
    """With ranks of other hosts."""
    folded_bytes: float

    def seconds(self, near: Costs, far: Costs) -> float:
        return self.near.seconds(near) + self.far.seconds(far) + self.folded_bytes * near.fold_byte_s


def work_of(
    algorithm: Algorithm,
    collective: Collective,
    *,
    hosts: Hosts,
    size_bytes: int,
    partial_ratio: float = 1,
    leaves: Leaves | None = None,
) -> Work | None:
    """Returns the work for a vector of `size_bytes`, or None if the algorithm does not run there.

    A partial sum has `partial_ratio` times the bytes of its elements. `leaves`: of an allreduce; by default one a rank.
    """
    if collective in (Collective.ALLTOALL, Collective.ALLGATHER):
        return _parts(collective, algorithm, hosts, size_bytes)
    if collective in (Collective.REDUCE, Collective.GATHER):
        return _to_root(algorithm, hosts, size_bytes, partial_ratio, folds=collective is Collective.REDUCE)
    given = Leaves(hosts.world) if leaves is None else leaves
    phases = 2 if collective is Collective.ALLREDUCE else 1
    work = _reduction(algorithm, hosts, size_bytes, partial_ratio, phases, given)
    rows = -(-given.count // given.world)
    if work is None or rows == 1 or given.partial:
        return work
    # A rank reads its leaves, and writes their sums.
    return work._replace(folded_bytes=work.folded_bytes + size_bytes * (rows + _width(given, partial_ratio)))


def _reduction(
    algorithm: Algorithm, hosts: Hosts, size_bytes: int, partial_ratio: float, phases: int, leaves: Leaves
) -> Work | None:
    near, far = hosts.peers
    gathers, several = phases == 2, hosts.world > 1
    # What a rank sends is as wide as what the widest one sends.
    block_bytes = size_bytes if leaves.are_single else size_bytes * _nodes_max(leaves) * partial_ratio
    match algorithm:
        case Algorithm.DIRECT:
            return _direct(hosts, size_bytes, phases, _width(leaves, partial_ratio))
        case Algorithm.ROUND_TRIP if gathers and several and not far and not leaves.are_counted:
            return _round_trips(_direct(hosts, size_bytes, phases, 1), size_bytes / hosts.world)
        case Algorithm.HALVING if several:
            return _halving(hosts, size_bytes, partial_ratio, gathers, leaves)
        case Algorithm.HIERARCHICAL if len(hosts.spans) > 1 and hosts.world > len(hosts.spans):
            return _by_hosts(hosts, size_bytes, partial_ratio, phases, leaves)
        case Algorithm.ONE_SHOT if gathers and several and block_bytes <= MAX_LOAN_BYTES:
            return Work(
                near=Traffic(0 if far else 1, near, near, near * block_bytes),
                far=Traffic(1 if far else 0, far, far, far * block_bytes),
                folded_bytes=block_bytes * hosts.world,
            )
        case Algorithm.AGGREGATE if (
            gathers and several and leaves.are_equal_nodes and size_bytes >= AGGREGATE_MIN_BYTES
        ):
            # Saves the vector, sends it, and tells all others that it has the sum. The leaves of all ranks meet in one
            # place.
            leaves_there = hosts.world * math.ceil(size_bytes / BLOCK_BYTES)
            sent = Traffic(3, hosts.world - 1 + leaves_there, 1, size_bytes)
            return _in_rounds(hosts, sent, 2 * size_bytes)
        case Algorithm.DISSEMINATION if gathers and several and block_bytes <= MAX_LOAN_BYTES:
            levels = (hosts.world - 1).bit_length()
            all_rounds = Traffic(levels, levels, levels, block_bytes * (hosts.world - 1))
            return _in_rounds(hosts, all_rounds, block_bytes * hosts.world)
        case _:
            return None


def _nodes_max(leaves: Leaves) -> int:
    """The most nodes that a rank gives."""
    return max(len(leaves.nodes(span)) for span in leaves.of_rank)


def _width(leaves: Leaves, partial_ratio: float) -> float:
    """The size of the widest message of one rank, in vectors."""
    return 1 if leaves.are_single else max(leaves.width(span, partial_ratio) for span in leaves.of_rank)


def _direct(hosts: Hosts, size_bytes: int, phases: int, width: float) -> Work:
    near, far = hosts.peers
    share_bytes = size_bytes / hosts.world
    pieces, sent_bytes = phases * _pieces(share_bytes * width, DEFAULT_CHUNK_BYTES), (phases - 1 + width) * share_bytes
    return Work(
        near=Traffic(0 if far else phases, pieces * near, near, near * sent_bytes),
        far=Traffic(phases if far else 0, pieces * far, far, far * sent_bytes),
        folded_bytes=size_bytes * width,
    )


def _round_trips(direct: Work, share_bytes: float) -> Work:
    """Results need no message of their own, but their bytes come back. A small share waits for its receiver first."""
    rounds = direct.near.rounds + (share_bytes <= EAGER_MAX_BYTES)
    return direct._replace(near=direct.near._replace(rounds=rounds, messages=direct.near.messages // 2))


def _halving(hosts: Hosts, size_bytes: int, partial_ratio: float, gathers: bool, leaves: Leaves) -> Work:
    world, levels = hosts.world, (hosts.world - 1).bit_length()
    near_levels = hosts.near_levels()
    message_widths = leaves.widths(partial_ratio)
    chunk_bytes = DEFAULT_CHUNK_BYTES / max(partial_ratio, *message_widths)
    share_bytes = size_bytes / world

    def between(low: int, high: int) -> Traffic:
        """Levels low..high - 1."""
        sent_bytes, messages, count = 0.0, 0, high - low
        for level in range(low, high):
            # At the last level all but the own share goes, which is not a half where the world is no power of two.
            is_last = level == levels - 1
            given_bytes = size_bytes / (1 << level) - share_bytes if is_last else size_bytes / (1 << level + 1)
            sent_bytes += given_bytes * message_widths[level]
            if gathers:
                # Where the world is no power of two, some rank passes on results for another.
                sent_bytes += given_bytes + (0 if level or world == 1 << levels else share_bytes)
                messages += 2 * _pieces(size_bytes / (1 << level + 1), chunk_bytes)
            else:
                # What a rank passes on in a round lies apart.
                messages += -(-world // (1 << level + 1)) * _pieces(share_bytes, chunk_bytes)
        return Traffic(count * (2 if gathers else 1), messages, count, sent_bytes)

    return Work(
        near=between(0, near_levels),
        far=between(near_levels, levels),
        # The constants were fitted with three passes, when every arrival was folded. Now there are fewer.
        folded_bytes=3 * size_bytes * max(leaves.widths()),
    )


def _by_hosts(hosts: Hosts, size_bytes: int, partial_ratio: float, phases: int, leaves: Leaves) -> Work:
    world = hosts.world
    sizes = [span.high - span.low for span in hosts.spans]
    near, other_shares = max(sizes) - 1, -(-world // min(sizes)) - 1
    nodes = max(len(leaves.nodes(leaves.of_ranks(*span))) for span in hosts.spans)
    share_bytes, partial_bytes = size_bytes / world, size_bytes / world * nodes * partial_ratio
    pieces = _pieces(partial_bytes, DEFAULT_CHUNK_BYTES)
    near_shares, near_bytes = world * near / (near + 1), (phases - 1 + _width(leaves, partial_ratio)) * share_bytes
    return Work(
        near=Traffic(phases, math.ceil(phases * near_shares * pieces), near, near_shares * near_bytes),
        far=Traffic(
            phases,
            phases * other_shares * pieces,
            other_shares,
            other_shares * (partial_bytes + (phases - 1) * share_bytes),
        ),
        # Partial sums are written to memory and read again.
        folded_bytes=size_bytes + 3 * other_shares * partial_bytes,
    )


def _parts(collective: Collective, algorithm: Algorithm, hosts: Hosts, size_bytes: int) -> Work | None:
    """`size_bytes`: of all parts."""
    world, levels = hosts.world, (hosts.world - 1).bit_length()
    part_bytes = size_bytes / world
    near, far = hosts.peers
    if algorithm is Algorithm.DIRECT:
        return Work(
            near=Traffic(0 if far else 1, near, near, near * part_bytes),
            far=Traffic(1 if far else 0, far, far, far * part_bytes),
            folded_bytes=0,
        )
    if collective is Collective.ALLGATHER:
        if hosts.are_shared:
            return _allgather_by_host(hosts, part_bytes) if algorithm is Algorithm.HIERARCHICAL else None
        if algorithm is not Algorithm.RING or world < 2:
            return None
        return _in_rounds(hosts, Traffic(world - 1, world - 1, 1, part_bytes * (world - 1)), 0)
    if world < 2 or size_bytes > STAGED_MAX_BYTES:
        return None
    if algorithm is Algorithm.HIERARCHICAL and hosts.are_shared and stream_count(hosts, part_bytes):
        return _alltoall_by_hosts(hosts, part_bytes)
    if algorithm is not Algorithm.BRUCK:
        return None
    sent_bytes = part_bytes * sum(way.bit_count() for way in range(world))
    all_rounds = Traffic(levels, levels, levels, sent_bytes)
    # A part is copied before each message, and at the end.
    return _in_rounds(hosts, all_rounds, sent_bytes + part_bytes * (world - 1))


def _allgather_by_host(hosts: Hosts, part_bytes: float) -> Work:
    near, far = hosts.peers
    others = len(hosts.spans) - 1
    # The own part, and those that this rank passes on.
    passed = near * (1 + -(-far // (near + 1)))
    return Work(
        near=Traffic(1, passed, near, passed * part_bytes),
        far=Traffic(1, others, others, others * part_bytes),
        folded_bytes=0,
    )


def stream_count(hosts: Hosts, part_bytes: float) -> int:
    """How many streams of an alltoall by host go from one host to another; 0: their messages would be too large."""
    width = max(span.high - span.low for span in hosts.spans)
    if part_bytes * width > STREAM_MAX_BYTES:
        return 0
    return 1 if part_bytes * width**2 <= STREAM_MAX_BYTES else width


def _alltoall_by_hosts(hosts: Hosts, part_bytes: float) -> Work:
    width, streams = min(span.high - span.low for span in hosts.spans), stream_count(hosts, part_bytes)
    near, far = hosts.peers
    targets = -(-width // streams)
    sent = -(-far // targets // width)
    # To the senders of streams, to the neighbours, and to those whose parts a stream brought.
    gives = [-(-far // targets) - sent, near, sent * (targets - 1)]
    takes = [sent * near, near]
    return Work(
        near=Traffic(
            1 + (targets > 1),
            math.ceil((sum(gives) + sum(takes)) / 2),
            near,
            (gives[0] * targets + near + gives[2] * width) * part_bytes,
        ),
        # On average: the ranks share the link of their host.
        far=Traffic(1, sent, sent, far * part_bytes),
        # Own parts are copied before a message, and all parts after it if they are for several ranks.
        folded_bytes=sent * targets * (1 + (targets > 1) * width) * part_bytes,
    )


def _to_root(algorithm: Algorithm, hosts: Hosts, size_bytes: int, partial_ratio: float, *, folds: bool) -> Work | None:
    """The work of a reduce of vectors of `size_bytes`, or of a gather of that many bytes in all."""
    world, levels = hosts.world, (hosts.world - 1).bit_length()
    part_bytes = size_bytes if folds else size_bytes / world
    if algorithm is Algorithm.DIRECT:
        near, far = hosts.peers
        # The root only receives: half of what a message costs both ends.
        pieces = (_pieces(part_bytes, DEFAULT_CHUNK_BYTES) if folds else 1) / 2
        return Work(
            near=Traffic(0 if far else 1, math.ceil(near * pieces), near, near * part_bytes / 2),
            far=Traffic(1 if far else 0, math.ceil(far * pieces), far, far * part_bytes / 2),
            folded_bytes=size_bytes * world if folds else 0,
        )
    if algorithm is not Algorithm.TREE or world < 2 or (not folds and size_bytes > STAGED_MAX_BYTES):
        return None
    near_levels = hosts.near_levels()

    def between(low: int, high: int) -> Traffic:
        if not folds:
            # A message has the parts of all ranks below.
            passed_bytes = part_bytes * sum(min(1 << level, world - (1 << level)) for level in range(low, high))
            return Traffic(high - low, high - low, high - low, passed_bytes)
        vectors = sum(partial_ratio if level else 1 for level in range(low, high))
        pieces = (high - low) * _pieces(size_bytes, DEFAULT_CHUNK_BYTES / partial_ratio)
        return Traffic(high - low, pieces, high - low, vectors * size_bytes)

    return Work(
        near=between(0, near_levels),
        far=between(near_levels, levels),
        # Partial sums are written to memory and read again.
        folded_bytes=3 * levels * size_bytes if folds else 0,
    )


def _in_rounds(hosts: Hosts, traffic: Traffic, folded_bytes: float) -> Work:
    """With several hosts, some rank sends to another one in each round."""
    if len(hosts.spans) == 1:
        return Work(near=traffic, far=Traffic(), folded_bytes=folded_bytes)
    return Work(near=Traffic(), far=traffic, folded_bytes=folded_bytes)


def _pieces(size_bytes: float, piece_bytes: float) -> int:
    """Into how many messages a range is cut. An empty range is sent as one."""
    return max(1, math.ceil(size_bytes / piece_bytes))
