# SPDX-License-Identifier: Apache-2.0
"""The reference runs every collective on all ranks, in any legal order: results equal the definition bit for bit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from sennit.transport import algorithms
from sennit.transport.algorithms import piece_counts, pieces_of
from sennit.transport.algorithms.ranges import DEFAULT_CHUNK_BYTES
from sennit.transport.errors import ArgumentError, MismatchError
from sennit.transport.oracle import reference
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.device_plan import cut_messages, for_device
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import ANY_PEER, MAX_LOAN_BYTES, Plan, Recv, Send
from sennit.transport.plans.plan_codec import check, decode, encode
from tests.extent import examples
from tests.transport.algorithm_runs import (
    Array,
    check_allreduce,
    check_plans,
    check_reduce,
    check_reduce_scatter,
    cut,
    hosts_of,
    inputs,
    noise,
    run_in_any_order,
)

worlds = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)
arithmetic = st.sampled_from(
    [(dtype, op) for dtype in Dtype for op in sorted(reduce_ops(dtype))],
)
item_sizes = st.sampled_from([1, 2, 4, 8, 16, 3])


def staged_alltoall(
    algorithm: Callable[..., Plan], hosts: Hosts, item_bytes: int, part_bytes_max: int, streams: int = 1
) -> list[Plan]:
    more = {"hosts": hosts, "streams": streams} if algorithm is algorithms.alltoall_by_host else {}
    common = {"world": hosts.world, "item_bytes": item_bytes, "part_bytes_max": part_bytes_max}
    return [algorithm(**common, **more, rank=rank) for rank in range(hosts.world)]


def data_on_device(draw: DataObject) -> bool:
    return draw.draw(st.booleans(), "on_device")


def run(
    draw: DataObject,
    plans: Sequence[Plan],
    buffers: Sequence[Sequence[Array]],
    counts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Converts the plans to the binary form and back, and runs them under a random schedule."""
    fixed = plans if counts is None else [with_counts(plan, of) for plan, of in zip(plans, counts, strict=True)]
    check_plans(plans, fixed, buffers)
    if not any(plan.on_device for plan in plans) and data_on_device(draw):
        if counts is not None:
            # In pieces that sizes are multiples of, and in odd ones.
            segment_bytes = draw.draw(st.sampled_from([16, 37, 1_000]), "segment_bytes")
            fixed = [cut_messages(plan, segment_bytes) for plan in fixed]
        ring_bytes = draw.draw(st.sampled_from([64, 1_000, 8_192, 4_194_304]), "ring_bytes")
        run(draw, [for_device(plan, ring_bytes=ring_bytes) for plan in fixed], buffers)
        return
    run_in_any_order(draw, plans, buffers, counts)


@examples(40)
@given(
    st.data(), worlds, st.integers(0, 700), arithmetic, st.booleans(), st.sampled_from([64, 192, 1024, 131_072]), seeds
)
def test_allreduce(
    data: DataObject,
    world: int,
    elements: int,
    kind: tuple[Dtype, ReduceOp],
    in_place: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    one_shot = data.draw(st.booleans(), "one_shot")
    plans = [
        algorithms.allreduce(
            world=world, rank=rank, elements=elements, dtype=dtype, op=op,
            in_place=in_place, chunk_bytes=chunk_bytes, one_shot=one_shot,
        )
        for rank in range(world)
    ]  # fmt: skip
    check_allreduce(run, data, plans, inputs(seed, world, elements, dtype), kind, in_place)


@examples(25)
@given(st.data(), worlds, st.integers(0, 3_000), arithmetic, st.booleans(), st.sampled_from([64, 192, 1024]), seeds)
def test_one_allreduce_plan_serves_vectors_of_many_sizes(
    data: DataObject,
    world: int,
    most: int,
    kind: tuple[Dtype, ReduceOp],
    in_place: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    elements = data.draw(st.integers(min(most, 1), most), "elements")
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5), "widths")
    call = {"world": world, "elements": most, "dtype": dtype, "op": op, "counted": True}
    chunked = {**call, "chunk_bytes": chunk_bytes}
    hosts = {**chunked, "in_place": in_place, "hosts": hosts_of(cut(widths, world))}
    ways: list[tuple[Callable[..., Plan], dict[str, Any]]] = [
        (algorithms.allreduce, {**chunked, "in_place": in_place}),
        (algorithms.allreduce, {**chunked, "in_place": in_place, "one_shot": True}),
        (algorithms.allreduce, hosts),
        (algorithms.allreduce_round_trip, chunked),
        *([(algorithms.allreduce_dissemination, {**call, "in_place": in_place})] if world > 1 else []),
        *([(algorithms.allreduce_halving, {**chunked, "in_place": in_place})] if world > 1 else []),
    ]
    algorithm, arguments = data.draw(st.sampled_from(ways), "algorithm")
    plans = [algorithm(**arguments, rank=rank) for rank in range(world)]
    takes = Vectors(elements)
    check_allreduce(takes.run, data, plans, inputs(seed, world, elements, dtype), kind, arguments.get("in_place", True))


@examples(25)
@given(st.data(), worlds, st.integers(0, 3_000), arithmetic, st.booleans(), st.sampled_from([64, 192, 1024]), seeds)
def test_one_reduce_plan_serves_vectors_of_many_sizes(
    data: DataObject,
    world: int,
    most: int,
    kind: tuple[Dtype, ReduceOp],
    in_place: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    elements = data.draw(st.integers(min(most, 1), most), "elements")
    root = data.draw(st.integers(0, world - 1), "root")
    algorithm = data.draw(st.sampled_from([algorithms.reduce, algorithms.reduce_tree][: min(world, 2)]), "algorithm")
    plans = [
        algorithm(
            world=world, rank=rank, elements=most, dtype=kind[0], op=kind[1], root=root,
            in_place=in_place, chunk_bytes=chunk_bytes, counted=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    takes = Vectors(elements)
    check_reduce(takes.run, data, plans, inputs(seed, world, elements, kind[0]), kind, root, in_place)


class Vectors:
    """Runs plans that take a vector, with this size."""

    def __init__(self, elements: int) -> None:
        self.counts = [elements]

    def run(self, draw: DataObject, plans: Sequence[Plan], buffers: Sequence[Sequence[Array]]) -> None:
        for plan in plans:
            check(plan)
            assert decode(encode(plan)).cut == plan.cut
        check_plans(plans, [with_counts(plan, self.counts) for plan in plans], buffers)
        run_in_any_order(draw, plans, buffers, [self.counts] * len(plans))


@pytest.mark.parametrize("elements", [-1, 0, 101])
def test_a_vector_of_another_size_than_the_plan_serves_is_refused(elements: int) -> None:
    plan = algorithms.allreduce(world=2, rank=0, elements=100, dtype=Dtype.F32, op=ReduceOp.SUM, counted=True)
    with pytest.raises(ArgumentError, match=rf"the vector has {elements} elements; allowed: 1\.\.100"):
        with_counts(plan, [elements])


def test_ranks_of_vectors_of_different_sizes_are_named_by_their_sizes() -> None:
    call: dict[str, Any] = {
        "world": 2,
        "elements": 100,
        "dtype": Dtype.F32,
        "op": ReduceOp.SUM,
        "counted": True,
        "one_shot": True,
    }
    plans = [algorithms.allreduce(rank=rank, **call) for rank in range(2)]
    buffers = [[noise(400)], [noise(400)]]
    with pytest.raises(MismatchError):
        reference.run(plans, buffers, counts=[[100], [99]], seed=0)


counts_of = st.lists(st.one_of(st.just(0), st.integers(0, 300)), min_size=9, max_size=9)


@examples(40)
@given(
    st.data(),
    worlds,
    counts_of,
    arithmetic,
    st.sampled_from(["one", "list", "aliased"]),
    st.sampled_from([64, 256, 131_072]),
    seeds,
)
def test_reduce_scatter(
    data: DataObject,
    world: int,
    counts: list[int],
    kind: tuple[Dtype, ReduceOp],
    form: str,
    chunk_bytes: int,
    seed: int,
) -> None:
    dtype, op = kind
    counts = counts[:world]
    plans = [
        algorithms.reduce_scatter(
            world=world, rank=rank, counts=counts, dtype=dtype, op=op,
            list_input=form == "list", chunk_bytes=chunk_bytes,
        )
        for rank in range(world)
    ]  # fmt: skip
    check_reduce_scatter(run, data, plans, inputs(seed, world, sum(counts), dtype), kind, counts, form)


@examples(40)
@given(st.data(), worlds, counts_of, arithmetic, st.sampled_from(["one", "list", "aliased"]), seeds)
def test_reduce_scatter_of_counts_at_run_time(
    data: DataObject, world: int, counts: list[int], kind: tuple[Dtype, ReduceOp], form: str, seed: int
) -> None:
    dtype, op = kind
    counts, pieces = counts[:world], data.draw(st.sampled_from([1, 2, 8]), "pieces")
    plans = [
        algorithms.reduce_scatter_counted(
            world=world, rank=rank, pieces=pieces, dtype=dtype, op=op, list_input=form == "list"
        )
        for rank in range(world)
    ]
    assert all(decode(encode(plan)).steps == plan.steps for plan in plans)
    fixed = [with_counts(plan, piece_counts(counts, dtype.item_bytes, pieces)) for plan in plans]
    check_reduce_scatter(run, data, fixed, inputs(seed, world, sum(counts), dtype), kind, counts, form)


@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=9), st.sampled_from([1, 2, 8, 16]))
def test_pieces_of_a_share_are_no_larger_than_a_loan(counts: list[int], item_bytes: int) -> None:
    pieces = pieces_of(counts, item_bytes)
    cut = np.reshape(piece_counts(counts, item_bytes, pieces), (-1, pieces))
    assert cut.sum(axis=1).tolist() == counts
    assert cut.max() * item_bytes <= MAX_LOAN_BYTES
    assert pieces == 1 or cut.max() * item_bytes > MAX_LOAN_BYTES / 2 - 64
    starts = np.cumsum(cut, axis=1)[:, :-1] * item_bytes
    assert not ((starts % 64 != 0) & (cut[:, 1:] != 0)).any()


@examples(40)
@given(st.data(), worlds, st.integers(0, 700), arithmetic, st.booleans(), seeds)
def test_reduce(
    data: DataObject, world: int, elements: int, kind: tuple[Dtype, ReduceOp], in_place: bool, seed: int
) -> None:
    dtype, op = kind
    root = data.draw(st.integers(0, world - 1), "root")
    plans = [
        algorithms.reduce(
            world=world, rank=rank, elements=elements, dtype=dtype, op=op, root=root, in_place=in_place, chunk_bytes=128
        )
        for rank in range(world)
    ]
    check_reduce(run, data, plans, inputs(seed, world, elements, dtype), kind, root, in_place)


@examples(40)
@given(st.data(), worlds, st.integers(0, 500), item_sizes, st.integers(64, 4_000), seeds)
def test_broadcast(data: DataObject, world: int, elements: int, item_bytes: int, segment_bytes: int, seed: int) -> None:
    root = data.draw(st.integers(0, world - 1), "root")
    hosts = hosts_of(data.draw(st.lists(st.integers(1, world), min_size=1).map(lambda widths: cut(widths, world))))
    call: dict[str, Any] = {"elements": elements, "item_bytes": item_bytes, "root": root, "hosts": hosts}
    plans = [algorithms.broadcast(world=world, rank=rank, segment_bytes=segment_bytes, **call) for rank in range(world)]
    content = np.random.default_rng(seed).integers(0, 256, elements * item_bytes, np.uint8)
    buffers = [[content.copy() if rank == root else noise(content.size)] for rank in range(world)]
    run(data, plans, buffers)
    for rank in range(world):
        np.testing.assert_array_equal(buffers[rank][0], content)


def test_broadcast_tree_reaches_everyone_once() -> None:
    for world in range(1, 20):
        for root in range(world):
            plans = [
                algorithms.broadcast(world=world, rank=rank, elements=1, item_bytes=1, root=root)
                for rank in range(world)
            ]
            told = sorted(step.peer for plan in plans for step in plan.steps if isinstance(step, Send))
            assert told == sorted(set(range(world)) - {root})
            from_root = [step for step in plans[root].steps if isinstance(step, Send)]
            assert len(from_root) == (world - 1).bit_length()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_broadcast_reaches_each_other_host_once(widths: list[int], data: DataObject) -> None:
    hosts = hosts_of(widths)
    root = data.draw(st.integers(0, hosts.world - 1), "root")
    told = []
    for rank in range(hosts.world):
        plan = algorithms.broadcast(world=hosts.world, rank=rank, elements=1, item_bytes=1, root=root, hosts=hosts)
        peers = [step.peer for step in plan.steps if isinstance(step, Send)]
        near = [hosts.of_rank(peer) == hosts.of_rank(rank) for peer in peers]
        assert near == sorted(near), "other hosts come first"
        assert len(peers) <= (len(widths) - 1).bit_length() + (max(widths) - 1).bit_length()
        told += list(zip(peers, near, strict=True))
    assert sorted(peer for peer, _ in told) == sorted(set(range(hosts.world)) - {root})
    assert sorted(hosts.of_rank(peer) for peer, is_near in told if not is_near) == sorted(
        set(range(len(widths))) - {hosts.of_rank(root)}
    )


@examples(15)
@given(st.data(), worlds, counts_of, item_sizes, st.booleans(), st.booleans(), seeds)
def test_allgather(
    data: DataObject,
    world: int,
    counts: list[int],
    item_bytes: int,
    in_place: bool,
    list_output: bool,
    seed: int,
) -> None:
    counts = counts[:world]
    hosts = hosts_of(data.draw(st.lists(st.integers(1, world), min_size=1).map(lambda widths: cut(widths, world))))
    ring, by_host = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]), "ring, by host")
    arguments: dict[str, Any] = {"hosts": hosts} if by_host else {"ring": ring}
    bounds = np.cumsum([0, *counts]) * item_bytes
    plans = [
        (algorithms.allgather_by_host if by_host else algorithms.allgather)(
            world=world, rank=rank, item_bytes=item_bytes, in_place=in_place, list_output=list_output, **arguments
        )
        for rank in range(world)
    ]
    content = np.random.default_rng(seed).integers(0, 256, bounds[-1], np.uint8)
    outputs = [noise(content.size) for _ in range(world)]
    buffers: list[list[Array]] = []
    for rank, output in enumerate(outputs):
        low, high = bounds[rank], bounds[rank + 1]
        own = content[low:high].copy()
        if in_place:
            output[low:high] = own
        parts = [output[a:b] for a, b in itertools.pairwise(bounds)]
        buffers.append([*([] if in_place else [own]), *(parts if list_output else [output])])
    if ring or by_host:
        check_plans(plans, [with_counts(plan, counts) for plan in plans], buffers)
        run_in_any_order(data, plans, buffers, [counts] * world)
        for rank, plan in enumerate(plans):
            peers = [step.peer for step in plan.steps if isinstance(step, Send)]
            if ring:
                assert set(peers) <= {(rank + 1) % world}
            else:
                far = [peer for peer in peers if hosts.of_rank(peer) != hosts.of_rank(rank)]
                assert len(far) == len(hosts.spans) - 1
    else:
        run(data, plans, buffers, [counts] * world)
    for output in outputs:
        np.testing.assert_array_equal(output, content)


@examples(40)
@given(st.data(), worlds, counts_of, item_sizes, st.booleans(), seeds)
def test_gather_and_scatter(
    data: DataObject, world: int, counts: list[int], item_bytes: int, in_list: bool, seed: int
) -> None:
    counts = counts[:world]
    root = data.draw(st.integers(0, world - 1), "root")
    bounds = np.cumsum([0, *counts]) * item_bytes
    content = np.random.default_rng(seed).integers(0, 256, bounds[-1], np.uint8)
    parts = [content[low:high].copy() for low, high in itertools.pairwise(bounds)]
    gathered = noise(content.size)
    at_root = [gathered[low:high] for low, high in itertools.pairwise(bounds)] if in_list else [gathered]
    run(
        data,
        [
            algorithms.gather(world=world, rank=rank, item_bytes=item_bytes, root=root, list_output=in_list)
            for rank in range(world)
        ],
        [[part, *(at_root if rank == root else [])] for rank, part in enumerate(parts)],
        [counts] * world,
    )
    np.testing.assert_array_equal(gathered, content)
    outputs = [noise(part.size) for part in parts]
    run(
        data,
        [
            algorithms.scatter(world=world, rank=rank, item_bytes=item_bytes, root=root, list_input=in_list)
            for rank in range(world)
        ],
        [[*(at_root if rank == root else []), output] for rank, output in enumerate(outputs)],
        [counts] * world,
    )
    for part, output in zip(parts, outputs, strict=True):
        np.testing.assert_array_equal(output, part)


@examples(10)
@given(st.data(), worlds, item_sizes, st.booleans(), st.booleans(), seeds)
def test_alltoall(
    data: DataObject, world: int, item_bytes: int, list_input: bool, list_output: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 200, (world, world)) * rng.integers(0, 2, (world, world))
    content = [[rng.integers(0, 256, n * item_bytes, np.uint8) for n in row] for row in counts]
    plans = [
        algorithms.alltoall(
            world=world, rank=rank, item_bytes=item_bytes, list_input=list_input, list_output=list_output
        )
        for rank in range(world)
    ]
    expected = [[content[i][j] for i in range(world)] for j in range(world)]
    buffers: list[list[Array]] = []
    for rank in range(world):
        ins = [x.copy() for x in content[rank]]
        outs = [noise(x.size) for x in expected[rank]]
        buffers.append(
            [
                *(ins if list_input else [np.concatenate(ins)]),
                *(outs if list_output else [np.concatenate(outs)]),
            ]
        )
    run(data, plans, buffers, [[*counts[rank].tolist(), *counts[:, rank].tolist()] for rank in range(world)])
    for rank in range(world):
        outs = buffers[rank][world if list_input else 1 :]
        np.testing.assert_array_equal(np.concatenate(outs), np.concatenate(expected[rank]))


ways = st.one_of(
    st.tuples(st.just(algorithms.alltoall_bruck), st.integers(1, 17).map(lambda world: Hosts.equal(world, 1))),
    st.tuples(st.just(algorithms.alltoall_by_host), st.lists(st.integers(1, 5), min_size=1, max_size=5).map(hosts_of)),
)


@examples(40)
@given(st.data(), ways, st.integers(0, 40), item_sizes, seeds)
def test_alltoall_of_equal_parts_by_way_of_others(
    data: DataObject, way: tuple[Callable[..., Plan], Hosts], elements: int, item_bytes: int, seed: int
) -> None:
    algorithm, hosts = way
    world, part_bytes = hosts.world, elements * item_bytes
    content = np.random.default_rng(seed).integers(0, 256, (world, world, part_bytes), np.uint8)
    streams, more_bytes = data.draw(st.integers(1, 6), "streams"), data.draw(st.integers(0, 100), "more_bytes")
    plans = staged_alltoall(algorithm, hosts, item_bytes, part_bytes + more_bytes, streams=streams)
    buffers = [[content[rank].reshape(-1).copy(), noise(content[rank].size)] for rank in range(world)]
    counts = [[elements]] * world
    check_plans(plans, [with_counts(plan, given) for plan, given in zip(plans, counts, strict=True)], buffers)
    run_in_any_order(data, plans, buffers, counts)
    for rank in range(world):
        np.testing.assert_array_equal(buffers[rank][0], content[rank].reshape(-1))
        np.testing.assert_array_equal(buffers[rank][1], content[:, rank].reshape(-1))


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("widths", [[4, 4], [1, 1, 1], [3, 3, 3], [7, 1, 1, 1], [1, 5], [2, 3, 4]])
def test_messages_between_hosts_are_few_and_every_rank_sends_some(widths: list[int], streams: int) -> None:
    hosts = hosts_of(widths)
    far = [
        (plan.rank, step.peer)
        for plan in staged_alltoall(algorithms.alltoall_by_host, hosts, 1, 10, streams=streams)
        for step in plan.steps
        if isinstance(step, Send) and hosts.of_rank(step.peer) != hosts.of_rank(plan.rank)
    ]
    for host, span in enumerate(hosts.spans):
        reached = [hosts.of_rank(target) for sender, target in far if hosts.of_rank(sender) == host]
        others = set(range(len(widths))) - {host}
        assert Counter(reached) == {other: min(streams, widths[other]) for other in others}
        sent = [sum(sender == rank for sender, _ in far) for rank in range(*span)]
        assert max(sent) - min(sent) <= 1 + len(others) * (len(set(widths)) > 1)


def test_ranks_that_mix_alltoall_with_and_without_counts_find_out() -> None:
    whole: dict[str, Any] = {"world": 2, "item_bytes": 1}
    hosts = hosts_of([2])
    plans = [
        algorithms.alltoall(**whole, rank=0),
        algorithms.alltoall_bruck(**whole, rank=1, part_bytes_max=3),
        algorithms.alltoall_by_host(**whole, rank=1, part_bytes_max=3, hosts=hosts, streams=1),
    ]
    buffers = [[np.zeros(6, np.uint8), np.zeros(6, np.uint8)] for _ in range(2)]
    for other in plans[1:]:
        with pytest.raises(MismatchError, match=r"alltoall of equal parts, by (Bruck|host), of uint8"):
            reference.run([plans[0], other], buffers, counts=[[3] * 4, [3]])


@pytest.mark.parametrize("algorithm", [algorithms.alltoall_bruck, algorithms.alltoall_by_host])
def test_a_plan_of_equal_parts_takes_one_count_within_its_scratch(algorithm: Callable[..., Plan]) -> None:
    plan = staged_alltoall(algorithm, hosts_of([2, 2]), 4, 10)[0]
    assert decode(encode(plan)).equal_counts
    with pytest.raises(ArgumentError, match="takes 1 counts, 8 given"):
        with_counts(plan, [1] * 8)
    check(with_counts(plan, [2]))
    with pytest.raises(ArgumentError, match="beyond the scratch"):
        check(with_counts(plan, [3]))


@examples(8)
@given(st.data(), st.integers(1, 17))
def test_barrier_runs(data: DataObject, world: int) -> None:
    run(data, [algorithms.barrier(world=world, rank=rank) for rank in range(world)], [[] for _ in range(world)])


@pytest.mark.parametrize("world", range(2, 18))
def test_barrier_waits_for_everyone(world: int) -> None:
    # The ranks that have certainly entered, as one rank knows after each of its receives.
    plans = [algorithms.barrier(world=world, rank=rank) for rank in range(world)]
    rounds = (world - 1).bit_length()
    known = [{rank} for rank in range(world)]
    for slot in range(rounds):
        sent = [set(k) for k in known]
        for plan in plans:
            recv = next(s for s in plan.steps if isinstance(s, Recv) and s.slot == slot)
            known[plan.rank] |= sent[recv.peer]
            send_step = next(s for s in plan.steps if isinstance(s, Send) and s.slot == slot)
            assert len(send_step.after) == slot
    assert all(k == set(range(world)) for k in known)


def test_send_and_recv_from_anyone() -> None:
    content = np.arange(100, dtype=np.int64)
    received = np.zeros_like(content)
    plans = [
        algorithms.recv(world=2, rank=0, peer=ANY_PEER, item_bytes=8),
        algorithms.send(world=2, rank=1, peer=0, item_bytes=8),
    ]
    reference.run(plans, [[received], [content]], counts=[[100], [100]])
    np.testing.assert_array_equal(received, content)
    assert decode(encode(plans[0])) == plans[0]


def test_ranks_that_disagree_are_told_apart() -> None:
    plans = [
        algorithms.allreduce(world=2, rank=0, elements=4, dtype=Dtype.F32, op=ReduceOp.SUM),
        algorithms.allreduce(world=2, rank=1, elements=4, dtype=Dtype.I32, op=ReduceOp.SUM),
    ]
    with pytest.raises(MismatchError, match=r"allreduce of (float32|int32) \(sum\), 4 elements"):
        reference.run(plans, [[np.zeros(4, np.float32)], [np.zeros(4, np.int32)]])
    splits = [algorithms.alltoall(world=2, rank=rank, item_bytes=1) for rank in range(2)]
    buffers = [[np.zeros(n, np.uint8) for n in sizes] for sizes in ((3, 4), (3, 3))]
    with pytest.raises(MismatchError, match=r"2 bytes; rank 0 expects alltoall of uint8, 3|expects .*, 2"):
        reference.run(splits, buffers, counts=[[1, 2, 1, 3], [2, 1, 2, 1]])


def test_large_plans_stay_small() -> None:
    sixty_four_mib = algorithms.allreduce(world=2, rank=0, elements=16 << 20, dtype=Dtype.F32, op=ReduceOp.SUM)
    assert len(sixty_four_mib.steps) <= 2_000
    assert len(encode(sixty_four_mib)) <= 200_000
    loans = [s for s in sixty_four_mib.steps if isinstance(s, Recv) and s.buffer is None]
    *chunks, rest = sorted({s.size_bytes for s in loans}, reverse=True)
    assert (chunks, rest) == ([DEFAULT_CHUNK_BYTES], (32 << 20) % DEFAULT_CHUNK_BYTES)


def test_every_byte_of_alltoall_travels_in_one_message() -> None:
    plan = with_counts(algorithms.alltoall(world=4, rank=1, item_bytes=4), [1 << 24] * 8)
    assert [s.size_bytes for s in plan.steps if isinstance(s, Send)] == [1 << 26] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: algorithms.reduce_scatter(world=2, rank=0, counts=[1], dtype=Dtype.F32, op=ReduceOp.SUM), "1 entries"),
        (
            lambda: algorithms.reduce_scatter(world=2, rank=0, counts=[1, -1], dtype=Dtype.F32, op=ReduceOp.SUM),
            "negative",
        ),
        (lambda: algorithms.broadcast(world=2, rank=0, elements=1, item_bytes=4, root=2), "root 2; allowed: 0..1"),
        (lambda: algorithms.send(world=2, rank=0, item_bytes=4, peer=0), "peer 0"),
        (
            lambda: algorithms.allreduce(world=2, rank=0, elements=4, dtype=Dtype.C64, op=ReduceOp.MAX),
            "MAX is not defined for C64; allowed: AVG, PREMUL_SUM, PRODUCT, SUM",
        ),
        (
            lambda: algorithms.allreduce(
                world=2, rank=0, elements=4, dtype=Dtype.F32, op=ReduceOp.SUM, chunk_bytes=1 << 20
            ),
            "chunk_bytes 1048576; allowed",
        ),
    ],
)
def test_bad_arguments_name_value_and_range(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        call()
