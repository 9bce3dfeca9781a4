# SPDX-License-Identifier: Apache-2.0
"""What an operation sends at its very end leaves at once, though nobody calls the group for long after it."""

from __future__ import annotations

from sennit.transport import _core
from sennit.transport.config import Config
from sennit.transport.plans.plan import Operand, PlanBuilder
from sennit.transport.plans.plan_codec import encode
from sennit.transport.plans.signature import Kind, signature

WORLD = 3
ROUNDS = 20


def chain(rank: int) -> _core.Plan:
    """Rank 0 tells rank 1, and rank 1 tells rank 2. No message has data."""
    plan = PlanBuilder("chain", world=WORLD, rank=rank, signature=signature(Kind.BROADCAST), buffer_bytes=[])
    heard = [plan.recv(rank - 1, 0, 0, 0, 0)] if rank else []
    if rank + 1 < WORLD:
        plan.send(rank + 1, 0, Operand(0), 0, after=heard)
    return _core.Plan(encode(plan.build()))


def test_the_last_message_of_an_operation_over_udp_leaves_with_it() -> None:
    settings = Config()
    ends = [_core.Communicator(rank, WORLD, timeout_s=60, seed=rank) for rank in range(WORLD)]
    offers = [
        end.udp_open(
            [("127.0.0.1", "")],
            path_count=1,
            path_policy=settings.path_policy,
            congestion=settings.congestion,
            window_bytes=settings.window_bytes,
        )
        for end in ends
    ]
    for rank, end in enumerate(ends):
        end.connect(
            [
                ("self", b"") if peer == rank else ("udp", offers[peer] + ends[peer].offer_for(rank))
                for peer in range(WORLD)
            ]
        )
    plans = [chain(rank) for rank in range(WORLD)]
    for sent in range(1, ROUNDS + 1):
        last, middle, first = (ends[rank].post(plans[rank], []) for rank in (2, 1, 0))
        first.wait()
        middle.wait()
        # Without the round at an operation's end, a thread sent it up to 50 ms later.
        # On a busy machine an answer may be late, and a packet goes out again.
        counters = ends[1].counters()
        assert counters["data_packets_sent"] - counters["retransmitted_packets"] == sent
        last.wait()
    for end in ends:
        end.shutdown()
