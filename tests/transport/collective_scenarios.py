# SPDX-License-Identifier: Apache-2.0
"""Collectives and failures of a group, each a function of its communicator and a seed: one rank's part.

Every rank makes all ranks' inputs from the seed, so it can check its own results against the definition.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sennit.transport import algorithms, errors
from sennit.transport.algorithms import allreduce, recv
from sennit.transport.choice.selection import Selection
from sennit.transport.communicator import Communicator
from sennit.transport.config import Algorithm
from sennit.transport.oracle.roce import REFUSALS
from sennit.transport.plans.arithmetic import fold
from sennit.transport.plans.elements import COMPLEXES, FLOATS, Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.plan import Plan
from sennit.transport.plans.plan_codec import encode
from sennit.transport.plans.tree import given_spans, leaves_of

Array = npt.NDArray[Any]
SCALAR = 0.75
# Around the limits between eager and bulk messages, and between one and several chunks, with odd sizes.
ELEMENTS = (0, 1, 5, 1_023, 40_001, 300_007)


class Case:
    def __init__(self, group: Communicator, seed: int) -> None:
        self.group = group
        self.rank = group.rank
        self.world = group.world
        self.rng = np.random.default_rng(seed)

    def arrays(self, shapes: list[tuple[int, ...]], dtype: Any) -> list[Array]:
        """Returns one random array for each rank, the same in all processes."""
        dtype = np.dtype(dtype)
        if dtype.kind in "fc":
            return [self.rng.standard_normal(shape).astype(dtype) for shape in shapes]
        if dtype.kind == "b":
            return [self.rng.integers(0, 2, shape).astype(bool) for shape in shapes]
        info = np.iinfo(dtype)
        return [self.rng.integers(info.min, info.max, shape, dtype, endpoint=True) for shape in shapes]


def check_fold(result: Array, arrays: list[Array], dtype: Dtype, op: ReduceOp) -> None:
    expected = fold([a.reshape(-1).view(np.uint8) for a in arrays], dtype, op, scalar=SCALAR)
    np.testing.assert_array_equal(result.reshape(-1).view(np.uint8), expected)


def reductions(group: Communicator, seed: int) -> None:
    case = Case(group, seed)
    for elements in ELEMENTS:
        arrays = case.arrays([(elements,)] * case.world, np.float32)
        check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)
        again = group.allreduce(arrays[case.rank])
        check_fold(again, arrays, Dtype.F32, ReduceOp.SUM)
        for root in {0, case.world - 1}:
            result = group.reduce(arrays[case.rank], root)
            if result is not None:
                check_fold(result, arrays, Dtype.F32, ReduceOp.SUM)
            assert (result is None) == (case.rank != root)
        counts = case.rng.multinomial(elements, np.ones(case.world) / case.world).tolist()
        low = sum(counts[: case.rank])
        share = slice(low, low + counts[case.rank])
        result = group.reduce_scatter(arrays[case.rank], ReduceOp.MAX, counts=counts)
        check_fold(result, [a[share] for a in arrays], Dtype.F32, ReduceOp.MAX)


def arithmetic(group: Communicator, seed: int) -> None:
    """Runs every dtype and operation as plans, which includes types that NumPy lacks."""
    case = Case(group, seed)
    in_memory = {"self", "shm"}.issuperset(group.routes)
    for dtype in Dtype:
        for op in sorted(reduce_ops(dtype)):
            for elements in (3, 37, 20_011):
                arrays = random_bits(case.rng, case.world, elements, dtype)
                expected = fold(arrays, dtype, op, scalar=SCALAR)
                call: dict[str, Any] = {"world": case.world, "rank": case.rank, "elements": elements}
                for algorithm in (allreduce, algorithms.allreduce_round_trip)[: 1 + in_memory]:
                    mine = run_plan(group, algorithm(**call, dtype=dtype, op=op), arrays[case.rank].copy())
                    np.testing.assert_array_equal(mine, expected, err_msg=f"{dtype.name} {op.name} {elements}")


def random_bits(rng: np.random.Generator, count: int, elements: int, dtype: Dtype) -> list[Array]:
    rows = [rng.integers(0, 256, elements * dtype.item_bytes, np.uint8) for _ in range(count)]
    return [finite(row, dtype) for row in rows] if dtype in FLOATS | COMPLEXES else rows


def finite(data: Array, dtype: Dtype) -> Array:
    """Clears the top exponent bits of random bits: any magnitude, no NaN, no infinity in sums."""
    part_bytes = dtype.item_bytes // (2 if dtype in (Dtype.C32, Dtype.C64, Dtype.C128) else 1)
    parts = data.view(f"u{part_bytes}")
    bits = 8 * part_bytes
    cleared: Array = parts & ~np.array(1 << (bits - 2), parts.dtype)
    return cleared.view(np.uint8)


def run_plan(group: Communicator, plan: Plan, *buffers: Array) -> Array:
    """Returns the last buffer, where results are."""
    group.post(encode(plan), lambda: plan, buffers, scalar=SCALAR).wait()
    return buffers[-1]


def leaves(group: Communicator, seed: int) -> None:
    """Eight leaves that are the same in a world of any size: so is the expected sum, which knows no world."""
    case = Case(group, 7)
    span = leaves_of(case.rank, case.world, 8)
    turns = itertools.cycle(Selection(hosts=group.selection.hosts, forced=algorithm) for algorithm in Algorithm)
    for dtype in Dtype:
        for op in sorted(reduce_ops(dtype)):
            for elements in (0, 3, 20_011):
                rows = random_bits(case.rng, 8, elements, dtype)
                plan = next(turns).allreduce(
                    world=case.world, rank=case.rank, leaves=8, elements=elements, dtype=dtype, op=op
                )
                result = run_plan(group, plan, np.concatenate(rows[slice(*span)]), np.zeros_like(rows[0]))
                expected = fold(rows, dtype, op, scalar=SCALAR)
                np.testing.assert_array_equal(result, expected, err_msg=f"{dtype.name} {op.name} {elements}")
    given = case.rng.standard_normal((8, 3, 5)).astype(np.float32)
    result = group.allreduce(given[slice(*span)], ReduceOp.AVG, leaves=8)
    assert result.shape == (3, 5)
    check_fold(result, list(given), Dtype.F32, ReduceOp.AVG)
    rows = [row.reshape(-1).view(np.uint8) for row in given]
    nodes = [rows[slice(*node)] for node in given_spans(case.rank, case.world, 8, partial=True)]
    sums = np.stack([fold(node, Dtype.F32, ReduceOp.SUM).view(np.float32) for node in nodes])
    np.testing.assert_array_equal(group.allreduce(sums, ReduceOp.AVG, leaves=8, partial=True), result.reshape(-1))
    with pytest.raises(errors.ArgumentError, match=f"9 leaves of a tree of 8 leaves; allowed: {len(range(*span))}, of"):
        group.allreduce(np.zeros((9, 2)), leaves=8)


def trees(group: Communicator, seed: int) -> None:
    """Algorithms that calls select in larger groups only, over the core."""
    case = Case(group, seed)
    common: dict[str, Any] = {"world": case.world, "rank": case.rank}
    for dtype, elements in itertools.product((Dtype.F32, Dtype.BF16, Dtype.C32), (0, 3, 1_001, 300_007)):
        arrays = random_bits(case.rng, case.world, elements, dtype)
        mine = arrays[case.rank]
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            expected = fold(arrays, dtype, op, scalar=SCALAR)
            summed: dict[str, Any] = {**common, "elements": elements, "dtype": dtype, "op": op}
            for algorithm in (algorithms.allreduce_halving, algorithms.allreduce_dissemination):
                np.testing.assert_array_equal(run_plan(group, algorithm(**summed), mine.copy()), expected)
            result = run_plan(group, algorithms.reduce_tree(root=case.world - 1, **summed), mine.copy())
            np.testing.assert_array_equal(result, expected if case.rank == case.world - 1 else mine)
            counts = [elements // case.world] * (case.world - 1)
            counts.append(elements - sum(counts))
            low = sum(counts[: case.rank]) * dtype.item_bytes
            plan = algorithms.reduce_scatter_halving(counts=counts, dtype=dtype, op=op, **common)
            result = run_plan(group, plan, mine.copy(), np.zeros(counts[case.rank] * dtype.item_bytes, np.uint8))
            np.testing.assert_array_equal(result, expected[low : low + result.size])
        parts = [array[: array.size // (peer + 1)].copy() for peer, array in enumerate(arrays)]
        plan = algorithms.gather_tree(counts=[part.size for part in parts], item_bytes=1, root=0, **common)
        if case.rank == 0:
            gathered = run_plan(group, plan, parts[0], np.zeros(sum(part.size for part in parts), np.uint8))
            np.testing.assert_array_equal(gathered, np.concatenate(parts))
        else:
            run_plan(group, plan, parts[case.rank])


def movement(group: Communicator, seed: int) -> None:
    case = Case(group, seed)
    world, rank = case.world, case.rank
    for elements in ELEMENTS:
        arrays = case.arrays([(elements, 2)] * world, np.int16)
        for root in range(world):
            np.testing.assert_array_equal(group.broadcast(arrays[rank], root), arrays[root])
        np.testing.assert_array_equal(group.allgather(arrays[rank]), np.concatenate(arrays))
        gathered = group.gather(arrays[rank], world - 1)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, np.stack(arrays))
        stacked = np.stack(arrays)
        np.testing.assert_array_equal(group.scatter(stacked if rank == 0 else arrays[rank], 0), arrays[rank])
        counts = case.rng.integers(0, elements + 1, (world, world)) * case.rng.integers(0, 2, (world, world))
        rows = case.arrays([(int(n.sum()), 3) for n in counts], np.float64)
        bounds = np.concatenate([np.zeros((world, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
        expected = np.concatenate([rows[i][bounds[i, rank] : bounds[i, rank + 1]] for i in range(world)])
        result = group.alltoall(rows[rank], send_counts=counts[rank].tolist(), recv_counts=counts[:, rank].tolist())
        np.testing.assert_array_equal(result, expected)
        squares = case.arrays([(world * elements, 2)] * world, np.int16)
        expected = np.concatenate([square[rank * elements : (rank + 1) * elements] for square in squares])
        np.testing.assert_array_equal(group.alltoall(squares[rank]), expected)
        uneven = case.arrays([(elements // (r + 1),) for r in range(world)], np.uint8)
        result = group.allgather(uneven[rank], counts=[len(u) for u in uneven])
        np.testing.assert_array_equal(result, np.concatenate(uneven))
        group.barrier()
    times = np.arange(7 * world).astype("datetime64[s]")
    np.testing.assert_array_equal(group.alltoall(times), np.tile(times.reshape(world, 7)[rank], world))


def point_to_point(group: Communicator, seed: int) -> None:
    case = Case(group, seed)
    world, rank = case.world, case.rank
    for elements in ELEMENTS:
        arrays = case.arrays([(elements,)] * world, np.int32)
        if world == 1:
            continue
        # A ring, where the even ranks send first. Then all send to rank 0, which receives from any rank.
        after, before = (rank + 1) % world, (rank - 1) % world
        output = np.empty_like(arrays[0])
        if rank % 2 == 0 and not (world % 2 and rank == world - 1):
            group.send(arrays[rank], after, tag=elements)
            assert group.recv(output, before, tag=elements) == before
        else:
            assert group.recv(output, before, tag=elements) == before
            group.send(arrays[rank], after, tag=elements)
        np.testing.assert_array_equal(output, arrays[before])
        if rank:
            group.send(arrays[rank], 0, tag=7)
        else:
            sources = set()
            for _ in range(1, world):
                source = group.recv(output, tag=7)
                np.testing.assert_array_equal(output, arrays[source])
                sources.add(source)
            assert sources == set(range(1, world))
        group.barrier()


def overlapping(group: Communicator, seed: int) -> None:
    """Several operations in flight are waited for in another order."""
    case = Case(group, seed)
    sizes = [1, 70_000, 300, 250_000, 0, 9_000]
    given = [case.arrays([(n,)] * case.world, np.float32) for n in sizes]
    buffers = [arrays[case.rank].copy() for arrays in given]
    operations = []
    before = group.sequence
    for n, buffer in zip(sizes, buffers, strict=True):

        def compile_plan(n: int = n) -> Any:
            return allreduce(world=case.world, rank=case.rank, elements=n, dtype=Dtype.F32, op=ReduceOp.SUM)

        operations.append(group.post(n, compile_plan, [buffer], background=True))
    for operation in reversed(operations):
        operation.wait()
        assert operation.done()
    for arrays, buffer in zip(given, buffers, strict=True):
        check_fold(buffer, arrays, Dtype.F32, ReduceOp.SUM)
    assert group.sequence == before + len(sizes)


def mismatch(group: Communicator, seed: int) -> None:
    """Both ranks of a pair that disagrees raise an error that says what differs."""
    array = np.zeros(5 if group.rank else 4, np.float32)
    with pytest.raises((errors.MismatchError, errors.PeerError), match="allreduce"):
        group.allreduce(array)


def late(group: Communicator, seed: int) -> None:
    """A rank comes too late. The error at the deadline names it."""
    store = group.joined.store
    assert store is not None
    if group.rank == 0:
        # This rank lives, but posts nothing until the others have given up.
        store.wait([f"late/{rank}" for rank in range(1, group.world)], timedelta(seconds=60))
        return
    # With three ranks, another rank's deadline may pass first, even before this rank posts, and that rank tells it.
    with pytest.raises((errors.TimeoutError, errors.PeerError), match=r"ranks? 0\b") as caught:
        group.post(
            "late",
            lambda: allreduce(world=group.world, rank=group.rank, elements=1, dtype=Dtype.F32, op=ReduceOp.SUM),
            [np.zeros(1, np.float32)],
            timeout_s=0.3,
        ).wait()
    store.set(f"late/{group.rank}", "")
    assert group.world > 2 or caught.type is errors.TimeoutError


def killed(group: Communicator, seed: int) -> None:
    """The last rank dies without a word. The others raise an error that names it, and do not hang."""
    if group.rank == group.world - 1:
        group.barrier()
        os._exit(0)

    def until_it_fails() -> None:
        # A quick rank may notice the death and tell a slower one that is still in the barrier.
        group.barrier()
        group.allreduce(np.zeros(100_000, np.float32))

    with pytest.raises((errors.PeerError, errors.TimeoutError), match=f"rank {group.world - 1}"):
        until_it_fails()


def forked(group: Communicator, seed: int) -> None:
    """A forked child gets an error that the group is not its own, and ends normally. The parent's group still works."""
    pending = np.zeros(40_000, np.float32)

    def compile_plan() -> Any:
        return allreduce(world=group.world, rank=group.rank, elements=pending.size, dtype=Dtype.F32, op=ReduceOp.SUM)

    # This operation is in flight at the fork, and the engine's thread works on it, because rank 0 posts later.
    operation = None if group.rank == 0 else group.post("pending", compile_plan, [pending], background=True)
    child = os.fork()
    if child == 0:
        uses: list[Callable[[], object]] = [
            lambda: group.allreduce(np.zeros(4, np.float32)),
            group.counters,
            group.describe,
            lambda: group.failure,
            lambda: group.register(pending),
        ]
        if operation is not None:
            uses.append(operation.wait)
        for use in uses:
            with pytest.raises(errors.ArgumentError, match="forked"):
                use()
        del operation, use, uses
        # In the child, everything that ends a group does nothing, also `with` and the destructors at exit.
        group.abort("the child")
        group.shutdown()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    if operation is None:
        operation = group.post("pending", compile_plan, [pending], background=True)
    operation.wait()
    group.barrier()


def dropped(group: Communicator, seed: int) -> None:
    """An operation that nobody waits for continues. It keeps its buffers until it is done, and then frees them."""
    elements = 300_007
    for background in (False, True):
        buffer = np.full(elements, group.rank, np.float32)
        alive = weakref.ref(buffer)
        operation = group.post(
            "dropped",
            lambda: allreduce(world=group.world, rank=group.rank, elements=elements, dtype=Dtype.F32, op=ReduceOp.SUM),
            [buffer],
            background=background,
        )
        if group.rank == 0:
            # The others wait for the operation, though this rank neither waits for it nor keeps anything.
            del operation, buffer
        else:
            operation.wait()
            assert buffer[0] == sum(range(group.world))
            del operation, buffer
        group.barrier()
        # A thread of its own lets the buffer go, and Python frees it between two instructions of this one.
        deadline_s = time.monotonic() + 20
        while alive() is not None and time.monotonic() < deadline_s:
            os.sched_yield()
        assert alive() is None


def abandoned(group: Communicator, seed: int) -> None:
    """A dropped operation that cannot finish takes no time, and neither does the end of its group."""
    if group.rank == 0:
        for background in (False, True):
            buffer = np.zeros(40_000, np.float32)
            operation = group.post(
                "abandoned",
                lambda: recv(world=group.world, rank=0, peer=1, item_bytes=4),
                [buffer],
                counts=[40_000],
                timeout_s=3_600.0,
                background=background,
                tag=9,
            )
            del operation, buffer
    group.barrier()


def interrupted(group: Communicator, seed: int) -> None:
    """Ctrl-C ends a wait and a timed run. The operation and the group go on."""
    elements = 40_000

    def compile_plan() -> Any:
        return allreduce(world=group.world, rank=group.rank, elements=elements, dtype=Dtype.F32, op=ReduceOp.SUM)

    def interrupt_soon() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    for use in (
        lambda: group.post("plan", compile_plan, [np.zeros(elements, np.float32)]).wait(),
        lambda: group.time_plan("plan", compile_plan, [np.zeros(elements, np.float32)], 1),
    ):
        if group.rank == 0:
            interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                use()
            # Only now the others can finish.
            group.send(np.zeros(1), 1, tag=3)
        else:
            if group.rank == 1:
                group.recv(np.zeros(1), 0, tag=3)
            use()
        group.barrier()


def own_udp_ports() -> list[str]:
    """Returns ADDRESS/PORT of every bound UDP socket of this process, from /proc."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = []
    for table, loopback in (("udp", "127.0.0.1"), ("udp6", "::1")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                found.append(f"{loopback}/{int(fields[1].rsplit(':', 1)[1], 16)}")
    return found


def flooded(group: Communicator, seed: int) -> None:
    """A stranger floods this rank's ports. Results stay the same, and the rank counts the junk by its kind."""
    case = Case(group, seed)
    arrays = case.arrays([(300_007,)] * case.world, np.float32)
    check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)
    before = group.counters()
    assert not any(before[name] for name in REFUSALS), before
    ports = own_udp_ports()
    assert ports
    command = [sys.executable, str(Path(__file__).with_name("flooder.py")), f"{seed + group.rank}", *ports]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flooder:
        assert flooder.stdin is not None
        refused = rounds = 0
        # Runs until the flood has lasted for some rounds on every rank.
        while group.allreduce(np.array([refused < 50_000 or rounds < 20], np.int32))[0]:
            check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)
            refused = sum(group.counters()[name] for name in REFUSALS)
            rounds += 1
        flooder.stdin.close()
        assert flooder.stdout is not None
        count, seconds = flooder.stdout.read().split()
    sent = int(count)
    group.barrier()
    after = group.counters()
    seen = {name: after[name] for name in REFUSALS if after[name]}
    # For people: the test's folder keeps this line.
    print(f"{sent} packets, {sent / float(seconds):.0f} a second; counted: {seen}", file=sys.stderr)
    assert refused <= sum(seen.values()) <= sent, (seen, sent)
    assert after["bad_control"] == 0, after
    # Random bytes have no known opcode. Well-formed junk names no queue pair of this rank.
    assert {"bad_opcode", "unknown_qpn"} <= seen.keys(), seen
    check_fold(group.allreduce(arrays[case.rank]), arrays, Dtype.F32, ReduceOp.SUM)


def described(group: Communicator, seed: int) -> None:
    """The transport reports what the settings ask for."""
    asked = group.config
    text = group.describe()
    assert f"{asked.paths} paths a rail ({asked.path_policy})" in text, text
    assert f"window {asked.window_bytes} bytes ({asked.congestion})" in text, text
    full_packets = asked.window_bytes // 4096
    window_packets = group.counters()["window_packets"]
    if asked.congestion == "fixed":
        # Loopback's packets have full size. The peer's socket buffer may allow fewer of them.
        assert 8 <= window_packets <= full_packets, (window_packets, full_packets)
    else:
        assert 2 <= window_packets <= full_packets, (window_packets, full_packets)
