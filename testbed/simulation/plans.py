# SPDX-License-Identifier: Apache-2.0
"""The plans that simulated ranks run: those of transport/algorithms, chosen by the cost model of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from math import gcd

from sennit.testbed.simulation.scenario import Pattern, Scenario
from sennit.transport import algorithms
from sennit.transport.choice.costs import Collective, Costs
from sennit.transport.choice.selection import Selection
from sennit.transport.config import Algorithm
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Copy, Operand, Plan, PlanBuilder, Recv, Send
from sennit.transport.plans.plan_codec import encode
from sennit.transport.plans.signature import Kind, signature

# Around the 4,096 bytes of a packet (testbed/csrc/fabric/network.hpp).
OVERHEAD_BYTES = 122
# A core posts and completes a few million messages a second. The simulation leaves that out, but algorithms should not
# be chosen as if messages were free.
MESSAGE_S = 0.2e-6
# A digest takes the plans of this many ranks: the first, the last, and some between.
DIGESTED_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the ranks of a scenario run."""

    algorithm: str
    compile_plan: Callable[[int], Plan]
    """Compiles the plan of a rank."""
    counts: tuple[int, ...] = ()
    """Sizes that each rank gives when it posts."""

    def digest(self, world: int) -> str:
        """Identifies the plans, by those of a few ranks: all of them would take as long as some runs."""
        digest = hashlib.sha256(repr((self.algorithm, self.counts)).encode())
        for rank in sorted({number * (world - 1) // (DIGESTED_RANKS - 1) for number in range(DIGESTED_RANKS)}):
            digest.update(encode(self.compile_plan(rank)))
        return digest.hexdigest()[:16]

    def plans(self, world: int) -> Iterator[Plan]:
        """One for each rank, in order."""
        return map(self.compile_plan, range(world))


def fabric_costs(scenario: Scenario) -> Costs:
    """The constants that a calibration of this fabric would measure, if folds took no time."""
    hops = 4 if scenario.leaves_per_pod == 0 else 6
    byte_s = 8e-9 / scenario.rate_gbps
    return Costs(
        round_s=hops * (scenario.delay_ns * 1e-9 + OVERHEAD_BYTES * byte_s),
        message_s=MESSAGE_S,
        byte_s=byte_s * (1 + OVERHEAD_BYTES / scenario.payload_bytes),
        peer_share=0,
        fold_byte_s=0,
    )


def program(scenario: Scenario) -> Program:
    """Returns what the ranks run. Raises ValueError for a vector or block that cannot be cut."""
    world, size_bytes = scenario.hosts, scenario.size_bytes
    if size_bytes < 1:
        raise ValueError(f"size_bytes is {size_bytes}; allowed: 1 or more")
    forced = None if scenario.algorithm is None else Algorithm(scenario.algorithm)
    costs = fabric_costs(scenario)
    selection = Selection(hosts=Hosts.equal(world, world), forced=forced, near=costs, far=costs)
    match scenario.pattern:
        case Pattern.ALLREDUCE:
            return _allreduce(selection, world, size_bytes)
        case Pattern.ALLTOALL:
            return _alltoall(selection, world, size_bytes, scenario.peers_at_a_time)
        case Pattern.PERMUTATION:
            return _blocks(scenario, "permutation", lambda rank: [(rank + world // 2) % world])
        case Pattern.INCAST:
            return _blocks(scenario, "incast", lambda rank: [0] if rank else [])


def _allreduce(selection: Selection, world: int, size_bytes: int) -> Program:
    dtype = Dtype.F32
    if size_bytes % dtype.item_bytes:
        raise ValueError(f"size_bytes is {size_bytes}; allowed for an allreduce: a multiple of {dtype.item_bytes}")
    rated = selection.rate(Collective.ALLREDUCE, size_bytes=size_bytes)

    def compile_plan(rank: int) -> Plan:
        elements = size_bytes // dtype.item_bytes
        return selection.allreduce(world=world, rank=rank, elements=elements, dtype=dtype, op=ReduceOp.SUM)

    return Program(algorithm=selection.choose(rated), compile_plan=compile_plan)


def _alltoall(selection: Selection, world: int, size_bytes: int, at_a_time: int) -> Program:
    algorithm = selection.of_parts(Collective.ALLTOALL, world * size_bytes)
    if algorithm is Algorithm.BRUCK:
        return Program(
            algorithm=algorithm,
            compile_plan=lambda rank: algorithms.alltoall_bruck(
                world=world, rank=rank, part_bytes_max=size_bytes, item_bytes=1
            ),
            counts=(size_bytes,),
        )

    def compile_plan(rank: int) -> Plan:
        return spread(algorithms.alltoall(world=world, rank=rank, item_bytes=1), at_a_time)

    return Program(algorithm=algorithm, compile_plan=compile_plan, counts=(size_bytes,) * (2 * world))


def spread(plan: Plan, at_a_time: int) -> Plan:
    """Returns an alltoall whose messages go in one order of distances all over the fabric, `at_a_time` to each rank.

    The plan itself posts all receives at once, to the next rank first. A million flows would not fit into memory, and
    in the order 1, 2, 3, … whole leaves talk to one other leaf at a time. A distance is followed by its opposite: so
    both messages of a pair use one connection.
    """
    if at_a_time < 1:
        raise ValueError(f"peers_at_a_time is {at_a_time}; allowed: 1 or more")
    world = plan.world
    # A stride near the golden ratio: neighbours in the order are far apart in the fabric (Knuth, TAOCP 3, 6.4).
    stride = next(step for step in count(round(world * 0.618)) if gcd(step, world) == 1)
    ahead = [stride * number % world for number in range(1, world // 2 + 1)]
    order = dict.fromkeys(distance for one in ahead for distance in (one, world - one))
    place = {distance: number for number, distance in enumerate(order)}
    sends = [step for step in plan.steps if isinstance(step, Send)]
    sends.sort(key=lambda step: place[(step.peer - plan.rank) % world])
    receives = [step for step in plan.steps if isinstance(step, Recv)]
    receives.sort(key=lambda step: place[(plan.rank - step.peer) % world])
    others = [step for step in plan.steps if isinstance(step, Copy)]
    chained = [
        step._replace(after=(len(sends) + number - at_a_time,) if number >= at_a_time else ())
        for number, step in enumerate(receives)
    ]
    return plan._replace(steps=(*sends, *chained, *others))


def _blocks(scenario: Scenario, name: str, peers_of: Callable[[int], list[int]]) -> Program:
    """One block to each of `peers_of(rank)`, all at the same time, in messages of nearly equal size."""
    world, size_bytes = scenario.hosts, scenario.size_bytes
    if scenario.message_max_bytes < 1:
        raise ValueError(f"message_max_bytes is {scenario.message_max_bytes}; allowed: 1 or more")
    pieces = -(-size_bytes // scenario.message_max_bytes)
    cuts = [size_bytes * number // pieces for number in range(pieces + 1)]
    senders: list[list[int]] = [[] for _ in range(world)]
    for rank in range(world):
        for peer in peers_of(rank):
            senders[peer].append(rank)

    def compile_plan(rank: int) -> Plan:
        # The number is no collective's: the signature only has to be the same on both sides.
        of_all = signature(Kind.P2P, elements=size_bytes)
        builder = PlanBuilder(name, world=world, rank=rank, signature=of_all, buffer_bytes=[size_bytes] * 2)
        for slot, (low, high) in enumerate(pairwise(cuts)):
            for peer in peers_of(rank):
                builder.send(peer, slot, Operand(0, low), high - low)
            for peer in senders[rank]:
                builder.recv(peer, slot, 1, low, high - low)
        return builder.build()

    return Program(algorithm=name, compile_plan=compile_plan)
