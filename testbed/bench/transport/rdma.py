# SPDX-License-Identifier: Apache-2.0
"""`sennit bench rdma`: AlltoAll over soft-RoCE on a bad link, sennit beside the kernel's own reliable queue pairs.

Runs inside `sennit testbed vm`. Two ranks, on the two ends of the link rxe0 - rxe1; in every round the peers take turns
under each setting of netem.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from sennit.errors import SennitError
from sennit.runtime.calibrate import machine
from sennit.testbed.bench.cases import IN_FLIGHT_MAX, Case, Collective
from sennit.testbed.bench.transport.conductor import Workers
from sennit.testbed.bench.transport.worker_commands import Join, Measure, Verify
from sennit.testbed.vm import links
from sennit.transport.sizes import format_size

WORLD: Final = 2
PEERS: Final = {"verbs": "core", "udp": "core", "kernel-rc": "kernel_rc"}
"""Peer -> library. verbs: UC queue pairs with sennit's recovery; kernel-rc: RC queue pairs, nothing of sennit."""
WAYS: Final = {"verbs": 3, "udp": 3, "kernel-rc": 2}
"""How often one operation crosses the link: advert (not for the kernel), data, acknowledgement."""
NETEM: Final = (
    "", "loss 0.1%", "loss 1%", "loss 5%", "delay 5ms", "delay 5ms 2ms", "duplicate 1%", "corrupt 1%",
)  # fmt: skip
NONE: Final = "none"
SAMPLE_S: Final = 0.6
SAMPLE_MIN_OPERATIONS: Final = 4
SAMPLE_MAX_OPERATIONS: Final = 400
CPU_PART_BYTES: Final = 4 << 20
TC_TIMEOUT_S: Final = 30.0
_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Unusable(SennitError):
    """This machine is not suitable; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    part_bytes: int = 64 << 10
    """Bytes that each rank sends to the other per operation."""

    in_flight: tuple[int, ...] = (1, 8)
    """Numbers of operations in flight."""

    rounds: int = 5
    """Samples of every peer under every setting."""

    netem: tuple[str, ...] = NETEM
    """Settings of tc-netem(8) for both senders. All others are compared with the first."""

    against: tuple[str, ...] = ("kernel-rc",)
    """Peers of `verbs`, from `PEERS`."""

    cpu: bool = True
    """Whether to measure the processor time per GB of verbs and udp, too, on the unimpaired link."""

    def __post_init__(self) -> None:
        if not self.in_flight or not all(1 <= number <= IN_FLIGHT_MAX for number in self.in_flight):
            raise ValueError(f"{self.in_flight} operations in flight: 1 to {IN_FLIGHT_MAX}")
        if self.rounds < 1:
            raise ValueError(f"rounds {self.rounds}: at least 1")
        for peer in self.against:
            if peer not in PEERS or peer == "verbs":
                raise ValueError(f"peer {peer!r}: known are {', '.join(name for name in PEERS if name != 'verbs')}")
        _alltoall(self.part_bytes).elements(WORLD)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("verbs", *self.against)))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of netem with this many operations in flight."""

    netem: str
    in_flight: int
    samples_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per operation by peer, in each round."""

    def median_s(self, peer: str) -> float:
        return statistics.median(self.samples_s[peer])


@dataclass(kw_only=True)
class Report:
    """One run."""

    settings: Settings
    machine: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    cpu_s_per_gb: dict[str, list[float]] = field(default_factory=dict)
    """The VM's busy seconds for each 1e9 bytes that each rank sends and receives, by peer and round."""

    def base(self, row: Row) -> Row:
        """The row's baseline: the first setting with as many in flight."""
        return next(base for base in self.rows if base.in_flight == row.in_flight)

    def goodput(self, row: Row, peer: str) -> float:
        """Bytes per second, each way."""
        return self.settings.part_bytes / row.median_s(peer)

    def kept(self, row: Row, peer: str) -> float:
        """Share of the baseline's goodput."""
        return self.base(row).median_s(peer) / row.median_s(peer)

    def of_ideal(self, row: Row, peer: str) -> float | None:
        """Share of the goodput that a transport limited only by the delay would keep; None without delay.

        The operations in flight are the window. Each takes as long as without netem plus its ways across the link, and
        no more complete per second than without netem. Varying delays are no excuse.
        """
        delay_s = one_way_delay_s(row.netem)
        if delay_s == 0:
            return None
        base_s = self.base(row).median_s(peer)
        return max(base_s, (base_s + WAYS[peer] * delay_s) / row.in_flight) / row.median_s(peer)

    def as_json(self) -> dict[str, object]:
        return {
            "schema": 1,
            "unit": "seconds per operation, slowest rank of the round",
            "settings": asdict(self.settings),
            "machine": self.machine,
            "rows": [
                {
                    "netem": row.netem,
                    "in_flight": row.in_flight,
                    "goodput_bytes_per_s": {peer: self.goodput(row, peer) for peer in row.samples_s},
                    "kept": {peer: self.kept(row, peer) for peer in row.samples_s},
                    "of_ideal": {peer: self.of_ideal(row, peer) for peer in row.samples_s},
                    "samples_s": row.samples_s,
                }
                for row in self.rows
            ],
            "cpu_s_per_gb": self.cpu_s_per_gb,
        }


def one_way_delay_s(netem: str) -> float:
    """The mean delay of a setting."""
    found = re.search(r"\bdelay (\d+(?:\.\d+)?)(us|ms|s)\b", netem)
    return float(found[1]) * _UNITS_S[found[2]] if found else 0.0


def run(settings: Settings, progress: Callable[[str, int, int], None]) -> Report:
    """Measures everything. Calls `progress(what, done, total)` before each step."""
    check_devices()
    report = Report(settings=settings, machine=machine.describe())
    report.rows = [
        Row(netem=netem, in_flight=in_flight, samples_s={peer: [] for peer in settings.peers})
        for in_flight in settings.in_flight
        for netem in settings.netem
    ]
    total = (len(report.rows) + int(settings.cpu)) * settings.rounds
    with ExitStack() as stack:
        stack.callback(set_netem, "")
        # Each setting gets fresh ranks: what they learn of one link, such as its least delay, says nothing about
        # another.
        workers: dict[str, dict[str, Workers]] = {}
        for netem in settings.netem:
            progress(f"starting: {netem or NONE}", 0, total)
            set_netem(netem)
            workers[netem] = {peer: stack.enter_context(_joined(peer, settings.part_bytes)) for peer in settings.peers}
        for turn in range(settings.rounds):
            for number, row in enumerate(report.rows):
                progress(row.netem or NONE, turn * len(report.rows) + number, total)
                set_netem(row.netem)
                # Each peer is first in every other round.
                for peer in settings.peers if turn % 2 == 0 else reversed(settings.peers):
                    case = _alltoall(settings.part_bytes, row.in_flight)
                    row.samples_s[peer].append(_sample(workers[row.netem][peer], peer, case))
    if settings.cpu:
        _measure_cpu(report, lambda turn: progress("CPU", total - settings.rounds + turn, total))
    return report


def _measure_cpu(report: Report, progress: Callable[[int], None]) -> None:
    case = _alltoall(CPU_PART_BYTES)
    peers = ("verbs", "udp")
    with ExitStack() as stack:
        workers = {peer: stack.enter_context(_joined(peer, CPU_PART_BYTES)) for peer in peers}
        taken: dict[str, list[float]] = {peer: [] for peer in peers}
        for turn in range(report.settings.rounds):
            progress(turn)
            for peer in peers if turn % 2 == 0 else reversed(peers):
                once_s = max(workers[peer].ask(Measure(peer, case, 1)))
                operations = max(SAMPLE_MIN_OPERATIONS, round(SAMPLE_S / once_s))
                before_s = busy_s()
                workers[peer].ask(Measure(peer, case, operations))
                # A worker runs one more operation, untimed, before the timed ones.
                taken[peer].append((busy_s() - before_s) / ((operations + 1) * CPU_PART_BYTES) * 1e9)
    report.cpu_s_per_gb = taken


def _sample(workers: Workers, peer: str, case: Case) -> float:
    once_s = max(workers.ask(Measure(peer, case, SAMPLE_MIN_OPERATIONS)))
    operations = round(SAMPLE_S / once_s)
    if operations < SAMPLE_MIN_OPERATIONS:
        return once_s
    return max(workers.ask(Measure(peer, case, min(operations, SAMPLE_MAX_OPERATIONS))))


@contextmanager
def _joined(peer: str, part_bytes: int) -> Iterator[Workers]:
    """The ranks of a peer, each at its end of the link, after one operation with a correct result."""
    with Workers(
        library=PEERS[peer],
        world=WORLD,
        environment={} if peer == "kernel-rc" else {"SENNIT_TRANSPORT": peer},
        by_rank=[{"SENNIT_INTERFACES": links.netdev(rank)} for rank in range(WORLD)],
    ) as workers:
        workers.ask(Join(peer))
        workers.ask(Verify(peer, _alltoall(part_bytes)))
        yield workers


def _alltoall(part_bytes: int, in_flight: int = 1) -> Case:
    return Case(Collective.ALLTOALL, WORLD * part_bytes, in_flight)


def check_devices() -> None:
    """Raises if this is not the VM with its first link."""
    missing = [f"rxe{number}" for number in range(WORLD) if not Path(f"/sys/class/infiniband/rxe{number}").exists()]
    if missing:
        raise Unusable(
            f"no RDMA device {', '.join(missing)}: this is for the VM, `sennit testbed vm -- sennit bench rdma`"
        )


def set_netem(settings: str) -> None:
    """Sets netem for both senders; "" removes it."""
    for number in range(WORLD):
        interface = links.netdev(number)
        if settings:
            _tc("replace", interface, "netem", *links.with_limit(settings.split()))
        elif "netem" in _tc("show", interface):
            _tc("del", interface)


def _tc(action: str, interface: str, *settings: str) -> str:
    done = subprocess.run(
        ["tc", "qdisc", action, "dev", interface, "root", *settings],
        capture_output=True,
        text=True,
        timeout=TC_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise Unusable(f"tc refuses {' '.join(settings)!r}: {done.stderr.strip()}")
    return done.stdout


def busy_s() -> float:
    """Busy time of all processors together since some moment (proc(5), /proc/stat).

    This one measure covers everything: User-Mode Linux charges programs, kernel and interrupts alike to the system.
    """
    cpu, processors = 0.0, 0
    for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines():
        name, *ticks = line.split()
        if name == "cpu":
            cpu = int(ticks[3]) + int(ticks[4])  # idle, iowait
        elif name.startswith("cpu"):
            processors += 1
    return time.clock_gettime(time.CLOCK_BOOTTIME) * processors - cpu / TICKS_PER_S


TICKS_PER_S: Final = 100  # USER_HZ, the same on every Linux that this runs on


def describe(settings: Settings) -> str:
    return f"AlltoAll of {format_size(settings.part_bytes)} to the peer each way, {settings.rounds} rounds"


def render(report: Report, console: Console) -> None:
    """One line per netem setting, then the CPU time."""
    table = Table(
        title=describe(report.settings),
        caption="kept: of the first row's goodput; of ideal: of what the delay leaves, with so many in flight",
    )
    table.add_column("in flight", justify="right")
    table.add_column("netem")
    for peer in report.settings.peers:
        for what in (f"{peer}, MB/s each way", "kept", "of ideal"):
            table.add_column(what, justify="right")
    for row in report.rows:
        is_first = row is report.base(row)
        if is_first:
            table.add_section()
        cells = [cell for peer in report.settings.peers for cell in _cells(report, row, peer)]
        table.add_row(str(row.in_flight) if is_first else "", row.netem or NONE, *cells)
    console.print(table)
    for peer, samples in report.cpu_s_per_gb.items():
        console.print(f"CPU of the whole VM, {peer}: {_spread(samples)} s a GB sent and received by each rank")


def _cells(report: Report, row: Row, peer: str) -> Sequence[str]:
    ideal = report.of_ideal(row, peer)
    return (
        f"{report.goodput(row, peer) / 1e6:.3g}",
        "" if row is report.base(row) else f"{report.kept(row, peer):.0%}",
        "" if ideal is None else f"{ideal:.0%}",
    )


def _spread(samples: list[float]) -> str:
    return f"{statistics.median(samples):.1f} ({min(samples):.1f} to {max(samples):.1f})"
