# SPDX-License-Identifier: Apache-2.0
"""Processor time and energy of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sennit.runtime.telemetry import process_cost
from sennit.runtime.telemetry.process_cost import BPF, INGEST, TRAINER, TRANSPORT, Cost, CostMeter, process_ns
from sennit.thread_names import name_thread


def write(powercap: Path, zone: str, energy: str, span: str = "999999") -> None:
    folder = powercap / zone
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")


def test_processor_time_is_that_of_this_process(tmp_path: Path) -> None:
    meter, before = CostMeter(tmp_path), os.times()
    assert meter.read().roles_s.keys() == {TRAINER, TRANSPORT, INGEST}
    while os.times().user + os.times().system - before.user - before.system < 0.05:
        pass
    cost = meter.read()
    assert round(cost.user_s + cost.system_s, 9) >= 0.05  # Differences of clock ticks are not exact.
    assert cost.machine
    assert cost.machine_joules is None


def test_energy_is_that_of_all_packages_and_counters_begin_again(tmp_path: Path) -> None:
    write(tmp_path, "intel-rapl:0", "100")
    write(tmp_path, "intel-rapl:1", "999000")
    # A part of a package, which the package counts.
    write(tmp_path, "intel-rapl:0:0", "50")
    meter = CostMeter(tmp_path)
    write(tmp_path, "intel-rapl:0", "2100")
    write(tmp_path, "intel-rapl:1", "500")
    write(tmp_path, "intel-rapl:0:0", "60")
    assert meter.read().machine_joules == (2000 + 1500) * 1e-6


def test_energy_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    write(tmp_path, "intel-rapl:0", "?")
    assert CostMeter(tmp_path).read().machine_joules is None
    write(tmp_path, "intel-rapl:0", "5")
    meter = CostMeter(tmp_path)
    write(tmp_path, "intel-rapl:1", "5")
    assert meter.read().machine_joules is None


def burn(least_s: float) -> None:
    """Takes this much of the thread's own processor time, whatever else runs on the machine."""
    end_s = time.thread_time() + least_s
    while time.thread_time() < end_s:
        pass


@pytest.fixture
def named() -> Iterator[list[threading.Event]]:
    """Ends the threads of a test."""
    ends: list[threading.Event] = []
    yield ends
    for end in ends:
        end.set()


def started(name: str, ends: list[threading.Event], least_s: float) -> threading.Thread:
    """A thread of this name that has done its work, and lives until the test is over."""
    has_worked, end = threading.Event(), threading.Event()
    ends.append(end)

    def run() -> None:
        name_thread(name)
        burn(least_s)
        has_worked.set()
        end.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert has_worked.wait(60)
    return thread


def test_threads_have_the_role_of_their_name(tmp_path: Path, named: list[threading.Event]) -> None:
    before = started("sennit-crew", named, 0.05)
    with CostMeter(tmp_path) as meter:
        started("sennit-crew", named, 0.02)
        started("sennit-ingest", named, 0.03)
        ended = started("sennit-ingest", named, 0.01)
        named[-1].set()
        ended.join()
        burn(0.02)
        cost = meter.read()
    assert before.is_alive()
    roles = cost.roles_s
    assert 0.02 <= roles[TRANSPORT] < 0.05, "work from before the meter is not in it"
    assert roles[INGEST] >= 0.03
    # The thread that ended is counted here, too.
    assert roles[TRAINER] >= 0.03
    assert sum(roles.values()) <= time.process_time()


def test_a_name_is_cut_where_the_kernel_cuts_it() -> None:
    names: list[str] = []

    def run() -> None:
        name_thread("sennit-a-name-that-is-too-long")
        names.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().rstrip())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert names == ["sennit-a-name-t"]


def test_programs_in_the_kernel_are_a_role_if_they_are_counted(tmp_path: Path) -> None:
    counts = iter([5_000_000_000, 7_000_000_000])
    with CostMeter(tmp_path, program_ns=lambda: next(counts)) as meter:
        assert meter.read().roles_s[BPF] == 2.0


def test_the_processor_time_of_another_process() -> None:
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_ns(process.pid) >= 200_000_000
        process.communicate(b"\n")
    with pytest.raises(OSError, match="Invalid argument"):
        process_ns(process.pid)


def cost(machine: str, joules: float | None, **roles: float) -> Cost:
    user_s = sum(seconds for role, seconds in roles.items() if role != BPF) - 0.5
    return Cost(user_s=user_s, system_s=0.5, machine=machine, machine_joules=joules, roles_s=roles)


def test_a_run_costs_what_its_ranks_do_and_each_machine_counts_once() -> None:
    costs = [
        cost("here", 100.0, trainer=3.0, transport=1.0, ingest=0.5, bpf=0.25),
        cost("here", 100.0, trainer=3.0, transport=1.0, ingest=0.5),
        cost("there", 50.0, trainer=5.0, transport=2.0, ingest=0.0),
    ]
    counters = [{"data_bytes_sent": 10**9, "shm_bytes_sent": 10**9, "data_bytes_received": 5}, {}, {}]
    found = process_cost.summary(costs, counters, 500_000)
    assert found["user_s"] + found["system_s"] == 16.0
    assert (found["joules"], found["joules_per_million_samples"]) == (150.0, 300.0)
    assert found["processor_s_per_million_samples"] == 32.0
    assert (found["moved_bytes"], found["processor_s_per_gb_moved"]) == (2 * 10**9, 8.0)
    assert found["roles"]["transport"] == {"processor_s": 4.0, "per_million_samples": 8.0}
    assert found["roles"]["bpf"] == {"processor_s": 0.25, "per_million_samples": 0.5}
    assert process_cost.lines(found) == [
        ("cost", "32.0 s of processors for a million samples, 9% in the kernel; 300 J; 8.0 s for a GB moved"),
        ("by role", "trainer 22.00 s, transport 8.00 s, ingest 2.00 s, BPF 0.50 s"),
    ]


def test_what_is_not_known_is_not_said() -> None:
    found = process_cost.summary([cost("here", 1.0, trainer=1.0), cost("there", None, trainer=1.0)], [{}, {}], 0)
    assert found["joules"] is found["processor_s_per_million_samples"] is found["processor_s_per_gb_moved"] is None
    assert process_cost.lines(found) == []
    older = {"user_s": 1.0, "system_s": 1.0, "processor_s_per_million_samples": 2.0, "joules_per_million_samples": None}
    assert process_cost.lines(older) == [("cost", "2.0 s of processors for a million samples, 50% in the kernel")]
