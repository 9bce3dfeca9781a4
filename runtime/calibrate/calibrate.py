# SPDX-License-Identifier: Apache-2.0
"""`sennit calibrate`: times collectives of the real engine on this cluster, and fits the cost model to them.

Each way between ranks is measured in groups of its own: all ranks of a host over shared memory, and the ranks of one
place on each host over the network (with a single host: all its ranks, over its loopback). Large vectors are also
measured in pairs, all pairs at once: so the fit learns what further peers cost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import sennit
from sennit.command_line import json_text, write_whole
from sennit.errors import SennitError
from sennit.runtime.calibrate import codec_speeds, core_sharing, kernel_speeds, machine
from sennit.runtime.calibrate.cost_fit import Sample, fit
from sennit.runtime.planner.constants import Kernel, cores_here
from sennit.transport import algorithms
from sennit.transport.choice import calibration
from sennit.transport.choice.cost_model import Work
from sennit.transport.choice.costs import NETWORK, SHARED_MEMORY, Collective, Costs
from sennit.transport.choice.selection import Selection
from sennit.transport.communicator import Communicator
from sennit.transport.config import Algorithm, Config, TransportKind, from_environment
from sennit.transport.meeting.store import FileStore, Store
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.plan import Plan
from sennit.transport.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console

JOIN_S: Final = 60.0
RUN_S: Final = 300.0
# One plan runs this long in one turn. The plans take turns, so a short disturbance does not spoil the times of one.
SAMPLE_S: Final = 0.01
TURNS: Final = 5
ITERATIONS_MIN, ITERATIONS_MAX = 1, 50
KIB, MIB = 1 << 10, 1 << 20
FITTED: Final = (
    *((Collective.ALLREDUCE, size) for size in (256, 4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB)),
    *((Collective.REDUCE_SCATTER, size) for size in (64 * KIB, 2 * MIB)),
)
IN_PAIRS: Final = tuple(case for case in FITTED if case[1] >= 256 * KIB)
# With two or three ranks messages grow with rounds. These many small chunks tell the two apart.
CHUNKED_BYTES, CHUNK_BYTES = 32 * KIB, 256
# Sizes that the fit does not see.
CHECKED: Final = (
    *((Collective.ALLREDUCE, size) for size in (1 * KIB, 16 * KIB, 128 * KIB, MIB)),
    (Collective.REDUCE_SCATTER, 512 * KIB),
)


class CalibrationError(SennitError):
    """A rank ended, or there are too few."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A collective that the constants were not fitted to; the fields are those of the file."""

    way: str
    ranks: int
    collective: str
    size_bytes: int
    algorithm: str
    measured_s: float
    estimated_s: float
    chosen: bool
    """Seconds that the model with the new constants predicts."""


def measure(*, rank: int, world: int, store: Store, config: Config | None = None) -> dict[str, Any] | None:
    """Runs on every rank. Returns on rank 0 the contents of the file, and None elsewhere."""
    if world < 2:
        raise CalibrationError(f"{world} rank; allowed: 2 or more")
    given = (config or from_environment())._replace(algorithm=None, calibration=None)
    with Communicator(rank=rank, world=world, store=store, config=given, name="calibrate", timeout_s=JOIN_S) as group:
        hosts, ranks_here = group.selection.hosts, group.joined.connection.ranks_on_cores
        # The group's connections are open on all ranks before the first one leaves.
        group.barrier()
    ways: dict[str, dict[str, Any]] = {}
    checks: list[Check] = []
    fold_byte_s = None
    for way, members, transport in _groups(rank, hosts, given.transport):
        runs = _Runs(rank, members, store, given._replace(transport=transport), way, ranks_here)
        fitted = runs.run(len(members), FITTED, has_chunked=len(members) < 4)[0]
        if len(members) > 2:
            fitted += runs.run(2, IN_PAIRS)[0]
        default = SHARED_MEMORY if way == "shared_memory" else NETWORK
        checked = runs.run(len(members), CHECKED)
        if rank != 0:
            continue
        costs = fit(fitted, default=default, fold_byte_s=fold_byte_s)
        # A fold costs the same on all ways.
        fold_byte_s = costs.fold_byte_s
        ways[way] = {**costs._asdict(), "ranks": len(members)}
        checks += _check(way, costs, len(members), *checked)
    home = list(range(*hosts.spans[hosts.of_rank(rank)]))
    cores = cores_here()
    kernels = kernel_speeds.measure(has_contention=len(home) < cores) if rank == 0 else {}
    if len(home) > 1:
        near = given._replace(transport=TransportKind.SHM)
        with Communicator(
            rank=home.index(rank), world=len(home), store=store, config=near, name=f"calibrate/cores/{home[0]}",
            timeout_s=RUN_S, ranks_here_min=ranks_here,
        ) as group:  # fmt: skip
            contention, sharing = core_sharing.measure(group, cores, kernels.get("contention", 1.0))
        kernels |= {"contention": contention, "sharing": dataclasses.asdict(sharing)}
    return _contents(ways, checks, world, len(hosts.spans), kernels) if rank == 0 else None


def _contents(
    ways: dict[str, dict[str, Any]], checks: Sequence[Check], world: int, hosts: int, kernels: dict[str, Any]
) -> dict[str, Any]:
    if not ways:
        raise CalibrationError("no way was measured: rank 0 has no peer on its host, and the transport is shm")
    # A way that was not measured keeps the defaults, and has 0 ranks.
    defaults = {"shared_memory": SHARED_MEMORY, "network": NETWORK}
    given = {way: ways.get(way, {**costs._asdict(), "ranks": 0}) for way, costs in defaults.items()}
    if not given["shared_memory"]["ranks"]:
        given["shared_memory"]["fold_byte_s"] = given["network"]["fold_byte_s"]
    return {
        "schema": calibration.SCHEMA,
        "sennit": sennit.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "processor": machine.describe()["processor"],
        "cores": cores_here(),
        "ranks": world,
        "hosts": hosts,
        "ways": given,
        "codecs": {kind.name.lower(): speed._asdict() for kind, speed in codec_speeds.measure().items()},
        "kernels": kernels,
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def _groups(rank: int, hosts: Hosts, transport: TransportKind) -> Iterator[tuple[str, list[int], TransportKind]]:
    """Yields this rank's group for each way, if it has two ranks or more."""
    home = hosts.spans[hosts.of_rank(rank)]
    if home.high - home.low > 1:
        yield "shared_memory", list(range(*home)), TransportKind.SHM
    if transport is TransportKind.SHM:
        return
    network = transport if transport is TransportKind.VERBS else TransportKind.UDP
    place = rank - home.low
    members = [span.low + place for span in hosts.spans if place < span.high - span.low]
    if len(hosts.spans) == 1:
        members = list(range(*home))
    if len(members) > 1:
        yield "network", members, network


class _Runs:
    """Times plans in the groups of one way."""

    def __init__(
        self, rank: int, members: Sequence[int], store: Store, config: Config, way: str, ranks_here: int
    ) -> None:
        self._rank, self._members, self._store, self._config = rank, members, store, config
        self._way, self._ranks_here = way, ranks_here

    def run(
        self, ranks: int, cases: Sequence[tuple[Collective, int]], *, has_chunked: bool = False
    ) -> tuple[list[Sample], list[tuple[Collective, int, Algorithm]]]:
        """Returns the samples of this rank's group of `ranks`, and what they are. A rank left over has none."""
        place = self._members.index(self._rank)
        mine = self._members[place // ranks * ranks : place // ranks * ranks + ranks]
        if len(mine) < 2:
            return [], []
        with Communicator(
            rank=mine.index(self._rank),
            world=len(mine),
            store=self._store,
            config=self._config,
            name=f"calibrate/{self._way}/{ranks}/{len(cases)}/{mine[0]}",
            timeout_s=JOIN_S,
            ranks_here_min=self._ranks_here,
        ) as group:
            works: list[Work] = []
            names: list[tuple[Collective, int, Algorithm]] = []
            plans: list[Plan] = []
            for reduction, size_bytes in cases:
                for algorithm, work in group.selection.rate(reduction, size_bytes=size_bytes).items():
                    names.append((reduction, size_bytes, algorithm))
                    works.append(work)
                    plans.append(_compile(group, *names[-1]))
            if has_chunked:
                works.append(_chunked_work(group))
                plans.append(_compile_chunked(group))
            times = _time(group, plans)
        return [
            Sample(
                traffic=work.near if self._way == "shared_memory" else work.far,
                folded_bytes=work.folded_bytes,
                seconds=seconds,
            )
            for work, seconds in zip(works, times, strict=True)
        ], names


def _compile(group: Communicator, reduction: Collective, size_bytes: int, algorithm: Algorithm) -> Plan:
    selection = Selection(hosts=group.selection.hosts, forced=algorithm)
    elements = size_bytes // Dtype.F32.item_bytes
    if reduction is Collective.ALLREDUCE:
        return selection.allreduce(
            world=group.world,
            rank=group.rank,
            elements=elements,
            dtype=Dtype.F32,
            op=ReduceOp.SUM,
            in_place=algorithm is Algorithm.ROUND_TRIP,
        )
    counts = [elements * (rank + 1) // group.world - elements * rank // group.world for rank in range(group.world)]
    return selection.reduce_scatter(world=group.world, rank=group.rank, counts=counts, dtype=Dtype.F32, op=ReduceOp.SUM)


def _compile_chunked(group: Communicator) -> Plan:
    return algorithms.allreduce(
        world=group.world,
        rank=group.rank,
        elements=CHUNKED_BYTES // Dtype.F32.item_bytes,
        dtype=Dtype.F32,
        op=ReduceOp.SUM,
        in_place=False,
        chunk_bytes=CHUNK_BYTES,
    )


def _chunked_work(group: Communicator) -> Work:
    work = group.selection.rate(Collective.ALLREDUCE, size_bytes=CHUNKED_BYTES)[Algorithm.DIRECT]
    pieces = -(-CHUNKED_BYTES // group.world // CHUNK_BYTES)

    def more(traffic: Any) -> Any:
        return traffic._replace(messages=traffic.messages * pieces)

    return work._replace(near=more(work.near), far=more(work.far))


def _time(group: Communicator, plans: Sequence[Plan]) -> list[float]:
    """Returns the median seconds of a run of each plan, on the slowest rank."""
    sizes = itertools.zip_longest(*(plan.buffer_bytes for plan in plans), fillvalue=0)
    buffers = [np.zeros(max(of_buffer), np.uint8) for of_buffer in sizes]

    def run(number: int, iterations: int) -> list[float]:
        plan = plans[number]
        parts = [buffer[:size] for buffer, size in zip(buffers, plan.buffer_bytes, strict=False)]
        return group.time_plan(number, lambda: plan, parts, iterations)

    trials = []
    for number in range(len(plans)):
        run(number, 1)
        trials.append(min(run(number, 3)))
    # All ranks run a plan equally often.
    slowest = group.allreduce(np.array(trials), ReduceOp.MAX).tolist()
    iterations = [int(min(max(SAMPLE_S / max(trial, 1e-9), ITERATIONS_MIN), ITERATIONS_MAX)) for trial in slowest]
    times: list[list[float]] = [[] for _ in plans]
    for _ in range(TURNS):
        for number in range(len(plans)):
            times[number] += run(number, iterations[number])
    medians = np.array([statistics.median(found) for found in times])
    return [float(seconds) for seconds in group.allreduce(medians, ReduceOp.MAX)]


def _check(
    way: str, costs: Costs, ranks: int, samples: Sequence[Sample], names: Sequence[tuple[Collective, int, Algorithm]]
) -> list[Check]:
    best = {
        case: min(
            (sample.estimate(costs), algorithm)
            for sample, (*other, algorithm) in zip(samples, names, strict=True)
            if tuple(other) == case
        )[1]
        for case in {(reduction, size_bytes) for reduction, size_bytes, _ in names}
    }
    return [
        Check(
            way=way,
            ranks=ranks,
            collective=str(reduction),
            size_bytes=size_bytes,
            algorithm=str(algorithm),
            measured_s=sample.seconds,
            estimated_s=sample.estimate(costs),
            chosen=best[reduction, size_bytes] is algorithm,
        )
        for sample, (reduction, size_bytes, algorithm) in zip(samples, names, strict=True)
    ]


def run_here(ranks: int) -> dict[str, Any]:
    """Starts `ranks` processes on this machine that calibrate. Returns the contents of the file."""
    with tempfile.TemporaryDirectory(prefix="sennit-calibrate-") as folder, contextlib.ExitStack() as ended:
        processes = []
        logs = [Path(folder) / f"log-{rank}" for rank in range(ranks)]
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [*command, str(rank), str(ranks), folder],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                    )
                )
            ended.callback(processes[-1].wait)
            ended.callback(processes[-1].kill)
        deadline_s = time.monotonic() + RUN_S
        for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
            try:
                process.wait(max(deadline_s - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise CalibrationError(f"rank {rank} did not end within {RUN_S:g} s") from None
            if process.returncode != 0:
                lines = log.read_text(errors="replace", encoding="utf-8").strip().splitlines() or [
                    f"status {process.returncode}"
                ]
                raise CalibrationError(f"rank {rank} failed: {lines[-1]}")
        found: dict[str, Any] = json.loads(logs[0].read_text(encoding="utf-8").splitlines()[-1])
        return found


def write(path: Path, contents: dict[str, Any]) -> None:
    """Writes the file whole or not at all, and only what a run can read. Raises `SennitError`."""
    write_whole(path, json_text(contents), check=lambda written: calibration.read_calibration(str(written)))


def render(contents: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table("way", title=f"{contents['ranks']} ranks on {contents['hosts']} hosts, {contents['processor']}")
    for heading in ("ranks", "round µs", "message µs", "byte ns", "further peer", "folded byte ns"):
        table.add_column(heading, justify="right")
    for way, found in contents["ways"].items():
        table.add_row(
            way.replace("_", " "),
            str(found["ranks"] or "defaults"),
            f"{found['round_s'] * 1e6:.2f}",
            f"{found['message_s'] * 1e6:.2f}",
            f"{found['byte_s'] * 1e9:.3f}",
            f"{found['peer_share']:+.1%}",
            f"{found['fold_byte_s'] * 1e9:.3f}",
        )
    console.print(table)
    table = Table("codec", title="Float32 on one thread")
    for heading in ("encode GB/s", "at random", "decode GB/s"):
        table.add_column(heading, justify="right")
    for codec, speed in contents["codecs"].items():
        table.add_row(codec, *(f"{Dtype.F32.item_bytes / seconds / 1e9:.1f}" for seconds in speed.values()))
    console.print(table)
    _render_kernels(contents["kernels"], console)
    table = Table("way", "collective", "algorithm", title="Collectives that the constants were not fitted to")
    for heading in ("measured µs", "model µs", "measured / model"):
        table.add_column(heading, justify="right")
    for check in contents["checks"]:
        table.add_row(
            check["way"].replace("_", " "),
            f"{check['collective']} {format_size(check['size_bytes'])}",
            f"{check['algorithm']} <-" if check["chosen"] else check["algorithm"],
            f"{check['measured_s'] * 1e6:,.0f}",
            f"{check['estimated_s'] * 1e6:,.0f}",
            f"{check['measured_s'] / check['estimated_s']:.2f}" if check["estimated_s"] else "",
        )
    console.print(table)


def _render_kernels(kernels: dict[str, Any], console: Console) -> None:
    """Prints the times of a bag of ten ids with 64 columns, all rows distinct or none."""
    from rich.table import Table

    table = Table("kernel", "precision", title="An id of a bag of 10, 64 columns, on one thread")
    for heading in ("distinct row ns", "repeated row ns"):
        table.add_column(heading, justify="right")
    for name in ("lookup", "update"):
        for precision, found in kernels[name].items():
            costs = Kernel(**found)
            times = [costs.seconds(bags=0.1, ids=1, rows=rows, dim=64) * 1e9 for rows in (1, 0)]
            table.add_row(name, precision, *(f"{time_ns:.1f}" for time_ns in times))
    console.print(table)
    memory, gemm = kernels["memory"], kernels["gemm"]
    console.print(
        f"memory {1e-9 / memory['copy_byte_s']:.1f} GB/s of copies, "
        f"a row of a file {memory['file_row_s'] * 1e6:.1f} µs, "
        f"products of matrices {1e-9 / gemm['flop_s']:.0f} GFLOP/s"
    )


def main(rank: str, world: str, folder: str) -> None:
    try:
        found = measure(rank=int(rank), world=int(world), store=FileStore(Path(folder) / "store"))
    except SennitError as error:
        sys.exit(str(error))
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
