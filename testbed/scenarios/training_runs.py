# SPDX-License-Identifier: Apache-2.0
"""Plays training runs, one after the other, each with its ranks, network, death and newcomer. Returns their digests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.scenarios.trainings import HOST_RANKS, SLICES, Training, Trainings
from sennit.testbed.topology import Impairer, Impairment, Planes

# A model so small that a run is little more than its start, with shards for every placement.
MODEL: Final = (
    "--data=synthetic", "--samples=700", "--row-limit=200", "--batch-size=60", "--epochs=1", f"--slices={SLICES}",
    "--dim=4", "--bottom=8", "--top=8",
)  # fmt: skip
TABLES: Final = "[defaults]\nrow_shards = 8\ncolumn_shards = 2\n"
STEPS: Final = 10
CHECKPOINT_EVERY: Final = 3
DEATH_STEP, JOIN_STEP = 4, 6
PORT: Final = 29400
LOG_TAIL_CHARACTERS: Final = 2000
LOOK_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The outcome of one run."""

    training: Training
    digest: str = ""
    """SHA-256 of all weights; empty if the run failed."""
    error: str = ""
    dropped: int = 0
    """Packets that the switches dropped."""
    seconds: float = 0.0


def play(trainings: Trainings, planes: Planes, folder: Path, *, seed: int, say: Callable[[str], None]) -> list[Ended]:
    """All runs, with their logs below `folder`. A run that fails does not end the others."""
    ended: list[Ended] = []
    for number, training in enumerate(trainings.runs):
        say(f"run {number + 1} of {len(trainings.runs)}: {training}")
        place = folder / f"run{number}"
        place.mkdir()
        planes.impair(Impairment(loss_fraction=training.loss_fraction, seed=seed + number))
        before, began_s = _dropped(planes), time.monotonic()
        digest = error = ""
        try:
            digest = _run(training, planes, place, number, trainings.timeout_s)
        except RankError as failure:
            error = str(failure)
        ended.append(
            Ended(
                training=training,
                digest=digest,
                error=error,
                dropped=_dropped(planes) - before,
                seconds=time.monotonic() - began_s,
            )
        )
    return ended


def _dropped(planes: Planes) -> int:
    read = planes.counters if planes.impairer is Impairer.BPF else planes.netem_counters
    return sum(read(host, plane).dropped for host in range(planes.hosts) for plane in range(planes.planes))


def _run(training: Training, planes: Planes, folder: Path, number: int, timeout_s: float) -> str:
    """The digest of one run. Raises RankError if it fails, or does not go as it should."""
    (folder / "tables.toml").write_text(TABLES, encoding="utf-8")
    with _crew(training, planes, folder, timeout_s) as crew:
        if training.changes:
            _begin_with_changes(crew, victim=number)
        else:
            _begin(crew)
        crew.wait()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = [report["world_size"], report["steps"]["last"], sum(len(one["lost"]) for one in report.get("changes", []))]
    wanted = [training.ranks, STEPS, int(training.changes)]
    if found != wanted:
        raise RankError(f"{training}: ranks, steps and lost ranks are {found}, not {wanted}")
    return str(report["weights_sha256"])


def _begin(crew: _Crew) -> None:
    """All ranks at once: of one host by `--ranks`, on networks of their own as a launcher would start them."""
    ranks = crew.training.ranks
    if crew.training.transport == "shm" or ranks == 1:
        crew.start("run", 0, [f"--ranks={ranks}"])
        return
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "MASTER_ADDR": crew.address, "MASTER_PORT": PORT}
        crew.start("run" if rank == 0 else f"rank{rank}", rank, [], place)


def _begin_with_changes(crew: _Crew, *, victim: int) -> None:
    """A run that others join. On networks of their own all but the first rank join before the first step."""
    training, folder = crew.training, crew.folder
    ranks, gathers = training.ranks, training.transport == "udp" and training.ranks > 1
    halted = folder / "halted"
    if ranks == 1:
        deaths, halts = [[1, JOIN_STEP, str(folder / "died")]], [[1, DEATH_STEP, str(halted)]]
    else:
        # The first process has the store, and must not lose its only rank.
        dying = 1 + victim % (ranks - 1) if gathers else victim % ranks
        deaths, halts = [[dying, DEATH_STEP, str(folder / "died")]], [[ranks - 1, JOIN_STEP, str(halted)]]
    if gathers:
        halts.append([1, 0, str(folder / "gathered"), ranks - 1])
    plan = {"DEATHS": json.dumps(deaths), "HALTS": json.dumps(halts)}
    elastic = [
        "--elastic", f"--checkpoint={folder / 'saved'}", f"--checkpoint-every={CHECKPOINT_EVERY}", "--timeout=90",
    ]  # fmt: skip
    crew.start("run", 0, [*elastic, f"--ranks={1 if gathers else ranks}"], plan)
    join = [*elastic, f"--join={crew.join_address()}"]
    for host in range(1, ranks) if gathers else ():
        crew.start(f"rank{host}", host, join, plan)
    crew.wait_until(halted.exists, "no step at which it waits for a newcomer")
    # The newcomer takes the place of the lost rank, on the last host.
    crew.start("newcomer", ranks if training.transport == "udp" else 0, join, plan, like=ranks - 1)


@contextlib.contextmanager
def _crew(training: Training, planes: Planes, folder: Path, timeout_s: float) -> Iterator[_Crew]:
    crew = _Crew(training, planes, folder, time.monotonic() + timeout_s)
    try:
        yield crew
    finally:
        crew.kill()


class _Crew:
    """The processes of one run."""

    def __init__(self, training: Training, planes: Planes, folder: Path, deadline_s: float) -> None:
        self.training, self.folder = training, folder
        self.address = planes.ipv4_addresses(0)[0]
        self._planes, self._deadline_s = planes, deadline_s
        self._running: dict[str, subprocess.Popen[Any]] = {}

    def start(
        self,
        name: str,
        host: int,
        options: list[str],
        variables: dict[str, Any] | None = None,
        *,
        like: int | None = None,
    ) -> None:
        """Starts `sennit train` on a host. `like`: it says that it is on the host of that one's neighbours."""
        network = self._planes.environment(host) | {"SENNIT_TRANSPORT": self.training.transport}
        if self.training.transport == "udp":
            network["SENNIT_HOST_ID"] = f"pair{(host if like is None else like) // HOST_RANKS}"
        command = [
            sys.executable, "-m", "sennit.testbed.scenarios.mortal_trainer", *MODEL, *options,
            f"--tables={self.folder / 'tables.toml'}", f"--sharding={self.training.sharding}",
            f"--json={self.folder / 'report.json'}",
        ]  # fmt: skip
        given = {name: str(value) for name, value in (variables or {}).items()}
        with (self.folder / f"{name}.log").open("wb") as log:
            self._running[name] = self._planes.popen(
                host,
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **network, **given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def join_address(self) -> str:
        """Where ranks can join, as the first process prints it."""

        def lines() -> list[str]:
            return [line for line in self._log("run").splitlines(keepends=True) if "--join " in line and "\n" in line]

        self.wait_until(lambda: bool(lines()), "no address to join")
        return lines()[0].rpartition("--join ")[2].strip()

    def wait(self) -> None:
        """Waits until all processes have ended. Only the process of the killed rank may fail."""
        self.wait_until(lambda: all(process.poll() is not None for process in self._running.values()), "no end")

    def wait_until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        while not is_so():
            self._check(otherwise)
            time.sleep(LOOK_S)
        self._check(otherwise)

    def kill(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _check(self, otherwise: str) -> None:
        failed = [name for name, process in self._running.items() if process.poll() not in (None, 0)]
        if "run" in failed or len(failed) > int(self.training.changes):
            raise RankError(f"{self.training}: {failed[0]} failed:\n{self._log(failed[0])[-LOG_TAIL_CHARACTERS:]}")
        if time.monotonic() > self._deadline_s:
            raise RankError(f"{self.training}: {otherwise} in time:\n{self._log('run')[-LOG_TAIL_CHARACTERS:]}")

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace", encoding="utf-8")
