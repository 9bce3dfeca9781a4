# SPDX-License-Identifier: Apache-2.0
"""Scenarios of symmetric memory: one rank's part in each."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sennit.transport import _core, algorithms
from sennit.transport.choice.selection import Selection
from sennit.transport.communicator import Communicator
from sennit.transport.config import Algorithm
from sennit.transport.errors import ArgumentError, MismatchError, PeerError, SennitError
from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.plan import Plan
from sennit.transport.symmetric import symmetric_empty
from tests.transport.processes import Rank

Array = npt.NDArray[Any]
# Around the limits of eager messages, of placements, of loans and of copies that bypass the cache; odd ones, too.
SIZES = (1, 3, 64, 1_000, 8_192, 8_196, 100_004, 262_144, 1_000_001, 3 << 20)
DIRECT = ("shm_references_sent", "shm_placements_sent")


def ordinary(size_bytes: int, rng: np.random.Generator) -> Array:
    return np.empty(size_bytes, np.uint8)


def symmetric(size_bytes: int, rng: np.random.Generator) -> Array:
    return symmetric_empty(size_bytes, np.uint8)


def somewhere(size_bytes: int, rng: np.random.Generator) -> Array:
    """Ordinary, symmetric, or a slice of a larger symmetric array, at any byte."""
    way = rng.integers(3)
    if way == 2:
        at = int(rng.integers(1, 5_000))
        return symmetric_empty(size_bytes + 5_000, np.uint8)[at : at + size_bytes]
    return (ordinary, symmetric)[way](size_bytes, rng)


PLACES: dict[str, Callable[[int, np.random.Generator], Array]] = {
    place.__name__: place for place in (ordinary, symmetric, somewhere)
}


class _Moved:
    """An operation over copies of the caller's buffers."""

    def __init__(self, operation: Any, given: Sequence[Array], used: Sequence[Array]) -> None:
        self._operation, self._given, self._used = operation, given, used

    def wait(self, timeout_s: float = 0.0) -> None:
        self._operation.wait()
        for given, used in zip(self._given, self._used, strict=True):
            given[...] = used

    @property
    def source(self) -> int:
        return int(self._operation.source)


class Placed(Communicator):
    """A communicator whose operations use memory of one kind, whatever they are given."""

    place: Callable[[int, np.random.Generator], Array] = staticmethod(ordinary)
    rng = np.random.default_rng(0)

    def post(
        self, key: Hashable, compile_plan: Callable[[], Plan], buffers: Sequence[Any], **options: Any
    ) -> Any:  # fmt: skip
        used = [self.place(buffer.size, self.rng) for buffer in buffers]
        for given, copy in zip(buffers, used, strict=True):
            copy[...] = given
        return _Moved(super().post(key, compile_plan, used, **options), buffers, used)


def calls(group: Communicator, size_bytes: int) -> Iterator[tuple[str, Array | None]]:
    """Every collective of the NumPy interface, with the same inputs in each call of this function."""
    rng = np.random.default_rng(size_bytes)
    rank, world = group.rank, group.world
    dtype = np.dtype(np.float32 if size_bytes % 4 == 0 else np.uint8)
    count = size_bytes // dtype.itemsize
    all_ranks = [
        rng.standard_normal(count, np.float32)
        if dtype.kind == "f"
        else rng.integers(0, 256, count, np.uint8)
        for _ in range(world)
    ]  # fmt: skip
    mine = all_ranks[rank]
    before = mine.tobytes()
    yield "allreduce", group.allreduce(mine)
    yield "allreduce max", group.allreduce(mine, ReduceOp.MAX)
    yield "in place", all_in_place(group, mine.copy())
    if dtype.kind == "f":
        yield "leaves", group.allreduce(np.stack([mine[: count // 4], mine[-(count // 4) :]]), leaves=2 * world)
    for root in {0, world - 1}:
        yield f"reduce {root}", group.reduce(mine, root)
        yield f"broadcast {root}", group.broadcast(mine, root)
        yield f"gather {root}", group.gather(mine, root)
        rows = np.stack(all_ranks) if rank == root else mine
        yield f"scatter {root}", group.scatter(rows, root)
    counts = rng.multinomial(count, np.ones(world) / world).tolist()
    yield "reduce_scatter", group.reduce_scatter(mine, counts=counts)
    square = mine[: count // world * world]
    yield "reduce_scatter even", group.reduce_scatter(square)
    yield "alltoall", group.alltoall(square)
    uneven = [len(each) // (peer + 1) for peer, each in enumerate(all_ranks)]
    yield "allgather", group.allgather(mine)
    yield "allgather uneven", group.allgather(mine[: uneven[rank]], counts=uneven)
    table = rng.integers(0, max(count // world, 1) + 1, (world, world))
    row, column = table[rank].tolist(), table[:, rank].tolist()
    sent = rng.integers(0, 256, (world, int(table.sum(axis=1).max())), np.uint8)[rank, : sum(row)]
    yield "alltoall uneven", group.alltoall(sent, send_counts=row, recv_counts=column)
    if world > 1:
        after, behind, got = (rank + 1) % world, (rank - 1) % world, np.empty_like(mine)
        if rank == 0:
            group.send(mine, after)
        assert group.recv(got, behind) == behind
        if rank:
            group.send(mine, after)
        yield "recv", got
    group.barrier()
    assert mine.tobytes() == before, "an input changed"


def all_in_place(group: Communicator, array: Array, algorithm: Algorithm | None = None) -> Array:
    """The sum of all ranks' arrays, as torch asks for it."""
    selection = Selection(hosts=group.selection.hosts, forced=algorithm)
    dtype = {"f": Dtype.F32, "u": Dtype.U8}[array.dtype.kind]

    def compile_plan() -> Plan:
        return selection.allreduce(
            world=group.world, rank=group.rank, elements=array.size, dtype=dtype, op=ReduceOp.SUM
        )  # fmt: skip

    group.post(("in place", array.size, dtype, algorithm), compile_plan, [array.view(np.uint8)]).wait()
    return array


def direct_messages(group: Communicator) -> list[int]:
    counters = group.counters()
    return [counters.get(name, 0) for name in DIRECT]


def collectives(me: Rank) -> None:
    """Each kind of memory gives the bits of ordinary memory."""
    sent: dict[str, list[int]] = {}
    with me.make(Placed) as group:
        for place in PLACES:
            group.place, group.rng = PLACES[place], np.random.default_rng(me.rank)
            before = direct_messages(group)
            for size_bytes in SIZES:
                for name, result in calls(group, size_bytes):
                    key = f"{size_bytes} {name}"
                    bits = None if result is None else result.tobytes()
                    assert EXPECTED.setdefault(key, bits) == bits, (place, key)
            sent[place] = [now - then for now, then in zip(direct_messages(group), before, strict=True)]
    me.report(sent=sent)


EXPECTED: dict[str, bytes | None] = {}


def numbers(rng: np.random.Generator, world: int, count: int) -> list[Array]:
    return [rng.standard_normal(count, np.float32) for _ in range(world)]


def check_sum(given: Sequence[Array], result: Array) -> None:
    expected = fold([each.view(np.uint8) for each in given], Dtype.F32, ReduceOp.SUM)
    np.testing.assert_array_equal(result.view(np.uint8), expected)


def churn(me: Rank) -> None:
    """Arrays are freed and made again between calls, with other sizes, while others stay. All ranks differ in that."""
    shared, own = np.random.default_rng(1), np.random.default_rng(100 + me.rank)
    kept: list[tuple[Array, bytes]] = []
    places = set()
    with me.make() as group:
        for _ in range(60):
            count = int(shared.integers(1, 1 << int(shared.integers(3, 20))))
            given = numbers(shared, me.world, count)
            array = symmetric_empty(count)
            places.add(array.ctypes.data)
            array[:] = given[me.rank]
            all_in_place(group, array)
            check_sum(given, array)
            if own.integers(2):
                kept.append((array, array.tobytes()))
            if len(kept) > 5:
                kept.pop(int(own.integers(len(kept))))
            del array
        # What stayed was not touched by later calls, which used the memory of what was freed.
        assert all(array.tobytes() == bits for array, bits in kept)
        assert 1 < len(places) < 60
        me.report(sent=direct_messages(group))


def views(me: Rank) -> None:
    """Input and output in one array, next to each other, at any byte; strided views are copied by the interface."""
    rng = np.random.default_rng(2)
    with me.make() as group:
        memory = symmetric_empty(8 << 20, np.uint8)
        for at in (0, 1, 4, 64, 4_095):
            for count in (3, 5_000, 200_003):
                given = numbers(rng, me.world, count)
                parts = memory[at : at + 8 * count]
                source, target = parts[: 4 * count], parts[4 * count :]
                source[:] = given[me.rank].view(np.uint8)
                plan = algorithms.allreduce(
                    world=me.world, rank=me.rank, elements=count, dtype=Dtype.F32, op=ReduceOp.SUM, in_place=False
                )
                edge = memory[at + 8 * count]
                group.post(("apart", count), lambda plan=plan: plan, [source, target]).wait()
                expected = fold([each.view(np.uint8) for each in given], Dtype.F32, ReduceOp.SUM)
                np.testing.assert_array_equal(target, expected)
                np.testing.assert_array_equal(source, given[me.rank].view(np.uint8))
                trip = algorithms.allreduce_round_trip(
                    world=me.world, rank=me.rank, elements=count, dtype=Dtype.F32, op=ReduceOp.SUM
                )
                group.post(("trip", count), lambda trip=trip: trip, [source]).wait()
                np.testing.assert_array_equal(parts.reshape(2, -1), [expected, expected])
                assert memory[at + 8 * count] == edge
        # The upper half is written by this rank, the lower one by the others, in one array.
        halves = symmetric_empty((2, me.world, 30_000), np.int64)
        halves[0] = np.arange(me.world)[:, None] * 10 + me.rank
        plan = algorithms.alltoall(world=me.world, rank=me.rank, item_bytes=8)
        flat = [half.reshape(-1).view(np.uint8) for half in halves]
        group.post("halves", lambda: plan, flat, counts=[30_000] * (2 * me.world)).wait()
        assert (halves[1] == me.rank * 10 + np.arange(me.world)[:, None]).all()
        assert (halves[0] == np.arange(me.world)[:, None] * 10 + me.rank).all()
        strided = symmetric_empty((70_000, 2))
        strided[:] = me.rank
        np.testing.assert_array_equal(group.allreduce(strided[:, 1]), np.full(70_000, sum(range(me.world))))
        for dtype in ("M8[s]", "S5", [("id", "i8"), ("weight", "f4")]):
            rows = symmetric_empty((me.world, 5_000), dtype)
            rows.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, rows.nbytes, np.uint8)
            gathered = group.allgather(rows[me.rank])
            assert gathered.tobytes() == rows.tobytes()
        me.report(sent=direct_messages(group))


def two_groups(me: Rank) -> None:
    """Two groups of one process use the same arrays in turn, and ranks have other numbers in the second. It ends first,
    and comes again."""
    rng = np.random.default_rng(3)
    array = symmetric_empty(300_000)
    with me.make(name="one") as one:
        for turn in range(3):
            with me.make(name=f"two-{turn}", rank=me.world - 1 - me.rank) as two:
                for group in (one, two, one, two):
                    given = numbers(rng, me.world, array.size)
                    array[:] = given[group.rank]
                    all_in_place(group, array)
                    check_sum(given, array)
                # At the same time, on parts of one array.
                given = numbers(rng, me.world, array.size)
                low, high = np.split(array, [100_001])
                expected = np.concatenate([given[me.rank][:100_001], given[two.rank][100_001:]])
                array[:] = expected
                other = threading.Thread(target=all_in_place, args=(two, high))
                other.start()
                all_in_place(one, low)
                other.join()
                check_sum([each[:100_001] for each in given], low)
                check_sum([each[100_001:] for each in given], high)
        array[:] = me.rank
        all_in_place(one, array)
        assert (array == sum(range(me.world))).all()
        me.report(sent=direct_messages(one))


def disagree(me: Rank, *, elements: int, is_symmetric: bool) -> None:
    """Rank 0 makes round trips, the others run the direct algorithm. All find out, and both are named."""
    array = symmetric_empty(max(elements, 1))[:elements] if is_symmetric else np.zeros(elements, "f4")
    array[:] = 1
    algorithm = Algorithm.ROUND_TRIP if me.rank == 0 else Algorithm.DIRECT
    with me.make() as group:
        with pytest.raises((MismatchError, PeerError)) as caught:
            all_in_place(group, array, algorithm)
        me.report(text=str(caught.value))


def strangers(me: Rank) -> None:
    """Round trips are for shared memory. A plan with them is refused before anything is sent."""
    array = symmetric_empty(1_000)
    array[:] = 1
    with me.make() as group:
        plan = algorithms.allreduce_round_trip(
            world=me.world, rank=me.rank, elements=array.size, dtype=Dtype.F32, op=ReduceOp.SUM
        )
        with pytest.raises(ArgumentError) as caught:
            group.post("trip", lambda: plan, [array.view(np.uint8)])
        all_in_place(group, array, Algorithm.ROUND_TRIP)
        assert (array == me.world).all()
    me.report(text=str(caught.value))


def segments() -> list[str]:
    """The files of shared memory that this process maps."""
    return sorted(set(re.findall(r"/dev/shm/sennit-\w+", Path("/proc/self/maps").read_text())))


def forever(group: Communicator, array: Array) -> None:
    while True:
        # The sum of equal numbers is the number times the world, so no element overflows for long.
        array[:] = 1
        all_in_place(group, array)


def aborts(me: Rank, *, turns: int) -> None:
    """Again and again a rank ends its group at any moment, and writes to its array at once. A call of another rank that
    ends well has the right sum, and what a rank wrote after its error stays."""
    array = symmetric_empty(1_000_000)
    ended = 0

    def call(group: Communicator) -> None:
        nonlocal ended
        array[:] = 1
        all_in_place(group, array)
        assert (array == me.world).all(), np.unique(array)
        ended += 1

    for turn in range(turns):
        with me.make(name=f"turn-{turn}") as group:
            if turn == 0:  # On a slow machine it may be the only call that ends.
                call(group)
                me.say(f"called-{me.rank}")
                me.wait_for(*[f"called-{rank}" for rank in range(me.world)])
            if turn % me.world == me.rank:
                threading.Timer(0.002 * (turn % 11), group.abort, ["for the test"]).start()
            try:
                group.barrier()
                while True:
                    call(group)
            except SennitError as error:
                array[:] = 1e9
                text = str(error)
            assert "for the test" in text, text
            me.say(f"ended-{turn}-{me.rank}")
            me.wait_for(*[f"ended-{turn}-{rank}" for rank in range(me.world)])
            assert (array == 1e9).all()
    me.report(ended=ended)


def failure_of(group: Communicator, array: Array) -> dict[str, Any]:
    try:
        forever(group, array)
    except SennitError as error:
        return {"error": type(error).__name__, "text": str(error), "lost": list(group.lost_ranks)}
    raise AssertionError("the calls did not fail")


def killed(me: Rank, *, victim: int, after_s: float, has_packets: bool) -> None:
    """The victim is killed in a stream of large calls. The survivors' arrays stay valid, and so does a new group."""
    array = symmetric_empty(4_000_000)
    group = me.make()
    all_in_place(group, array)
    me.report(segments=segments())
    me.say(f"ready-{me.rank}")
    me.wait_for(*[f"ready-{rank}" for rank in range(me.world)])
    if me.rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        forever(group, array)
    failure = failure_of(group, array)
    # In a host each element is what was lent, or the result. Where packets were expected, there may be other bytes.
    if not has_packets:
        assert set(np.unique(array)) <= set(range(1, me.world + 1)), np.unique(array)[:10]
    array[:] = 5
    successor = group.reconfigure()
    given = numbers(np.random.default_rng(4), successor.world, 200_000)
    array[:200_000] = given[successor.rank]
    all_in_place(successor, array[:200_000])
    check_sum(given, array[:200_000])
    assert (array[200_000:] == 5).all()
    again = symmetric_empty(300_000)
    again[:] = successor.rank
    all_in_place(successor, again)
    assert (again == sum(range(successor.world))).all()
    successor.shutdown()
    me.report(segments=segments(), world=successor.world, **failure)


def stopped(me: Rank, *, victim: int, timeout_s: float) -> None:
    """The test stops the victim in a stream of calls. What survivors write after their error stays, also when the
    victim goes on."""
    array = symmetric_empty(4_000_000)
    group = me.make()
    for _ in range(3):
        all_in_place(group, array)
    me.say(f"ready-{me.rank}")
    me.wait_for(*[f"ready-{rank}" for rank in range(me.world)])
    if me.rank == victim:
        me.say("stop me")
        failure = failure_of(group, array)
        array[:] = 9
        me.say("victim ended")
        me.report(**failure)
        return
    group._core.set_timeout(timeout_s)
    failure = failure_of(group, array)
    began_s = time.monotonic()
    group.shutdown()
    array[:] = 7
    me.say(f"done-{me.rank}")
    me.wait_for("victim ended")
    assert (array == 7).all()
    me.report(is_detached=_core.symmetric_alloc(1) == 0, shutdown_s=time.monotonic() - began_s, **failure)
