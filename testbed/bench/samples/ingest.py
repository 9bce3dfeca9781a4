# SPDX-License-Identifier: Apache-2.0
"""`sennit bench ingest`: a trainer from memory beside the same trainer from feeders, through `cpu://` and `xdp://`.

A fourth one has a program at another interface that `sennit agent` has loaded.

The trainers share one process and one core and take turns, so slow seconds of the machine hit all of them. Their
feeders run on another core in another network namespace. All final weights must be equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.errors import SennitError
from sennit.offload.agent.receiver import VARIABLE
from sennit.runtime.calibrate import machine
from sennit.testbed.bench.samples.ingest_turns import BY_AGENT, MEMORY
from sennit.testbed.topology import Planes

# The largest packet that native XDP takes on a veth interface.
MTU_BYTES: Final = 3506
PORTS: Final = {"xdp": 4800, "cpu": 4900, "agent": 5000}
FEEDER_HOST, TRAINER_HOST = 0, 1
STEPS: Final = 11
"""Steps of a turn."""

DEADLINE_S: Final = 600.0
LEAVE_S: Final = 30.0


class BenchError(SennitError):
    """Nothing was measured. The message is the trainer's last line."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one source of samples."""

    source: str
    samples_per_s: float
    ratio_to_memory: float
    """The median over turns of memory's time / this source's time. Above 1 this source is faster."""

    input_ms: float
    """Milliseconds in which a step takes its batch, or waits for it."""

    counters: dict[str, float]
    """Counters of the session with the feeders."""


def run(*, data: str, turns: int) -> list[Result]:
    """Raises BenchError if there are no figures."""
    cores = sorted(os.sched_getaffinity(0))
    with (
        Planes(hosts=2, planes=2, mtu=MTU_BYTES, per_packet=True) as planes,
        tempfile.TemporaryDirectory(prefix="sennit-bench-") as folder,
        contextlib.ExitStack() as feeders,
    ):
        addresses, interfaces = planes.addresses(TRAINER_HOST), planes.interfaces(TRAINER_HOST)
        targets = [f"cpu://[{addresses[0]}]:{PORTS['cpu']}", f"xdp://{interfaces[0]}:{PORTS['xdp']}"]
        targets.append(f"{BY_AGENT}xdp://{interfaces[1]}:{PORTS['agent']}")
        agent = _agent(planes, Path(folder), interfaces[1], feeders)
        arguments = ["-m", "sennit.testbed.bench.samples.ingest_turns", data, str(turns), str(STEPS), *targets]
        trainer = planes.popen(
            TRAINER_HOST,
            [*_on(cores[0]), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, VARIABLE: str(agent)},
        )
        for name, port in PORTS.items():
            to = ["--data", data, "--to", f"[{addresses[name == 'agent']}]:{port}"]
            feeder = planes.popen(
                FEEDER_HOST,
                [*_on(cores[-1]), "-m", "sennit", "feed", *to],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            feeders.callback(feeder.wait, LEAVE_S)
            feeders.callback(feeder.terminate)
        try:
            said, _ = trainer.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the trainer took more than {DEADLINE_S:g} s") from None
    last = said.strip().rpartition("\n")[2]
    if trainer.returncode != 0:
        raise BenchError(last or f"the trainer ended with {trainer.returncode}")
    return results(json.loads(last))


def _agent(planes: Planes, folder: Path, interface: str, ends: contextlib.ExitStack) -> Path:
    """Starts an agent for this user and this interface. Returns its socket."""
    file, path = folder / "agent.toml", folder / "agent.sock"
    port = PORTS["agent"]
    file.write_text(
        f"[[allow]]\nusers = [{os.getuid()}]\ninterfaces = [{interface!r}]\nports = [{port}, {port}]\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "sennit", "agent", "--config", str(file), "--socket", str(path)]
    process = planes.popen(TRAINER_HOST, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ends.callback(process.stdout.close)
    ends.callback(process.wait, LEAVE_S)
    ends.callback(process.terminate)
    if not process.stdout.readline():
        raise BenchError("the agent ended before it was ready")
    return path


def results(measured: dict[str, Any]) -> list[Result]:
    """Reads the output of `ingest_turns`."""
    found = []
    memory_s = [elapsed_s for elapsed_s, _ in measured["turns"][MEMORY]]
    for source, turns in measured["turns"].items():
        taken_s = [elapsed_s for elapsed_s, _ in turns]
        found.append(
            Result(
                source=source.partition(":")[0],
                samples_per_s=STEPS * measured["batch_size"] / statistics.median(taken_s),
                ratio_to_memory=statistics.median(
                    theirs / ours for theirs, ours in zip(memory_s, taken_s, strict=True)
                ),
                input_ms=1000 * statistics.median(input_s for _, input_s in turns) / STEPS,
                counters=measured["counters"].get(source, {}),
            )
        )
    return found


def render(found: list[Result], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("samples from", "samples/s", "beside memory", "input, ms a step", "waited, ms", "asked again"):
        table.add_column(name, justify="left" if name == "samples from" else "right")
    for result in found:
        counters = result.counters
        session = ("", "")
        if counters:
            session = (f"{1000 * counters['waited_s']:.1f}", f"{counters['gaps'] + counters['silences']:.0f}")
        ratio, each = f"{result.ratio_to_memory:.3f}", f"{result.input_ms:.2f}"
        table.add_row(result.source, f"{result.samples_per_s:,.0f}", ratio, each, *session)
    console.print(table)


def as_json(found: list[Result]) -> dict[str, Any]:
    return {"machine": machine.describe(), "results": [asdict(result) for result in found]}


def _on(core: int) -> list[str]:
    """Runs Python on one core, however many threads it has."""
    return ["taskset", "-c", str(core), sys.executable]
