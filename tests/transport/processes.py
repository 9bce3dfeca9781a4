# SPDX-License-Identifier: Apache-2.0
"""Ranks of the transport as processes: what a scenario sees of its own, and what the test sees of all.

A scenario is a function of a `Rank`; its other arguments come by `functools.partial`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from sennit.transport.communicator import Communicator
from sennit.transport.config import from_environment
from sennit.transport.meeting.store import FileStore
from tests.ranks import start

# Processes take longer than this to start and load only on a far too busy machine.
START_S = 60.0
# Below the least limit of a test, so that the outputs of ranks are told.
DEADLINE_S = 100.0


class Rank:
    """This process in a scenario: its place, the words that processes of the test leave for each other, its reports."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world = rank, world
        self.store = FileStore(folder / "store")
        self._reports = folder / f"report-{rank}"

    def make(self, kind: type[Communicator] = Communicator, **options: Any) -> Any:
        given = {"rank": self.rank, "world": self.world, "timeout_s": START_S, **options}
        return kind(store=self.store, **given)

    def report(self, **values: Any) -> None:
        """Tells the test, in JSON. A rank that dies later has told it, too."""
        with self._reports.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def say(self, word: str) -> None:
        self.store.set(f"test/{word}", "1")

    def wait_for(self, *words: str) -> None:
        wait_for_words(self.store, words, START_S)

    def die(self) -> None:
        # The time of death, by the clock that all processes of this machine share.
        self.store.set(f"test/died-{self.rank}", f"{time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)


Scenario = Callable[[Rank], None]


def act(scenario: Scenario, rank: int, world: int, folder: Path) -> None:
    """One rank: for `tests.ranks`."""
    scenario(Rank(rank, world, folder))


def wait_for_words(store: FileStore, words: Sequence[str], deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not store.check([f"test/{word}" for word in words]):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not all of {words} within {deadline_s:g} s")
        time.sleep(0.002)


class Group:
    """The processes of a scenario. They are killed at the end of the block.

    `hosts`: a letter for each rank, its pretended host. `newcomers`: further numbers of processes, which are below 0.
    `variables`: further environment variables, which the ranks take in turn. `own_interpreter`: see `tests.ranks`.
    """

    def __init__(
        self,
        scenario: Scenario,
        hosts: str,
        folder: Path,
        *,
        transport: str = "auto",
        newcomers: Sequence[int] = (),
        variables: Sequence[dict[str, str]] = ({},),
        own_interpreter: bool = False,
    ) -> None:
        self.folder, self.store = folder, FileStore(folder / "store")
        self.processes: dict[int, BaseProcess] = {}
        shared = {"HOSTS": ",".join(hosts), "SENNIT_TRANSPORT": transport, "SENNIT_INTERFACES": "lo"}
        try:
            for rank in [*range(len(hosts)), *newcomers]:
                own = {"SENNIT_HOST_ID": hosts[rank], **variables[rank % len(variables)]}
                self.processes[rank] = start(
                    functools.partial(act, scenario, rank, len(hosts), folder),
                    environment={**os.environ, **shared, **own},
                    log=folder / f"log-{rank}",
                    own_interpreter=own_interpreter,
                )
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()  # Also ends a stopped process.
            process.join()

    def stop(self, rank: int, how: signal.Signals = signal.SIGSTOP) -> None:
        """Sends a signal to a rank."""
        number = self.processes[rank].pid
        assert number is not None
        os.kill(number, how)

    def finish(self, dead: Sequence[int] = ()) -> dict[int, list[dict[str, Any]]]:
        """Returns each rank's reports once all have ended: the `dead` by a signal, the others normally."""
        end_s = time.monotonic() + DEADLINE_S
        for process in self.processes.values():
            process.join(max(end_s - time.monotonic(), 0.1))
        texts = []
        for rank, process in self.processes.items():
            code = process.exitcode
            if code != (-signal.SIGKILL if rank in dead else 0):
                texts.append(f"rank {rank} {'hangs' if code is None else f'exited with {code}'}:\n{self.log(rank)}")
        assert not texts, "\n".join(texts)
        return {rank: self.reports(rank) for rank in self.processes}

    def last_reports(self, dead: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Like `finish`: the last report of each rank."""
        return [reports[-1] for reports in self.finish(dead).values()]

    def reports(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"report-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self, rank: int) -> str:
        """The last of what a rank has written to its standard error."""
        return (self.folder / f"log-{rank}").read_text()[-3000:]

    def wait_for(self, *words: str) -> None:
        try:
            wait_for_words(self.store, words, DEADLINE_S)
        except TimeoutError as error:
            error.add_note("\n".join(map(self.log, self.processes)))
            raise


Collective = Callable[[Communicator, int], None]


def play(collectives: Sequence[Collective], seed: int, me: Rank) -> None:
    """A scenario: one group, opened as the environment says, runs them in turn, each with the seed."""
    with Communicator(rank=me.rank, world=me.world, store=me.store, config=from_environment()) as group:
        # Ranks with the same SENNIT_HOST_ID share a host. HOSTS has the ids of all ranks.
        hosts = os.environ["HOSTS"].split(",")
        transport = os.environ["SENNIT_TRANSPORT"]
        network = "verbs" if transport == "verbs" else "udp"
        near = network if transport in ("udp", "verbs") else "shm"
        expected = [near if host == hosts[group.rank] else network for host in hosts]
        expected[group.rank] = "self"
        assert list(group.routes) == expected, group.routes
        for collective in collectives:
            collective(group, seed)


def run_ranks(
    collectives: Sequence[Collective],
    world: int,
    transport: str,
    folder: Path,
    seed: int,
    *,
    hosts: str = "",
    variables: Sequence[dict[str, str]] = ({},),
    own_interpreter: bool = False,
) -> None:
    """Runs `collectives` on each rank, all on one host unless `hosts` says otherwise. For the rest see `Group`."""
    patient = [{"SENNIT_TIMEOUT_S": "60", **of_rank} for of_rank in variables]
    scenario = functools.partial(play, collectives, seed)
    options: dict[str, Any] = {"transport": transport, "variables": patient, "own_interpreter": own_interpreter}
    with Group(scenario, hosts or "a" * world, folder, **options) as group:
        group.finish()
