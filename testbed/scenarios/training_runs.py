# SPDX-License-Identifier: Apache-2.0
"""Plays training runs, one after the other, each with its ranks, network, death and newcomer. Returns their digests."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from sennit.testbed.scenarios.cast import Cast
from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.scenarios.trainings import HOST_RANKS, SLICES, Training, Trainings
from sennit.testbed.topology import Impairer, Impairment, Planes

# Models so small that a run is little more than its start, with shards for every placement.
MODEL: Final = ("--batch-size=60", f"--slices={SLICES}", "--dim=4", "--bottom=8", "--top=8")
DATA: Final = {
    "fixed": ("--data=synthetic", "--samples=700", "--row-limit=200", "--epochs=1"),
    "dynamic": (
        "--data=synthetic-stream?days=2&rows-per-day=1200&living=150,40&life-days=0.2&dense=2", "--order=time",
        "--decay=none",
    ),
}  # fmt: skip
SHARDS: Final = "[defaults]\nrow_shards = 8\ncolumn_shards = 2\n"
RULES: Final = {
    "fixed": SHARDS,
    # In ten steps rows of both tables go for others, and ids of one of them wait for theirs.
    "dynamic": f"""{SHARDS}ids = "dynamic"
rows = 240
[tables.table_01]
ids = {{ admit_after = 2, eviction = "lfu", evicted_share = 0.25, expire_after = 6 }}
rows = 72
""",
}
STEPS: Final = 10
STOP_STEP: Final = 8
"""Where a run ends that is resumed."""
CHECKPOINT_EVERY: Final = 3
DEATH_STEP, JOIN_STEP = 4, 6
MEMORY: Final = "32KiB"
"""Of each rank for rows in files: too little for all of them."""
PORT: Final = 29400


@dataclasses.dataclass(frozen=True, kw_only=True)
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
            digest = _run(training, trainings.tables, planes, place, number, trainings.timeout_s)
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


def _run(training: Training, tables: str, planes: Planes, folder: Path, number: int, timeout_s: float) -> str:
    """The digest of one run. Raises RankError if it fails, or does not go as it should."""
    (folder / "tables.toml").write_text(RULES[tables], encoding="utf-8")
    options = [*MODEL, *DATA[tables], f"--tables={folder / 'tables.toml'}", f"--sharding={training.sharding}"]
    if training.home == "files":
        options += [f"--table-store={folder}", f"--table-memory={MEMORY}"]
    if training.changes or training.resumes:
        options += [f"--checkpoint={folder / 'saved'}", f"--checkpoint-every={CHECKPOINT_EVERY}"]
    if training.resumes:
        _played(training, planes, folder, [*options, f"--steps={STOP_STEP}"], timeout_s, steps=STOP_STEP, victim=number)
        options += ["--resume", f"--steps={STEPS}"]
        training = dataclasses.replace(training, ranks=training.resumed_ranks, changes=False)
        folder /= "resumed"
        folder.mkdir()
    elif tables == "dynamic":
        options.append(f"--steps={STEPS}")
    report = _played(training, planes, folder, options, timeout_s, steps=STEPS, victim=number)
    if tables == "dynamic" and not training.changes:
        _check_ids(training, report["ids"])
    return str(report["weights_sha256"])


def _check_ids(training: Training, ids: dict[str, dict[str, int]]) -> None:
    """Raises RankError if rows did not come and go."""
    for table, name in itertools.product(("table_00", "table_01"), ("admitted", "evicted")):
        if not ids[table][name]:
            raise RankError(f"{training}: {table} has {name} no ids; wanted: some")
    if not ids["table_01"]["without_row"]:
        raise RankError(f"{training}: table_01 has a row for each id; wanted: not at first")


def _played(
    training: Training, planes: Planes, folder: Path, options: list[str], timeout_s: float, *, steps: int, victim: int
) -> dict[str, Any]:
    """The report of a run that ends at step `steps`. Raises RankError if it did not go as it should."""
    with Cast(planes, folder, timeout_s=timeout_s) as cast:
        crew = _Crew(training, planes, folder, options, cast)
        if training.changes:
            _begin_with_changes(crew, victim=victim)
        else:
            _begin(crew)
        crew.wait()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = [report["world_size"], report["steps"]["last"], sum(len(one["lost"]) for one in report.get("changes", []))]
    wanted = [training.ranks, steps, int(training.changes)]
    if found != wanted:
        raise RankError(f"{training}: ranks, steps and lost ranks are {found}, not {wanted}")
    return report


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
    elastic = ["--elastic", "--timeout=90"]
    crew.start("run", 0, [*elastic, f"--ranks={1 if gathers else ranks}"], plan)
    join = [*elastic, f"--join={crew.join_address()}"]
    for host in range(1, ranks) if gathers else ():
        crew.start(f"rank{host}", host, join, plan)
    crew.wait_until(halted.exists, "no step at which it waits for a newcomer")
    # The newcomer takes the place of the lost rank, on the last host.
    crew.start("newcomer", ranks if training.transport == "udp" else 0, join, plan, like=ranks - 1)


class _Crew:
    """The processes of one run."""

    def __init__(self, training: Training, planes: Planes, folder: Path, options: list[str], cast: Cast) -> None:
        """`options`: of each `sennit train`."""
        self.training, self.folder, self._options = training, folder, options
        self.address = planes.ipv4_addresses(0)[0]
        self._planes, self._cast = planes, cast

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
            sys.executable, "-m", "sennit.testbed.scenarios.mortal_trainer", *self._options, *options,
            f"--json={self.folder / 'report.json'}",
        ]  # fmt: skip
        given = {name: str(value) for name, value in (variables or {}).items()}
        self._cast.start(name, host, command, {**network, **given})

    def join_address(self) -> str:
        """Where ranks can join, as the first process prints it."""

        def lines() -> list[str]:
            said = self._cast.said("run").splitlines(keepends=True)
            return [line for line in said if "--join " in line and "\n" in line]

        self.wait_until(lambda: bool(lines()), "no address to join")
        return lines()[0].rpartition("--join ")[2].strip()

    def wait(self) -> None:
        """Waits until all processes have ended. Only the process of the killed rank may fail."""
        self._cast.wait(may_fail=self._may_fail)

    def wait_until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        self._cast.wait_until(is_so, otherwise, may_fail=self._may_fail)

    def _may_fail(self, failed: Sequence[str]) -> bool:
        return "run" not in failed and len(failed) <= int(self.training.changes)
