# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between processes: bits, how bytes travel, and what becomes of it when ranks die or stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.transport import _core
from sennit.transport.errors import ArgumentError
from sennit.transport.symmetric import symmetric_empty
from tests.extent import briefly
from tests.memory_group import limited_memory
from tests.ranks import command
from tests.transport import symmetric_scenarios as scenarios
from tests.transport.processes import DEADLINE_S, Group, Scenario, act

pytestmark = pytest.mark.timeout(180)

Launch = Callable[..., Group]


@pytest.mark.parametrize("world", briefly([2, 3, 5], [3]))
def test_all_collectives_give_the_same_bits_in_any_memory(launch: Launch, world: int) -> None:
    for report in launch(scenarios.collectives, "a" * world).last_reports():
        sent = report["sent"]
        assert sent["ordinary"] == [0, 0], sent
        assert min(*sent["symmetric"], *sent["somewhere"]) > 0, sent


def test_neighbours_refer_to_memory_and_strangers_get_packets(launch: Launch) -> None:
    reports = launch(scenarios.collectives, "aab").last_reports()
    for report in reports[:2]:
        assert min(report["sent"]["symmetric"]) > 0
    assert reports[2]["sent"]["symmetric"] == [0, 0]


def test_over_udp_symmetric_memory_is_like_any_other(launch: Launch) -> None:
    for report in launch(scenarios.collectives, "aa", transport="udp").last_reports():
        assert all(sent == [0, 0] for sent in report["sent"].values())


@pytest.mark.parametrize(
    ("scenario", "world"),
    briefly(
        product((scenarios.churn, scenarios.views, scenarios.two_groups), (2, 3)),
        [(scenarios.churn, 3), (scenarios.views, 2), (scenarios.two_groups, 3)],
    ),
)
def test_arrays_and_groups(launch: Launch, scenario: Scenario, world: int) -> None:
    for report in launch(scenario, "a" * world).last_reports():
        assert sum(report["sent"]) > 0


@pytest.mark.root
@pytest.mark.needs("root")
def test_a_rank_in_another_pid_namespace_gets_copies(tmp_path: Path) -> None:
    environment = {**os.environ, "SENNIT_TRANSPORT": "shm", "SENNIT_INTERFACES": "lo", "SENNIT_HOST_ID": "a"}
    ranks = []
    prefixes: list[list[str]] = [[], ["unshare", "--pid", "--fork", "--kill-child"]]
    for rank, prefix in enumerate(prefixes):
        begun = [*prefix, *command(partial(act, scenarios.collectives, rank, 2, tmp_path))]
        ranks.append(subprocess.Popen(begun, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in ranks:
            _, text = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, text[-3_000:]
    finally:
        for process in ranks:
            process.kill()
    outer, inner = (json.loads((tmp_path / f"report-{rank}").read_text())["sent"]["symmetric"] for rank in range(2))
    # The outer rank cannot open the memory of the inner one, whose process has another number there.
    assert outer[0] > 0
    assert outer[1] == 0
    assert inner[0] == 0
    assert inner[1] > 0


def test_round_trips_to_another_host_are_refused(launch: Launch) -> None:
    texts = [report["text"] for report in launch(scenarios.strangers, "aab").last_reports()]
    for text, stranger in zip(texts, (2, 2, 0), strict=True):
        assert text == f"the plan makes round trips, but rank {stranger} is not reached over shared memory"


@pytest.mark.parametrize(
    ("elements", "symmetric"),
    briefly(product((0, 1, 5_000, 300_007), (False, True)), [(0, False), (1, True), (5_000, False), (300_007, True)]),
)
def test_a_rank_with_another_algorithm_is_refused(launch: Launch, elements: int, symmetric: bool) -> None:
    disagree = partial(scenarios.disagree, elements=elements, is_symmetric=symmetric)
    for report in launch(disagree, "aaa").last_reports():
        assert "allreduce by round trips of float32" in report["text"], report
        assert "allreduce of float32" in report["text"], report


@pytest.mark.parametrize(("hosts", "after_s"), [("aa", 0.05), ("aaa", 0.1), ("aaa", 0.23), ("aab", 0.15)])
def test_arrays_outlive_a_rank_that_is_killed(launch: Launch, hosts: str, after_s: float) -> None:
    victim = 1
    killed = partial(scenarios.killed, victim=victim, after_s=after_s, has_packets="b" in hosts)
    reports = launch(killed, hosts).last_reports(dead=[victim])
    for rank, report in enumerate(reports):
        assert not [path for path in report["segments"] if Path(path).exists()]
        if rank != victim:
            assert report["error"] == "PeerError"
            assert report["lost"] == [victim], report
            assert f"rank {victim} " in report["text"].split(" (reported by")[0], report["text"]
            assert report["world"] == len(hosts) - 1


@pytest.mark.parametrize("world", [2, 3])
def test_memory_is_taken_back_when_a_group_ends(launch: Launch, world: int) -> None:
    for report in launch(partial(scenarios.aborts, turns=25), "a" * world).last_reports():
        assert report["ended"] > 0


@pytest.mark.parametrize("hosts", ["aa", "aaa"])
def test_a_rank_that_stops_is_named_and_writes_nothing_later(launch: Launch, hosts: str) -> None:
    victim = 0
    group = launch(partial(scenarios.stopped, victim=victim, timeout_s=1.5), hosts)
    group.wait_for("stop me")
    group.stop(victim)
    group.wait_for(*[f"done-{rank}" for rank in range(1, len(hosts))])
    group.stop(victim, signal.SIGCONT)
    for rank, report in enumerate(group.last_reports()):
        if rank != victim:
            assert f"rank {victim}" in report["text"], report
            assert report["error"] in {"TimeoutError", "PeerError"}


def test_shapes_and_types_are_those_of_numpy() -> None:
    for shape in (5, (5,), [2, 3], (), np.int64(4), (np.int32(3), 0, 2), 0):
        for dtype in (
            "f4",
            np.float64,
            "S7",
            "M8[s]",
            [("id", "i8"), ("weight", "f4")],
            (np.int16, (2, 2)),
            "V0",
            bool,
        ):
            array, ordinary = symmetric_empty(shape, dtype), np.empty(shape, dtype)
            assert (array.shape, array.dtype) == (ordinary.shape, ordinary.dtype)
            assert array.flags.c_contiguous
            assert array.flags.writeable
            array[...] = np.zeros(shape, dtype)
            assert array.nbytes == 0 or array.ctypes.data % 64 == 0
    assert symmetric_empty(3).dtype == np.float32


@pytest.mark.parametrize("shape", [-1, (3, -2), (-2, -3), (-1, 0)])
def test_a_negative_size_is_refused(shape: Any) -> None:
    with pytest.raises(ArgumentError, match=r"shape \(.*-.*\); allowed: sizes of 0 or more"):
        symmetric_empty(shape)


def test_python_objects_are_refused() -> None:
    with pytest.raises(ArgumentError, match="without Python objects"):
        symmetric_empty(3, object)
    with pytest.raises(ArgumentError, match="without Python objects"):
        symmetric_empty(3, [("name", object)])


@pytest.mark.parametrize("count", [1 << 40, 1 << 61, (1 << 62) - 1, 1 << 62, 1 << 100])
def test_more_than_there_is_raises_an_error_with_the_bytes(count: int) -> None:
    # Freed memory is there, which a size that wraps to 0 must not find.
    del (kept := [symmetric_empty(1 << 20)])[:]
    assert not kept
    with pytest.raises(MemoryError, match=f"no shared memory left for {4 * count} bytes"):
        symmetric_empty(count)
    assert _core.symmetric_alloc((1 << 64) - 1) == 0
    assert symmetric_empty(3).size == 3


def test_only_memory_of_the_heap_is_freed() -> None:
    array = symmetric_empty(1_000)
    for address in (0, 4_096, np.empty(1_000).ctypes.data, array.ctypes.data + 64):
        assert not _core.symmetric_free(address)
    array[:] = 3
    assert array.sum() == 3_000


def test_memory_lives_as_long_as_any_view() -> None:
    whole = symmetric_empty((1_000, 1_000))
    address = whole.ctypes.data
    part = whole[3:5, 7]
    part[:] = 11
    del whole
    others = [symmetric_empty((1_000, 1_000)) for _ in range(4)]
    for other in others:
        other[:] = 0
    assert address not in [other.ctypes.data for other in others]
    assert part.tolist() == [11, 11]
    del part
    assert symmetric_empty((1_000, 1_000)).ctypes.data == address


FORK = """
import os
import numpy as np
from sennit.transport.symmetric import symmetric_empty
mine, other = symmetric_empty(500_000), symmetric_empty(500_000)
mine[:], other[:] = 1, 2
where = mine.ctypes.data
child = os.fork()
if child == 0:
    assert (mine == 1).all() and (other == 2).all()
    mine[:] = 7
    del mine
    # A heap of its own.
    new = [symmetric_empty(500_000) for _ in range(3)]
    for array in new:
        array[:] = 8
    assert (other == 2).all()
    del other, new
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (mine == 1).all() and (other == 2).all()
new = symmetric_empty(500_000)
assert new.ctypes.data not in (mine.ctypes.data, other.ctypes.data)
del mine
assert symmetric_empty(500_000).ctypes.data == where
print("well")
"""


def test_what_a_child_of_fork_frees_and_writes_stays_in_the_child() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60).stdout == "well\n"


# Joins the control group, then asks for more than it may have.
IN_GROUP = """
import os, sys
from pathlib import Path
import numpy as np
from sennit.transport.symmetric import symmetric_empty
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
try:
    symmetric_empty(400 << 20, np.uint8)
except MemoryError as error:
    print(error)
symmetric_empty(70 << 20, np.uint8)
"""


@pytest.mark.root
def test_no_more_is_given_than_the_control_group_has_left(memory_group: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_GROUP, str(memory_group)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "419430400" in done.stdout


@pytest.fixture
def memory_group() -> Iterator[Path]:
    with limited_memory(200 << 20) as group:
        yield group.folder
