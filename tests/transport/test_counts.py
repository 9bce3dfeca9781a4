# SPDX-License-Identifier: Apache-2.0
"""Counts at run time: one plan serves all counts, native core and reference agree, bad counts send nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from sennit.transport.plans import plan_codec
from sennit.transport.plans.binding import with_counts
from sennit.transport.plans.plan_codec import encode

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.transport import _core, algorithms
from sennit.transport.algorithms import piece_counts, pieces_of
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, TransportKind
from sennit.transport.errors import ArgumentError, MismatchError, PeerError
from sennit.transport.meeting.store import FileStore
from sennit.transport.oracle import reference
from sennit.transport.plans.binding import COUNTED_MAX_BYTES
from sennit.transport.plans.counts import CountRange
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Operand, Plan, PlanBuilder
from sennit.transport.plans.signature import Kind, signature
from sennit.transport.plans.tree import Span
from tests.extent import examples

Bytes = npt.NDArray[np.uint8]
WORLD = 3
CONFIG = Config(transport=TransportKind.SHM, timeout_s=60.0)
# Around the size of a piece of a local copy, 262,144 bytes.
sizes = st.one_of(st.just(0), st.integers(0, 40), st.integers(262_100, 262_200), st.just(600_000))


def connect(world: int, folder: Path) -> list[Communicator]:
    """All ranks of a group, in this process."""
    store = folder / "store"

    def make(rank: int) -> Communicator:
        return Communicator(rank=rank, world=world, store=FileStore(store), config=CONFIG)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(make, range(world)))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Communicator]]:
    made = connect(WORLD, tmp_path_factory.mktemp("groups"))
    yield made
    for group in made:
        group.shutdown()


@pytest.fixture(scope="module")
def alone() -> Iterator[Communicator]:
    with Communicator(rank=0, world=1, config=CONFIG) as group:
        yield group


def run_native(
    groups: Sequence[Communicator],
    key: Any,
    compile_plan: Callable[[int], Plan],
    buffers: Sequence[Sequence[Bytes]],
    counts: Sequence[Sequence[int]],
) -> None:
    operations = [
        group.post(key, lambda rank=group.rank: compile_plan(rank), mine, counts=given, background=True)  # type: ignore[misc]
        for group, mine, given in zip(groups, buffers, counts, strict=True)
    ]
    for operation in operations:
        operation.wait()


def random_buffers(rng: np.random.Generator, plan: Plan, counts: Sequence[int]) -> list[Bytes]:
    return [rng.integers(0, 256, size, np.uint8) for size in with_counts(plan, counts).buffer_bytes]


def compare(
    groups: Sequence[Communicator],
    seed: int,
    key: Any,
    compile_plan: Callable[[int], Plan],
    counts: Sequence[Sequence[int]],
) -> None:
    """The native core leaves the same bytes in all buffers as the reference."""
    rng = np.random.default_rng(seed)
    plans = [compile_plan(rank) for rank in range(WORLD)]
    native = [random_buffers(rng, plan, given) for plan, given in zip(plans, counts, strict=True)]
    expected = [[buffer.copy() for buffer in mine] for mine in native]
    run_native(groups, key, compile_plan, native, counts)
    reference.run(plans, expected, counts=counts, seed=seed)
    for mine, wanted in zip(itertools.chain(*native), itertools.chain(*expected), strict=True):
        np.testing.assert_array_equal(mine, wanted)


@examples(15)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([1, 4, 3]), st.integers(0, 2**32 - 1))
def test_alltoall_of_any_counts(
    groups: list[Communicator], data: DataObject, list_input: bool, list_output: bool, item_bytes: int, seed: int
) -> None:
    table = np.array(data.draw(st.lists(sizes, min_size=WORLD**2, max_size=WORLD**2))).reshape(WORLD, WORLD)
    counts = table // item_bytes

    def compile_plan(rank: int) -> Plan:
        return algorithms.alltoall(
            world=WORLD, rank=rank, item_bytes=item_bytes, list_input=list_input, list_output=list_output
        )

    key = ("alltoall", list_input, list_output, item_bytes)
    compare(groups, seed, key, compile_plan, [[*counts[r].tolist(), *counts[:, r].tolist()] for r in range(WORLD)])


ONE_PART_A_RANK: list[Callable[..., Plan]] = [algorithms.allgather, algorithms.gather, algorithms.scatter]


@examples(10)
@given(
    st.sampled_from(ONE_PART_A_RANK),
    st.lists(sizes, min_size=WORLD, max_size=WORLD),
    st.integers(0, WORLD - 1),
    st.integers(0, 2**32 - 1),
)
def test_one_part_a_rank_of_any_size(
    groups: list[Communicator], algorithm: Callable[..., Plan], counts: list[int], root: int, seed: int
) -> None:
    rooted = {} if algorithm is algorithms.allgather else {"root": root}

    def compile_plan(rank: int) -> Plan:
        return algorithm(world=WORLD, rank=rank, item_bytes=1, **rooted)

    compare(groups, seed, (algorithm.__name__, root), compile_plan, [counts] * WORLD)


@examples(10)
@given(st.lists(sizes, min_size=WORLD, max_size=WORLD), st.booleans(), st.integers(0, 2**32 - 1))
def test_reduce_scatter_of_any_counts(
    groups: list[Communicator], share_bytes: list[int], list_input: bool, seed: int
) -> None:
    counts = [size_bytes // 4 for size_bytes in share_bytes]
    pieces = pieces_of(counts, 4)

    def compile_plan(rank: int) -> Plan:
        return algorithms.reduce_scatter_counted(
            world=WORLD, rank=rank, pieces=pieces, dtype=Dtype.I32, op=ReduceOp.SUM, list_input=list_input
        )

    key = ("reduce_scatter", list_input, pieces)
    compare(groups, seed, key, compile_plan, [piece_counts(counts, 4, pieces)] * WORLD)


@examples(10)
@given(st.sampled_from(["bruck", "host"]), st.sampled_from([1, 2]), st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_alltoall_of_one_count(groups: list[Communicator], way: str, streams: int, elements: int, seed: int) -> None:
    def compile_plan(rank: int) -> Plan:
        whole: dict[str, Any] = {"world": WORLD, "rank": rank, "part_bytes_max": 1_500, "item_bytes": 3}
        if way == "bruck":
            return algorithms.alltoall_bruck(**whole)
        return algorithms.alltoall_by_host(**whole, hosts=Hosts((Span(0, 2), Span(2, 3))), streams=streams)

    compare(groups, seed, (way, streams), compile_plan, [[elements]] * WORLD)


@pytest.mark.parametrize(
    ("compile_plan", "counts", "words"),
    [
        (
            lambda: algorithms.reduce_scatter_counted(world=3, rank=0, pieces=1, dtype=Dtype.U8, op=ReduceOp.MAX),
            [131_073, 1, 1],
            "is a loan of 131073 bytes; allowed: 0..131072",
        ),
        (
            lambda: algorithms.alltoall_bruck(world=3, rank=0, part_bytes_max=4, item_bytes=4),
            [2],
            "a step reaches beyond the scratch",
        ),
        (
            lambda: algorithms.alltoall_bruck(world=3, rank=0, part_bytes_max=4, item_bytes=4),
            [-1],
            "count 0 is -1; allowed: 0..",
        ),
        (
            lambda: algorithms.alltoall_bruck(world=3, rank=0, part_bytes_max=4, item_bytes=4),
            [1, 1],
            "the plan takes 1 counts, 2 given",
        ),
        (
            lambda: counted(
                lambda b: b.reduce([Operand(0)], 1, 0, CountRange(0, 1), dtype=Dtype.F32, op=ReduceOp.SUM),
                world=3,
                buffers=2,
                unit_bytes=1,
            ),
            [6, 1],
            "step 0 reduces part of an element",
        ),
    ],
)
def test_counts_that_a_plan_has_no_room_for_send_nothing(
    groups: list[Communicator], compile_plan: Callable[[], Plan], counts: list[int], words: str
) -> None:
    before = groups[0].sequence
    with pytest.raises(ArgumentError, match=re.escape(words)):
        groups[0].post(words, compile_plan, [np.zeros(200_000, np.uint8) for _ in range(2)], counts=counts)
    assert groups[0].sequence == before


@examples(40)
@given(st.data(), st.integers(1, 8))
def test_copies_of_any_ranges_of_counts(alone: Communicator, data: DataObject, unit_bytes: int) -> None:
    """Ranges of several parts, too. Where source and place differ in size, core and reference say so in equal words."""
    half = data.draw(st.integers(1, 5), "parts")
    sources = data.draw(st.lists(st.integers(0, 30), min_size=half, max_size=half), "sources")
    change = data.draw(st.sampled_from([0, 0, 0, 1, 5]), "change")
    counts = [*sources, sources[0] + change, *sources[1:]]
    bounds = sorted(data.draw(st.sets(st.integers(0, half), max_size=3), "bounds") | {0, half})
    builder = PlanBuilder(
        "copies",
        world=1,
        rank=0,
        signature=signature(Kind.ALLTOALL),
        buffer_bytes=[CountRange(0, half), CountRange(half, 2 * half)],
        count_count=2 * half,
        unit_bytes=unit_bytes,
    )
    for first, end in itertools.pairwise(bounds):
        source = Operand(0, CountRange(0, first))
        builder.copy(source, 1, CountRange(half, half + first), CountRange(first, end))
    plan = builder.build()
    key = (half, tuple(bounds), unit_bytes)
    content = np.random.default_rng(0).integers(0, 256, sum(sources) * unit_bytes, np.uint8)
    native, expected = (np.zeros(sum(counts[half:]) * unit_bytes, np.uint8) for _ in range(2))
    if change:
        with pytest.raises(ArgumentError, match=r"bytes \(.*\), but its place has") as refused:
            with_counts(plan, counts)
        words = str(refused.value).split(": ", 1)[1]
        with pytest.raises(ArgumentError, match=re.escape(words)):
            alone.post(key, lambda: plan, [content, native], counts=counts)
        return
    alone.post(key, lambda: plan, [content, native], counts=counts).wait()
    reference.run([plan], [[content, expected]], counts=[counts])
    np.testing.assert_array_equal(native, expected)
    np.testing.assert_array_equal(native, content)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1, 2, 3], "the plan takes 2 counts, 3 given"),
        ([], "the plan takes 2 counts, 0 given"),
        ([1, -1], f"count 1 is -1; allowed: 0..{(COUNTED_MAX_BYTES - 4) // 4}"),
        ([-(2**63), 0], f"count 0 is -9223372036854775808; allowed: 0..{COUNTED_MAX_BYTES // 4}"),
        ([2**61, 0], f"count 0 is 2305843009213693952; allowed: 0..{COUNTED_MAX_BYTES // 4}"),
        ([2**60, 2**60], f"count 1 is 1152921504606846976; allowed: 0..{COUNTED_MAX_BYTES // 4 - 2**60}"),
        ([3, 3], "buffer 0 has 8 bytes, the plan needs 12"),
        ([2, 2], "buffer 1 has 4 bytes, the plan needs 8"),
        ([1, 2], "step 0 moves 8 bytes (counts[1:2]), but its place has 4 (counts[0:1])"),
    ],
)
def test_counts_that_do_not_fit_send_nothing(alone: Communicator, counts: list[int], words: str) -> None:
    before = alone.sequence
    with pytest.raises(ArgumentError, match=re.escape(words)):
        alone.post(
            "bad",
            lambda: algorithms.alltoall(world=1, rank=0, item_bytes=4),
            [np.zeros(8, np.uint8), np.zeros(4, np.uint8)],
            counts=counts,
        )
    assert alone.sequence == before
    assert not alone.failure


def test_a_plan_without_counts_refuses_some(alone: Communicator) -> None:
    with pytest.raises(ArgumentError, match="the plan takes 0 counts, 1 given"):
        alone.post("barrier", lambda: algorithms.barrier(world=1, rank=0), [], counts=[0])


def test_the_reference_refuses_the_same_counts() -> None:
    plan = algorithms.alltoall(world=1, rank=0, item_bytes=4)
    for counts, words in (
        ([1], "takes 2 counts, 1 given"),
        ([1, -1], "count 1 is -1; allowed: 0..2305843009213693950"),
        ([2**61, 0], "count 0 is 2305843009213693952"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            reference.run([plan], [[np.zeros(8, np.uint8)] * 2], counts=[counts])
    with pytest.raises(ArgumentError, match="0 <= first <= end"):
        CountRange(2, 1)


def test_ranks_whose_counts_differ_are_told_both_sizes(tmp_path: Path) -> None:
    pair = connect(2, tmp_path)
    counts = [[0, 5, 0, 7], [8, 0, 5, 0]]
    operations = [
        group.post(
            "alltoall",
            lambda rank=group.rank: algorithms.alltoall(world=2, rank=rank, item_bytes=4),  # type: ignore[misc]
            [np.zeros(64, np.uint8), np.zeros(64, np.uint8)],
            counts=counts[group.rank],
            background=True,
        )
        for group in pair
    ]
    texts = []
    for operation in operations:
        # Rank 1 may be done before rank 0 tells it.
        try:
            operation.wait()
        except (MismatchError, PeerError) as ended:
            texts.append(str(ended))
    assert any("rank 1 sends 32 bytes to rank 0, which expects exactly 28" in text for text in texts), texts
    for group in pair:
        group.shutdown(0.0)


def test_new_counts_compile_no_plan(groups: list[Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counting(plan: Plan) -> bytes:
        compiled.append(plan.name)
        return encode(plan)

    monkeypatch.setattr(plan_codec, "encode", counting)

    def call_all(rows: int) -> list[str]:
        """Every collective with counts, each rank in its thread; what was compiled."""
        compiled.clear()
        table = np.arange(WORLD**2).reshape(WORLD, WORLD) * rows

        def call(group: Communicator) -> None:
            rank = group.rank
            given = np.full(int(table[rank].sum()), rank, np.int16)
            got = group.alltoall(given, send_counts=table[rank].tolist(), recv_counts=table[:, rank].tolist())
            np.testing.assert_array_equal(got, np.repeat(np.arange(WORLD), table[:, rank]))
            every = [rows + other for other in range(WORLD)]
            got = group.allgather(np.full(every[rank], rank, np.int16), counts=every)
            np.testing.assert_array_equal(got, np.repeat(np.arange(WORLD), every))
            got = group.reduce_scatter(np.full(sum(every), rank, np.int16), counts=every)
            np.testing.assert_array_equal(got, np.full(every[rank], sum(range(WORLD)), np.int16))
            group.gather(np.zeros(rows, np.int16), 1)
            group.scatter(np.zeros((WORLD, rows) if rank == 1 else rows, np.int16), 1)
            if rank == 0:
                group.send(np.zeros(rows, np.int16), 1)
            elif rank == 1:
                group.recv(np.zeros(rows, np.int16), 0)

        with ThreadPoolExecutor(WORLD) as pool:
            list(pool.map(call, groups))
        return list(compiled)

    assert len(call_all(3)) == 5 * WORLD + 2
    # The shares of a reduce_scatter take more pieces.
    assert call_all(70_000) == ["reduce_scatter"] * WORLD
    assert [call_all(rows) for rows in (4, 69_000, 0, 1)] == [[]] * 4


def counted(*steps: Callable[[PlanBuilder], object], world: int = 2, buffers: int = 1, unit_bytes: int = 4) -> Plan:
    builder = PlanBuilder(
        "counted",
        world=world,
        rank=0,
        signature=signature(Kind.ALLTOALL),
        buffer_bytes=[CountRange(0, 2)] * buffers,
        count_count=2,
        unit_bytes=unit_bytes,
    )
    for step in steps:
        step(builder)
    return builder.build()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (counted(lambda b: b.recv(1, 0, 0, 0, CountRange(1, 3))), "step 0 names counts[1:3] of 2"),
        (counted(lambda b: b.recv(1, 0, 0, CountRange(0, 3), CountRange(0, 1))), "step 0 names counts[0:3] of 2"),
        (
            counted(lambda b: b.recv(1, 0, 0, CountRange(0, 1), 8)),
            "step 0 moves a fixed size at a place that depends on counts",
        ),
        (
            counted(lambda b: b.recv(1, 0, 0, CountRange(0, 1), CountRange(0, 2))),
            "step 0 reaches beyond the last of the plan's counts",
        ),
        (counted(lambda b: b.send(1, 0, Operand(0, CountRange(0, 1)), 8)), "step 0 moves a fixed size at a place"),
        (counted(lambda b: b.loan(1, 0, CountRange(0, 1))), "nobody reads the loan of step 0"),
        (
            counted(lambda b: b.copy(Operand(b.loan(1, 0, 8), 0, True), 0, 0, CountRange(0, 1))),
            "step 1 reads beyond a loan",
        ),
        (
            counted(lambda b: b.copy(Operand(b.loan(1, 0, CountRange(0, 1)), 0, True), 0, 0, CountRange(0, 2))),
            "step 1 reads beyond a loan",
        ),
        (
            counted(lambda b: b.copy(Operand(b.loan(1, 0, CountRange(0, 1)), 0, True), 0, 0, 4)),
            "step 1 reads beyond a loan",
        ),
        (
            counted(lambda b: b.reduce([Operand(0)], 0, 4, CountRange(0, 1), dtype=Dtype.F32, op=ReduceOp.SUM)),
            "step 0 writes over part of an operand",
        ),
        (
            counted(
                lambda b: b.reduce(
                    [Operand(0, CountRange(0, 0), is_partial=True)],
                    1,
                    0,
                    CountRange(0, 1),
                    dtype=Dtype.F16,
                    op=ReduceOp.SUM,
                )
            ),
            "step 0 reads partial sums of a counted size",
        ),
        (
            counted(
                lambda b: b.reduce(
                    [Operand(0)], 1, 0, CountRange(0, 1), dtype=Dtype.F32, op=ReduceOp.SUM, gives_partial=True
                )
            ),
            "step 0 makes partial sums of a counted size",
        ),
        (
            counted(lambda b: b.send(1, 0, Operand(0), CountRange(0, 1)), unit_bytes=0),
            "it takes 2 counts of elements of 0 bytes",
        ),
    ],
)
def test_rules_of_counted_steps(plan: Plan, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        _core.Plan(encode(plan))


def test_a_range_of_counts_that_ends_before_it_begins_is_refused() -> None:
    data = bytearray(encode(counted(lambda b: b.recv(1, 0, 0, 0, CountRange(0, 1)))))
    at = 64 + 40  # size_bytes of the only step
    data[at : at + 8] = (1 << 63 | 1 << 32 | 2).to_bytes(8, "little")
    with pytest.raises(ArgumentError, match=re.escape("step 0 names counts[2:1] of 2 counts")):
        _core.Plan(bytes(data))
