# SPDX-License-Identifier: Apache-2.0
"""Mistakes, dead ranks, deadlines: each gives an error that names what is wrong, and nothing hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

CASES = "fault_cases.py"
World = Callable[..., Any]

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
    "sparse_max": r"ValueError: a sparse all_reduce allows the reduce ops SUM and AVG only",
}


def test_mistakes_are_told_before_anything_is_sent(kept_world: World) -> None:
    for errors in kept_world(2).run(CASES, "bad_arguments"):
        assert errors.keys() == MISTAKES.keys()
        wrong = {name: text for name, text in errors.items() if not re.search(MISTAKES[name], text)}
        assert not wrong


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_ranks_of_which_some_pass_splits(new_world: World, transport: str) -> None:
    world = new_world(3, environment={"SENNIT_TRANSPORT": transport}, timeout_s=60)
    world.run("plan_cases.py", "mixed_splits")


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("what", ["elements", "dtype", "op", "collective", "moved dtype", "splits"])
def test_ranks_that_disagree(new_world: World, transport: str, what: str) -> None:
    world = new_world(2, environment={"SENNIT_TRANSPORT": transport}, timeout_s=60)
    texts = world.run(CASES, "mismatch", what=what)
    assert all(texts), texts
    assert any(re.search(r"rank 0 .*rank 1|rank 1 .*rank 0", text) for text in texts), texts


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("large", [False, True])
def test_killed_rank(new_world: World, transport: str, large: bool) -> None:
    # Who finds it by the deadline comes too late for the test.
    world = new_world(3, environment={"SENNIT_TRANSPORT": transport}, timeout_s=600)
    answers = world.run(CASES, "killed", victim=1, large=large)
    assert answers[1] is None
    for rank in (0, 2):
        assert "DistBackendError" in answers[rank]
        assert "rank 1" in answers[rank]


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_a_death_is_told_in_every_group(new_world: World, transport: str) -> None:
    world = new_world(3, environment={"SENNIT_TRANSPORT": transport}, timeout_s=60)
    answers = world.run(CASES, "killed_in_every_group", victim=1)
    for rank in (0, 2):
        texts, added = answers[rank]
        assert added == 0, "groups have threads of their own"
        assert len(texts) == 5
        assert all("rank 1" in text for text in texts), texts


@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_rank_that_never_arrives(new_world: World, transport: str) -> None:
    texts = new_world(3, environment={"SENNIT_TRANSPORT": transport}).run(CASES, "absent")
    for text in texts[:2]:
        assert re.search(r"DistBackendError: .*rank(s)? .*2", text, re.DOTALL), text


def test_monitored_barrier_names_the_missing(new_world: World) -> None:
    texts = new_world(3).run(CASES, "monitored")
    assert "monitored_barrier: rank 2 did not come within 1000 ms" in texts[0]
    assert "rank 1 was not released by rank 0" in texts[1]


def test_monitored_barrier_of_no_time_asks_who_is_there(new_world: World) -> None:
    assert "monitored_barrier: rank 1 did not come within 1 ms" in new_world(2).run(CASES, "monitored_at_once")[0]


def test_abort(new_world: World) -> None:
    texts = new_world(2).run(CASES, "aborted")
    assert "abort" in texts[0]
    assert "rank 0" in texts[1]


@pytest.mark.parametrize("case", ["short_wait", "futures", "destroyed_in_any_order"])
@pytest.mark.parametrize("transport", ["shm", "udp"])
def test_work(kept_world: World, transport: str, case: str) -> None:
    kept_world(2, transport).run(CASES, case)


def test_failed_future(new_world: World) -> None:
    texts = new_world(2).run(CASES, "failed_future")
    assert "all_reduce" in texts[0]
    assert "rank 1" in texts[0]


def test_forked_child_is_told(kept_world: World) -> None:
    for text in kept_world(2).run(CASES, "forked"):
        assert "this process was forked after init_process_group" in text


def test_interrupt_ends_a_wait(kept_world: World) -> None:
    assert kept_world(2).run(CASES, "interrupted") == ["KeyboardInterrupt", ""]


EXIT = """
import sys, torch, torch.distributed as dist, sennit
dist.init_process_group("sennit", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
work = dist.all_reduce(torch.ones(1000), async_op=True)
keep = work.get_future().then(lambda future: future.value())
if sys.argv[3] == "wait":
    work.wait()
"""


@pytest.mark.parametrize("how", ["wait", "leave"])
def test_exit_without_destroy(tmp_path: Path, how: str) -> None:
    """The process neither hangs nor crashes, even with an operation in flight."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store"), how], cwd="/")
        for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
