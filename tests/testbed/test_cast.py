# SPDX-License-Identifier: Apache-2.0
"""Processes of a played run: whose end is waited for, whose failure is named, and that none is left."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.scenarios.cast import Cast, anybody
from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.topology import Impairer, Planes
from sennit.testbed.topology.switch import NEEDS

DEADLINE_S = 60.0


class OneHost:
    """Planes whose only host is this one."""

    def popen(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, **options)


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    planes: Any = OneHost()
    with Cast(planes, tmp_path, timeout_s=DEADLINE_S) as cast:
        yield cast


def start(cast: Cast, name: str, script: str) -> None:
    cast.start(name, 0, ["sh", "-c", script], {"WORD": "here"})


def is_gone(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    # A dead process stays until its parent, or init, takes it.
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] in "XZ"


def test_what_processes_said_is_there_when_they_have_ended(cast: Cast, tmp_path: Path) -> None:
    start(cast, "rank 0", "echo $WORD; echo error >&2")
    start(cast, "rank 1", "exit 0")
    cast.wait()
    assert cast.codes() == {"rank 0": 0, "rank 1": 0}
    assert cast.said("rank 0") == "here\nerror\n"
    assert cast.log("rank 0") == tmp_path / "rank0.log"


def test_a_failure_is_named_with_its_last_words_though_what_is_waited_for_has_come(cast: Cast) -> None:
    start(cast, "rank 0", "sleep 1000")
    start(cast, "rank 1", "echo its words; exit 3")
    cast.wait_until(lambda: cast.codes()["rank 1"] is not None, "no end", may_fail=anybody)
    with pytest.raises(RankError, match=r"^rank 1 failed with 3:\nits words\n$"):
        cast.wait_until(lambda: True, "nothing")
    with pytest.raises(RankError, match="rank 1 failed"):
        cast.wait(may_fail=lambda failed: "rank 1" not in failed)


def test_a_deadline_names_who_still_runs(tmp_path: Path) -> None:
    planes: Any = OneHost()
    with Cast(planes, tmp_path, timeout_s=0.0) as cast:
        start(cast, "first", "exit 0")
        start(cast, "second", "sleep 1000")
        # Whether the first has ended by then, does not matter.
        with pytest.raises(RankError, match=r"^no end in time; (first|second):\n$"):
            cast.wait()


def test_an_end_takes_all_that_was_started_along(tmp_path: Path) -> None:
    planes: Any = OneHost()
    with Cast(planes, tmp_path, timeout_s=DEADLINE_S) as cast:
        start(cast, "parent", "sleep 1000 & echo $!; wait")
        cast.wait_until(lambda: "\n" in cast.said("parent"), "no child")
        pids = [cast.pid("parent"), int(cast.said("parent"))]
        assert not any(map(is_gone, pids))
    assert cast.codes() == {}
    end_s = time.monotonic() + DEADLINE_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_name_is_free_after_a_kill(cast: Cast) -> None:
    start(cast, "storage", "echo first; sleep 1000")
    cast.wait_until(lambda: cast.said("storage") == "first\n", "no word")
    cast.kill("storage")
    start(cast, "storage", "echo second")
    cast.wait()
    assert cast.said("storage") == "second\n"


@pytest.mark.root
@pytest.mark.needs(*NEEDS[Impairer.BPF])
def test_a_fork_runs_a_module_in_the_network_of_its_host(tmp_path: Path) -> None:
    with (
        Planes(hosts=2, planes=1) as planes,
        Cast(planes, tmp_path, timeout_s=DEADLINE_S) as cast,
    ):
        cast.fork(
            "host",
            1,
            "timeit",
            ["-n1", "-r1", "import os; os.system('ip -o address; echo of $WORD')"],
            {"WORD": "host1"},
        )
        cast.wait()
        assert "of host1" in cast.said("host")
        assert planes.ipv4_addresses(1)[0] in cast.said("host")
        assert planes.ipv4_addresses(0)[0] not in cast.said("host")
