# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="union-attr,func-returns-value"
"""Mistakes, dead ranks, deadlines: each gives an error that names what is wrong, and nothing hangs."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sennit.runtime.backend.torch_versions import premul_sum
from tests.extent import briefly
from tests.runtime.world import WorldFactory, raised

TRANSPORTS = ("shm", "udp")

pytestmark = pytest.mark.timeout(120)


def group() -> Any:
    return dist.group.WORLD


def bad_arguments(rank: int, world: int) -> dict[str, str]:
    """Returns the error text of each mistake. Nothing has been sent, so the group must still work."""
    ones = torch.ones(6, 4)
    pair = torch.ones(world * 3)
    # Calls the backend itself, because torch's dispatcher fixes some of these mistakes.
    backend = group()._get_backend(torch.device("cpu"))
    scatter = dist.ScatterOptions()
    scatter.rootRank = rank
    errors = {
        "expanded": raised(dist.all_reduce, torch.ones(1).expand(6)),
        "meta": raised(backend.allreduce, [torch.ones(3, device="meta")]),
        "band_of_float": raised(dist.all_reduce, ones, dist.ReduceOp.BAND),
        "avg_of_bool": raised(dist.all_reduce, torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
        "sum_of_fp8": raised(dist.all_reduce, torch.ones(3).to(torch.float8_e4m3fn)),
        "root": raised(group().broadcast, torch.ones(3), world),
        "self_send": raised(group().send, [torch.ones(3)], rank, 0),
        "peer": raised(group().recv, [torch.ones(3)], world + 2, 0),
        "tag": raised(group().send, [torch.ones(3)], (rank + 1) % world, -1),
        "gather_size": raised(dist.all_gather_single, torch.empty(world * 3 + 1), torch.ones(3)),
        "gather_list": raised(group().allgather, [[torch.empty(3)] * (world + 1)], [torch.ones(3)]),
        "gather_dtype": raised(group()._allgather_base, pair.double(), torch.ones(3)),
        "overlap": raised(group().allgather, [[pair] * world], [pair]),
        "split_sum": raised(dist.all_to_all_single, torch.empty(world * 3), pair, None, [1] * world),
        "split_negative": raised(dist.all_to_all_single, torch.empty(world * 3), pair, None, [-1] + [3] * (world - 1)),
        "split_count": raised(dist.all_to_all_single, torch.empty(world * 3), pair, None, [world * 3]),
        "rows": raised(dist.all_to_all_single, torch.empty(world * 3 + 1), torch.ones(world * 3 + 1)),
        "conjugate": raised(backend.allreduce, [torch.ones(3, dtype=torch.complex64).conj()]),
        "scatter_list": raised(group().scatter, [torch.empty(3)], [[torch.empty(3)]], scatter),
        "sparse_max": raised(dist.all_reduce, torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
        "premul_of_int": raised(dist.all_reduce, torch.ones(3, dtype=torch.int64), premul_sum(0.5)),
        "premul_of_byte": raised(dist.reduce, torch.ones(3, dtype=torch.uint8), 0, premul_sum(2.0**63)),
    }
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [world] * 2
    return errors


def sparse_mismatches(rank: int, world: int) -> list[str]:
    """Sparse tensors that differ by rank. All ranks hear the same, and the group lives on."""
    odd = rank == 1
    entry: Any = partial(torch.sparse_coo_tensor, check_invariants=True)
    cases: list[tuple[torch.Tensor, dist.ReduceOp.RedOpType]] = [
        (entry([[5 if odd else 0]], [1.0], (6 if odd else 4,)), dist.ReduceOp.SUM),
        (entry([[0], [0]], [1.0], (4, 6 if odd else 3)), dist.ReduceOp.SUM),
        (torch.ones(4, 3).to_sparse(2 if odd else 1), dist.ReduceOp.SUM),
        (entry([[0]], [1.0], (4,), dtype=torch.float64 if odd else torch.float32), dist.ReduceOp.SUM),
        (entry([[0]], [1.0], (4,)), dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM),
    ]
    texts = [raised(dist.all_reduce, tensor, op) for tensor, op in cases]
    total = torch.eye(3).to_sparse()
    dist.all_reduce(total)
    assert torch.equal(total.to_dense(), world * torch.eye(3))
    return texts


def sparse_in_failed_group(rank: int, world: int) -> str:
    """A sparse all_reduce in a block of calls, in a group that has failed. Returns what the block raises."""
    cpu = torch.device("cpu")
    mismatch(rank, world, "dtype")
    group()._start_coalescing(cpu)
    group().allreduce([torch.eye(3).to_sparse()])
    return raised(group()._end_coalescing, cpu)


def mismatch(rank: int, world: int, what: str) -> str:
    """Rank 0 calls something else than the others.

    A rank that only sends may be done before anyone can tell it. So all ranks meet afterwards: the ranks that saw the
    mismatch tell the others, and each rank gets an error in the end.
    """
    return raised(mismatched_call, rank, world, what) or raised(dist.barrier)


def mismatched_call(rank: int, world: int, what: str) -> None:
    odd = rank == 0
    ones = torch.ones(100)
    if what == "elements":
        dist.all_reduce(torch.ones(100 if odd else 101))
    elif what == "dtype":
        dist.all_reduce(torch.ones(100, dtype=torch.float32 if odd else torch.int32))
    elif what == "op":
        dist.all_reduce(ones, dist.ReduceOp.SUM if odd else dist.ReduceOp.MAX)
    elif what == "collective" and odd:
        dist.broadcast(ones, 0)
    elif what == "collective":
        dist.all_reduce(ones)
    elif what == "moved dtype":
        dist.broadcast(ones.to(torch.float8_e5m2 if odd else torch.float8_e4m3fn), 0)
    elif what == "splits":
        # Rank 0 expects 2 rows from each rank, but the others send it 1.
        sent = [2 if odd else 1, *[2] * (world - 1)]
        dist.all_to_all_single(torch.empty(2 * world), torch.ones(sum(sent)), None, sent)
    else:
        raise AssertionError(what)


def different_roots(rank: int, world: int) -> list[str]:
    """Rank 0 takes another root than the others, in a group for each collective: its own rank, and that of another.

    Where each rank sends or each waits, no message has a receive that it could be compared with.
    """
    errors = []
    for own, count in itertools.product((True, False), (10, 100_000)):
        root = 0 if (rank == 0) is own else 1
        one, many = torch.ones(count), [torch.empty(count) for _ in range(world)] if rank == root else None
        for call in (dist.broadcast, dist.reduce, dist.gather, dist.scatter):
            group = dist.new_group()
            tensors = [one] if call in (dist.broadcast, dist.reduce) else [one, many]
            arguments = {"dst" if call in (dist.reduce, dist.gather) else "src": root, "group": group}
            errors.append(raised(partial(call, *tensors, **arguments)) or raised(dist.barrier, group))
    return errors


def killed(rank: int, world: int, victim: int, large: bool) -> str | None:
    """The victim dies while the others wait for it. Each of them must name it, long before the group's deadline.

    A slow survivor may hear of the death while it is still in the barrier.
    """
    in_barrier = raised(dist.barrier)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return in_barrier or raised(dist.all_reduce, torch.ones(5_000_000 if large else 5))


def killed_in_every_group(rank: int, world: int, victim: int) -> tuple[list[str], int] | None:
    """The victim dies while a sum is in flight in each of five groups, and nobody waits for any of them.

    Returns the text of each group's error, and by how many threads the last four groups made the process larger.
    """
    groups = [dist.new_group()]
    sums(groups)
    before = len(os.listdir("/proc/self/task"))
    groups += [dist.new_group() for _ in range(4)]
    sums(groups)
    added = len(os.listdir("/proc/self/task")) - before
    store = dist.distributed_c10d._get_default_store()
    if rank == victim:
        store.wait([f"posted/{other}" for other in range(world) if other != victim])
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(5), group=one, async_op=True) for one in groups]
    store.set(f"posted/{rank}", "1")
    texts: dict[int, str] = {}
    are_told = threading.Event()

    def told(number: int, future: Any) -> None:
        texts[number] = raised(future.wait)
        if len(texts) == len(works):
            are_told.set()

    for number, work in enumerate(works):
        work.get_future().add_done_callback(partial(told, number))
    assert are_told.wait(timeout=60), texts
    return [texts[number] for number in range(len(works))], added


def sums(groups: list[Any]) -> None:
    """One sum in each group, all in flight together."""
    for work in [dist.all_reduce(torch.ones(5), group=one, async_op=True) for one in groups]:
        work.wait()


def absent(rank: int, world: int) -> str:
    """The last rank never calls. The deadline of the others is short."""
    small = impatient()
    return raised(dist.all_reduce, torch.ones(3), group=small) if rank != world - 1 else ""


def impatient() -> dist.ProcessGroup:
    """A group whose calls have a second. The making of it may take longer, on a busy machine."""
    made: dist.ProcessGroup = dist.new_group()
    made._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=1))
    return made


def monitored(rank: int, world: int) -> str:
    """All ranks come to the first monitored barrier, all but the last to the second."""
    group().monitored_barrier(timedelta(seconds=60))
    if rank == world - 1:
        return ""
    return raised(group().monitored_barrier, timedelta(seconds=1), True)


def monitored_at_once(rank: int, world: int) -> str:
    """Rank 0 alone comes, and does not wait."""
    return raised(group().monitored_barrier, timedelta(0)) if rank == 0 else ""


def aborted(rank: int, world: int) -> str:
    """Rank 0 waits for an operation that no other rank joins. Its own abort ends the wait."""
    mine = dist.new_group()
    if rank != 0:
        return raised(dist.all_reduce, torch.ones(3), group=mine)
    work = dist.all_reduce(torch.ones(3), group=mine, async_op=True) if world == 1 else None
    receive = dist.irecv(torch.ones(3), 1, group=mine, tag=5)
    threading.Timer(0.2, lambda: mine._get_backend(torch.device("cpu")).abort()).start()
    text = raised(receive.wait)
    assert work is None
    assert not receive.is_success()
    assert raised(dist.all_reduce, torch.ones(3), group=mine) != ""
    return text


def short_wait(rank: int, world: int) -> None:
    """A wait with its own timeout ends there. The operation continues and completes."""
    tensor = torch.ones(3)
    if rank == 0:
        work = dist.irecv(tensor, 1, tag=3)
        text = raised(work.wait, timedelta(milliseconds=100))
        assert "100 ms" in text, text
        assert not work.is_completed()
        dist.barrier()
        work.wait()
        assert tensor.tolist() == [7.0] * 3
    else:
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((3,), 7.0), 0, tag=3)


def futures(rank: int, world: int) -> None:
    """`then` runs although nobody waits on the Work. Results and errors arrive in futures."""
    done = threading.Event()
    tensor = torch.full((50_000,), 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    chained = work.get_future().then(lambda future: (done.set(), future.value()[0] * 2)[1])
    assert done.wait(60)
    assert torch.equal(chained.wait(), torch.full((50_000,), 2.0 * world))
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    # The Work is dropped at once, but the operation must keep its memory.
    for _ in range(20):
        dist.all_reduce(torch.ones(30_000), async_op=True)
    gc.collect()
    dist.barrier()
    sequence = group()._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    numbers: list[object] = [None] * world
    dist.all_gather_object(numbers, sequence)
    assert len(set(numbers)) == 1


def failed_future(rank: int, world: int) -> str:
    mine = impatient()
    if rank != 0:
        return ""
    work = dist.all_reduce(torch.ones(3), group=mine, async_op=True)
    future = work.get_future()
    text = raised(future.wait)
    assert work.exception() is not None
    assert not work.is_success()
    return text


def forked(rank: int, world: int) -> str:
    """A forked child gets an error that it may not use the group. The parent's group still works."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, raised(dist.all_reduce, torch.ones(3)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    dist.barrier()
    return text


def interrupted(rank: int, world: int) -> str:
    """Ctrl-C ends a wait. The group still works."""
    if rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        tensor = torch.zeros(3)
        work = dist.irecv(tensor, 1, tag=4)
        try:
            work.wait()
            text = ""
        except KeyboardInterrupt:
            text = "KeyboardInterrupt"
        dist.barrier()
        work.wait()
        assert tensor.tolist() == [1.0] * 3
        return text
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(3), 0, tag=4)
    return ""


def destroyed_in_any_order(rank: int, world: int) -> None:
    """Groups with operations in flight end in another order than they began, and begin again."""
    for _ in range(2):
        groups = [dist.new_group() for _ in range(4)]
        works = [dist.all_reduce(torch.ones(10), group=one, async_op=True) for one in groups]
        for index in (2, 0, 3, 1):
            works[index].wait()
            dist.destroy_process_group(groups[index])
        gc.collect()
    dist.barrier()


def mixed_splits(rank: int, world: int) -> None:
    """A rank without splits says that all parts of all ranks are equal. One with splits does not, even if they are."""
    given, output = torch.arange(2.0 * world), torch.empty(2 * world)
    splits = [2] * world if rank == 0 else None
    # Direct: both know what comes from each rank.
    dist.all_to_all_single(output, given, splits, splits)
    assert torch.equal(output, given.view(world, 2)[rank].repeat(world))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENNIT_ALGORITHM", "bruck")
        group = dist.new_group()
    with pytest.raises(RuntimeError, match="alltoall of equal parts, by Bruck, of float32"):
        dist.all_to_all_single(output, given, splits, splits, group=group)


MISTAKES = {
    "expanded": r"ValueError: tensor has elements that share memory \(sizes \[6\], strides \[0\]\); pass tensor.contig",
    "meta": r"ValueError: tensor is on device meta and holds no data",
    "band_of_float": r"ValueError: reduce op BAND is not defined for dtype Float; allowed: SUM, AVG, PRODUCT, MIN, MAX",
    "avg_of_bool": r"ValueError: reduce op AVG is not defined for dtype Bool; allowed: SUM, PRODUCT, MIN",
    "sum_of_fp8": r"Error: .*([fF]loat8|fp8)",
    "root": r"ValueError: root is 2; allowed: 0 to 1",
    "self_send": r"ValueError: peer is \d, this rank itself; allowed: the others of 0 to 1",
    "peer": r"ValueError: peer is 4; allowed: 0 to 1",
    "tag": r"ValueError: tag is -1; allowed: 0 to 2147483647",
    "gather_size": r"ValueError: output has 7 elements; needed: 6 \(2 ranks times the input's 3\)",
    "gather_list": r"ValueError: outputs has 3 tensors; one for each of the 2 ranks is needed",
    "gather_dtype": r"TypeError: output has dtype Double; allowed here: Float",
    "overlap": r"ValueError: outputs\[0\] and outputs\[1\] share memory",
    "split_sum": r"ValueError: input_split_sizes adds up to 2; the first dimension of the tensor is 6",
    "split_negative": r"ValueError: input_split_sizes holds -1; allowed: 0 to 6",
    "split_count": r"ValueError: input_split_sizes has 1 entries; one for each of the 2 ranks is needed",
    "rows": r"ValueError: .*: the first dimension is 7, not a multiple of the 2 ranks; pass split sizes",
    "conjugate": r"ValueError: tensor is a lazy conjugate or negation",
    "scatter_list": r"ValueError: inputs has 1 tensors; one for each of the 2 ranks is needed",
    "premul_of_int": r"ValueError: the factor 0.5 of PREMUL_SUM with dtype Long; allowed: whole numbers between",
    "premul_of_byte": r"ValueError: the factor 9.22337e\+18 of PREMUL_SUM with dtype Byte; allowed: whole numbers",
    "sparse_max": r"ValueError: a sparse all_reduce allows the reduce ops SUM and AVG only",
}


def test_mistakes_are_told_before_anything_is_sent(kept_world: WorldFactory) -> None:
    for errors in kept_world(2).run(bad_arguments):
        assert errors.keys() == MISTAKES.keys()
        wrong = {name: text for name, text in errors.items() if not re.search(MISTAKES[name], text)}
        assert not wrong


def test_sparse_tensors_that_differ_are_refused_by_all(kept_world: WorldFactory) -> None:
    texts, others = kept_world(2).run(sparse_mismatches)
    assert texts == others
    told = [
        r"the shape \[4\] with 1 sparse .* on rank 0, but of the shape \[6\] with 1 sparse .* on rank 1; allowed",
        r"the shape \[4, 3\] with 2 .* on rank 0, but of the shape \[4, 6\] with 2",
        r"the shape \[4, 3\] with 1 .* on rank 0, but of the shape \[4, 3\] with 2",
        r"dtype Float, .* dtype Double",
        r"reduce op SUM on rank 0, .* reduce op AVG on rank 1",
    ]
    for text, pattern in zip(texts, told, strict=True):
        assert re.search(rf"ValueError: a sparse all_reduce of .*{pattern}", text), text


def test_a_block_with_a_sparse_sum_tells_why_its_group_failed(new_world: WorldFactory) -> None:
    for text in new_world(2, timeout_s=60).run(sparse_in_failed_group):
        assert re.search(r"DistBackendError: sennit: nothing was sent: rank \d runs allreduce of ", text), text


@pytest.mark.parametrize("transport", briefly(TRANSPORTS, ["udp"]))
def test_ranks_of_which_some_pass_splits(new_world: WorldFactory, transport: str) -> None:
    world = new_world(3, environment={"SENNIT_TRANSPORT": transport}, timeout_s=60)
    world.run(mixed_splits)


@pytest.mark.parametrize(
    ("transport", "what"),
    briefly(
        product(TRANSPORTS, ("elements", "dtype", "op", "collective", "moved dtype", "splits")),
        [
            ("shm", "elements"), ("udp", "dtype"), ("shm", "op"),
            ("udp", "collective"), ("shm", "moved dtype"), ("udp", "splits"),
        ],
    ),
)  # fmt: skip
def test_ranks_that_disagree(new_world: WorldFactory, transport: str, what: str) -> None:
    world = new_world(2, environment={"SENNIT_TRANSPORT": transport}, timeout_s=60)
    texts = world.run(mismatch, what=what)
    assert all(texts), texts
    assert any(re.search(r"rank 0 .*rank 1|rank 1 .*rank 0", text) for text in texts), texts


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 4), ("udp", 3)])
def test_ranks_with_different_roots(kept_world: WorldFactory, transport: str, size: int) -> None:
    """Both roots are named, long before the deadline of the group."""
    for texts in kept_world(size, transport).run(different_roots):
        assert len(texts) == 16
        assert all(re.search(r"rank \d runs .* root [01], but rank \d runs .* root [01]", text) for text in texts), (
            texts
        )


@pytest.mark.parametrize(
    ("transport", "large"), briefly(product(TRANSPORTS, (False, True)), [("shm", True), ("udp", False)])
)
def test_killed_rank(new_world: WorldFactory, transport: str, large: bool) -> None:
    # Who finds it by the deadline comes too late for the test.
    world = new_world(3, environment={"SENNIT_TRANSPORT": transport}, timeout_s=600)
    answers = world.run(killed, victim=1, large=large)
    assert answers[1] is None
    for text in (answers[0], answers[2]):
        assert text is not None
        assert "DistBackendError" in text
        assert "rank 1" in text


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_a_death_is_told_in_every_group(new_world: WorldFactory, transport: str) -> None:
    world = new_world(3, environment={"SENNIT_TRANSPORT": transport}, timeout_s=60)
    answers = world.run(killed_in_every_group, victim=1)
    for answer in (answers[0], answers[2]):
        assert answer is not None
        texts, added = answer
        assert added == 0, "groups have threads of their own"
        assert len(texts) == 5
        assert all("rank 1" in text for text in texts), texts


@pytest.mark.parametrize("transport", briefly(TRANSPORTS, ["shm"]))
def test_rank_that_never_arrives(new_world: WorldFactory, transport: str) -> None:
    texts = new_world(3, environment={"SENNIT_TRANSPORT": transport}).run(absent)
    for text in texts[:2]:
        assert re.search(r"DistBackendError: .*rank(s)? .*2", text, re.DOTALL), text


def test_monitored_barrier_names_the_missing(new_world: WorldFactory) -> None:
    texts = new_world(3).run(monitored)
    assert "monitored_barrier: rank 2 did not come within 1000 ms" in texts[0]
    assert "rank 1 was not released by rank 0" in texts[1]


def test_monitored_barrier_of_no_time_asks_who_is_there(new_world: WorldFactory) -> None:
    assert "monitored_barrier: rank 1 did not come within 1 ms" in new_world(2).run(monitored_at_once)[0]


def test_abort(new_world: WorldFactory) -> None:
    texts = new_world(2).run(aborted)
    assert "abort" in texts[0]
    assert "rank 0" in texts[1]


@pytest.mark.parametrize("case", [short_wait, futures, destroyed_in_any_order])
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_work(kept_world: WorldFactory, transport: str, case: Callable[..., Any]) -> None:
    kept_world(2, transport).run(case)


def test_failed_future(new_world: WorldFactory) -> None:
    texts = new_world(2).run(failed_future)
    assert "all_reduce" in texts[0]
    assert "rank 1" in texts[0]


def test_forked_child_is_told(kept_world: WorldFactory) -> None:
    for text in kept_world(2).run(forked):
        assert "this process was forked after init_process_group" in text


def test_interrupt_ends_a_wait(kept_world: WorldFactory) -> None:
    assert kept_world(2).run(interrupted) == ["KeyboardInterrupt", ""]


EXIT = """
import sys, torch, torch.distributed as dist, sennit
dist.init_process_group("sennit", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
work = dist.all_reduce(torch.ones(1000), async_op=True)
keep = work.get_future().then(lambda future: future.value())
if sys.argv[3] == "wait":
    work.wait()
"""


@pytest.mark.parametrize("how", briefly(["wait", "leave"], ["leave"]))
def test_exit_without_destroy(tmp_path: Path, how: str) -> None:
    """The process neither hangs nor crashes, even with an operation in flight."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store"), how], cwd="/")
        for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
