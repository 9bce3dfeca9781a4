# SPDX-License-Identifier: Apache-2.0
"""Who sends what when, in virtual time: every record is taken exactly once, whatever network and feeders do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sennit.offload.admission import Verdict
from sennit.offload.ingest.leases import ASK_FIRST_S, ASK_MAX_S, ASK_MIN_S, STALL_S, Leases, WaitEstimate
from sennit.offload.ingest.protocol import Send, Taken
from tests.extent import examples
from tests.offload.ingest_world import Behaviour, IngestWorld, Network, expected

UNTIL_S = 300.0
sizes = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(lambda found: max(found) > 0)
networks = st.builds(
    Network,
    drop=st.sampled_from([0.0, 0.02, 0.3]),
    duplicate=st.sampled_from([0.0, 0.2]),
    delay_s=st.sampled_from([0.0001, 0.004]),
    jitter_s=st.sampled_from([0.0, 0.00001, 0.005]),
)
doomed = st.builds(
    Behaviour,
    joins_s=st.sampled_from([0.0, 0.01, 1.0]),
    dies_s=st.sampled_from([0.001, 0.003, 0.02, 1.2]),
    think_s=st.sampled_from([0.0, 0.1]),
    records_in_packet=st.integers(1, 9),
)
silent = st.builds(Behaviour, falls_silent_s=st.sampled_from([0.0, 0.002, 0.02]))
sound = st.builds(
    Behaviour,
    joins_s=st.sampled_from([0.0, 0.005, 2.0]),
    think_s=st.sampled_from([0.0, 0.003, 0.7]),
    records_in_packet=st.integers(1, 9),
)


@examples(50)
@given(
    sizes=sizes,
    network=networks,
    lost=st.lists(st.one_of(doomed, silent), max_size=2),
    kept=st.lists(sound, min_size=1, max_size=2),
    seed=st.integers(0, 1 << 32),
    slots=st.sampled_from([1, 2, 4]),
    window_packets=st.integers(1, 9),
    step_s=st.sampled_from([0.0, 0.05]),
    first=st.integers(0, 7),
)
def test_each_record_is_taken_once_in_order_and_the_run_ends(
    sizes: list[int],
    network: Network,
    lost: list[Behaviour],
    kept: list[Behaviour],
    seed: int,
    slots: int,
    window_packets: int,
    step_s: float,
    first: int,
) -> None:
    first %= len(sizes)
    world = IngestWorld(
        sizes, [*lost, *kept], network, seed=seed, slots=slots, first_batch=first, window_packets=window_packets,
        step_s=step_s,
    )  # fmt: skip
    trained = world.run(UNTIL_S)
    assert trained == [expected(sizes, batch) for batch in range(first, len(sizes))], f"at {world.now_s:.3f} s"
    assert world.receiver.counters().records == sum(sizes[first:])


def test_without_loss_nothing_is_asked_for_twice(seed: int) -> None:
    world = IngestWorld([50] * 10, [Behaviour(), Behaviour()], Network(), seed=seed, slots=4)
    assert len(world.run(UNTIL_S)) == 10
    counters = world.leases.counters
    assert (counters.gaps, counters.silences, counters.moved, counters.feeders_lost) == (0, 0, 0, 0)
    refused = {name: count for name, count in world.receiver.counters().datagrams.items() if count}
    assert refused.keys() == {Verdict.ACCEPTED}


def test_a_gap_costs_a_round_trip_and_no_timer(seed: int) -> None:
    """Packets are lost in the middle of batches. The run takes milliseconds, the first timer half a second."""
    world = IngestWorld([400], [Behaviour()], Network(drop=0.1), seed=seed, slots=1, window_packets=64)
    world.run(UNTIL_S)
    assert world.leases.counters.gaps > 0
    assert world.now_s < ASK_FIRST_S


def test_no_more_is_on_the_way_than_the_window(seed: int) -> None:
    world = IngestWorld([100], [Behaviour(records_in_packet=1)], Network(delay_s=0.5), seed=seed, window_packets=5)
    # Nothing has been taken yet, and the first packets are in flight.
    world.run(0.9)
    assert sum(world.receiver.counters().datagrams.values()) == 0
    world.run(1.1)
    assert sum(world.receiver.counters().datagrams.values()) == 5


def test_no_order_without_an_open_slot() -> None:
    leases = Leases(lambda batch: 5, first_batch=0, batch_count=3, slots=2, now_s=0)
    leases.join(1, 0.0)
    assert leases.drain() == [(1, Send(batch=0, row=0)), (1, Send(batch=1, row=0))]
    leases.observe(0, 5, 0, 0.1)
    assert leases.drain() == [(1, Taken(batch=0, row=5))]
    leases.release(0, 0.2)
    assert leases.drain() == [(1, Send(batch=2, row=0))]
    leases.observe(1, 5, 0, 0.3)
    leases.release(1, 0.3)
    assert leases.drain() == [(1, Taken(batch=1, row=5))]


def test_another_feeder_goes_on_where_the_dead_one_was() -> None:
    leases = Leases(lambda batch: 9, first_batch=0, batch_count=1, slots=1, now_s=0)
    leases.join(1, 0.0)
    leases.join(2, 0.0)
    leases.observe(0, 4, 0, 0.1)
    leases.drain()
    leases.leave(1, 0.2)
    assert leases.drain() == [(2, Send(batch=0, row=4))]
    leases.leave(2, 0.3)
    assert leases.drain() == []
    assert leases.counters.feeders_lost == 2
    assert leases.progress(0) == (4, 9, 0.1)


def test_a_feeder_that_sends_nothing_loses_the_batch_to_one_that_may() -> None:
    leases = Leases(lambda batch: 9, first_batch=0, batch_count=4, slots=2, now_s=0)
    leases.join(1, 0.0)
    leases.drain()
    leases.join(2, 0.0)
    now_s, asked = 0.0, 0
    while now_s < STALL_S + ASK_MAX_S:
        now_s += 0.1
        leases.advance(now_s)
        messages = leases.drain()
        asked += sum(number == 1 for number, _ in messages)
        if any(number == 2 for number, _ in messages):
            break
    assert STALL_S <= now_s < STALL_S + ASK_MAX_S
    assert asked > 2
    # Feeder 1 loses all its leases to feeder 2, and gets none of those that open later.
    assert [message for number, message in messages if number == 2] == [Send(batch=0, row=0), Send(batch=1, row=0)]
    assert leases.counters.moved == 2
    leases.observe(0, 9, 0, now_s)
    assert leases.drain() == [(1, Taken(batch=0, row=9)), (2, Taken(batch=0, row=9))]
    leases.release(0, now_s)
    assert leases.drain() == [(2, Send(batch=2, row=0))]


def test_one_gap_is_asked_for_once_and_a_second_one_again() -> None:
    leases = Leases(lambda batch: 99, first_batch=0, batch_count=1, slots=1, now_s=0)
    leases.join(1, 0.0)
    leases.drain()
    for now_s in (0.001, 0.002):
        leases.observe(0, 0, 8, now_s)  # The very first packet is lost.
    assert leases.drain() == [(1, Send(batch=0, row=0))]
    leases.observe(0, 4, 0, 0.003)
    leases.observe(0, 4, 12, 0.004)
    leases.observe(0, 4, 16, 0.005)
    assert leases.drain() == [(1, Taken(batch=0, row=4)), (1, Send(batch=0, row=4))]
    assert leases.counters.gaps == 2


def test_a_slow_link_with_a_long_queue_is_not_filled_with_the_same_rows(seed: int) -> None:
    """10 Mbit/s with a queue of 160 ms, less than the window, and 1 % loss: most packets are sent once."""
    network = Network(drop=0.01, packet_s=0.00112, queue_packets=143)
    sizes = [1200] * 20
    world = IngestWorld(sizes, [Behaviour()], network, seed=seed, slots=4, window_packets=48)
    world.run(UNTIL_S)
    assert len(world.trained) == len(sizes)
    needed = sum(-(-size // 4) for size in sizes)
    assert world.packets_sent < 1.5 * needed


def test_orders_wait_for_the_answer_that_a_long_way_takes() -> None:
    """The first timer is longer than the round trip. Later timers use the measured one, though rows come quickly."""
    way_s = 0.3
    leases = Leases(lambda batch: 10, first_batch=0, batch_count=9, slots=1, now_s=0)
    leases.join(1, 0.0)
    now_s = 0.0
    for batch in range(8):
        ordered_s = now_s
        while now_s < ordered_s + way_s:
            leases.observe(batch, 0, 0, now_s)
            leases.advance(now_s)
            now_s += 0.001
        for taken in range(1, 11):
            leases.observe(batch, taken, 0, now_s)
            now_s += 0.001
        leases.release(batch, now_s)
    assert leases.counters.silences == 0


@given(waits=st.lists(st.floats(0, 100), max_size=20))
def test_no_wait_is_too_short_or_too_long(waits: list[float]) -> None:
    estimate = WaitEstimate()
    assert estimate.bound_s() == ASK_FIRST_S
    for wait_s in waits:
        estimate.add(wait_s)
    assert not waits or ASK_MIN_S <= estimate.bound_s() <= ASK_MAX_S
