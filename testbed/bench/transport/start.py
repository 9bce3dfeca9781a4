# SPDX-License-Identifier: Apache-2.0
"""`sennit bench start`: how long a job takes to its first AllReduce, as torchrun starts it, sennit beside gloo.

Here `import torch` counts, and torchrun itself: it is what a user waits for. `sennit bench group` times what a backend
adds to that. Ranks with gloo look for no backends that are installed, as if sennit was not.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.runtime.calibrate import machine
from sennit.runtime.training import launch
from sennit.testbed.bench.ratios import spread
from sennit.testbed.bench.transport.group import OURS, Against

PROGRAM: Final = Path(__file__).with_name("start_rank.py")
# A processor imports torch for one rank in a second or two.
JOB_S: Final = 900.0
END_S: Final = 60.0
"""torchrun gives its ranks half of this to end."""


@dataclass(frozen=True, kw_only=True)
class Settings(Against):
    """What to run."""

    world: int = 16
    """Ranks, all on this machine."""

    rounds: int = 5
    """Jobs of each peer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job. Seconds are counted from the start of torchrun."""

    imported_s: float
    """Until the last rank had imported torch."""

    seconds: float
    """Until the last rank's first AllReduce was done."""

    ended_s: float
    """Until torchrun had ended."""

    processor_s: float
    """Processor seconds of torchrun and all ranks."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run, with its settings and machine."""

    settings: Settings
    machine: dict[str, object]
    jobs: dict[str, list[Job]]

    def ratio(self, peer: str) -> float:
        """The median over rounds of peer / sennit, up to the first AllReduce."""
        pairs = zip(self.jobs[peer], self.jobs[OURS], strict=True)
        return statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "machine": self.machine,
            "results": {
                peer: {
                    "ratio": self.ratio(peer),
                    "median_s": statistics.median(job.seconds for job in jobs),
                    "jobs": [asdict(job) for job in jobs],
                }
                for peer, jobs in self.jobs.items()
            },
        }


def run(settings: Settings) -> Report:
    """Raises `launch.RankFailure` if a job fails, or has not ended in time."""
    jobs: dict[str, list[Job]] = {peer: [] for peer in settings.peers()}
    for number in range(settings.rounds):
        # The peer that begins changes from round to round: it warms the machine's caches.
        for peer in settings.peers()[:: 1 if number % 2 else -1]:
            jobs[peer].append(_job(settings, peer))
    return Report(settings=settings, machine=machine.describe(), jobs=jobs)


def _job(settings: Settings, peer: str) -> Job:
    environment = {
        **os.environ,
        **settings.environment(),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if peer == OURS else "0",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.world}"]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        folder = Path(name)
        processor_s, begun_s = _processor_s(), time.time()
        process = subprocess.Popen(
            [*torchrun, str(PROGRAM), peer, name], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            code = process.wait(JOB_S)
        except subprocess.TimeoutExpired:
            raise launch.RankFailure(f"{peer}: the job has not ended within {JOB_S:.0f} s") from None
        finally:
            _end(process)
        ended_s = time.time()
        if code != 0:
            log.seek(0)
            failure = folder / "failure"
            said = failure.read_text(encoding="utf-8") if failure.exists() else log.read().strip()[-1000:]
            raise launch.RankFailure(f"{peer}: {said or f'status {code}'}")
        ranks = [
            [float(time_s) - begun_s for time_s in (folder / f"{rank}").read_text(encoding="utf-8").split()]
            for rank in range(settings.world)
        ]
    return Job(
        imported_s=max(imported for imported, _ in ranks),
        seconds=max(done for _, done in ranks),
        ended_s=ended_s - begun_s,
        processor_s=_processor_s() - processor_s,
    )


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks torchrun to end its ranks, which are in sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()


def render(report: Report, console: Console) -> None:
    """One line per peer: the ratio to sennit, and what a job takes."""
    settings = report.settings
    table = Table(
        title=f"a job of {settings.world} ranks by torchrun on one machine, transport {settings.transport}, "
        f"{settings.rounds} rounds"
    )
    headings = ("first AllReduce  (p10 – p90)", "torch imported", "job ended", "processor s")
    for heading in ("peer", f"peer / {OURS}", *headings):
        table.add_column(heading, justify="left" if heading == "peer" else "right", no_wrap=True)
    for peer, jobs in report.jobs.items():
        table.add_row(
            peer,
            f"{report.ratio(peer):.2f}",
            spread([job.seconds for job in jobs]),
            f"{statistics.median(job.imported_s for job in jobs):.2f} s",
            f"{statistics.median(job.ended_s for job in jobs):.2f} s",
            f"{statistics.median(job.processor_s for job in jobs):.1f}",
        )
    console.print(table)
