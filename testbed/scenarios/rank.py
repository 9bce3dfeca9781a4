# SPDX-License-Identifier: Apache-2.0
"""One rank of a workload, in its own process and network namespace: obeys the conductor line by line.

    python -m sennit.testbed.scenarios.rank LIBRARY RANK WORLD STORE TIMEOUT_S INTERFACES

A command is a line of JSON on stdin, its answer a line on stdout: join, prepare, run, counters, reconfigure, stop.
What a library prints goes to stderr, which is the case's log. Times are of CLOCK_MONOTONIC, which all ranks share.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from sennit.testbed.scenarios import libraries
from sennit.testbed.scenarios.counters import difference
from sennit.testbed.scenarios.model import Library, Operation
from sennit.testbed.scenarios.payload import Payload
from sennit.testbed.scenarios.sampler import Sampler, received_bytes


class Rank:
    """The state between commands."""

    def __init__(
        self, *, library: Library, rank: int, world: int, store: Path, timeout_s: float, interfaces: list[str]
    ) -> None:
        self._library = library
        self._rank = rank
        self._world = world
        self._store = store
        self._timeout_s = timeout_s
        self._interfaces = interfaces
        self._group: libraries.Group | None = None
        self._payload: Payload | None = None

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.pop("do"):
            case "join":
                self._group = libraries.join(
                    self._library, rank=self._rank, world=self._world, store=self._store, timeout_s=self._timeout_s
                )
                return {"pid": os.getpid()}
            case "prepare":
                operation = Operation(command.pop("operation"))
                self._payload = Payload(operation, rank=self._rank, world=self._world, **command)
                return {}
            case "run":
                return self._run(**command)
            case "counters":
                return {"counters": self._joined().counters(), "describe": self._joined().describe()}
            case "reconfigure":
                began_s = time.monotonic()
                self._rank, self._world = self._joined().reconfigure(**command)
                return {"began_s": began_s, "ended_s": time.monotonic(), "rank": self._rank, "world": self._world}
            case "stop":
                self._joined().close()
                return {}
            case other:
                raise ValueError(f"command {other!r}; allowed: join, prepare, run, counters, reconfigure, stop")

    def _joined(self) -> libraries.Group:
        if self._group is None:
            raise RuntimeError(f"rank {self._rank} has not joined")
        return self._group

    def _run(self, *, repetitions: int, duration_s: float, timeline: bool) -> dict[str, Any]:
        """Repeats the collective. A failure ends the run and is part of the answer."""
        group, payload = self._joined(), self._payload
        if payload is None:
            raise RuntimeError(f"rank {self._rank} has no payload")
        begins_s: list[float] = []
        ends_s: list[float] = []
        wrong_elements: list[int] = []
        answer: dict[str, Any] = {"begins_s": begins_s, "ends_s": ends_s, "wrong_elements": wrong_elements}
        sampler = Sampler(group.bytes_received, self._interfaces) if timeline else None
        before = received_bytes(self._interfaces)
        started_s = time.monotonic()
        with sampler if sampler is not None else contextlib.nullcontext():
            last = False
            while not last:
                done = len(ends_s)
                last = done + 1 >= repetitions and time.monotonic() - started_s >= duration_s
                payload.fill(done, last=last and self._rank == 0)
                begins_s.append(time.monotonic())
                try:
                    group.run(payload)
                except Exception as error:  # Errors of either library or of torch: they are the observation.
                    answer["error"] = {
                        "kind": type(error).__name__,
                        "message": str(error),
                        "lost_ranks": group.lost_ranks(),
                        "at_s": time.monotonic(),
                    }
                    break
                ends_s.append(time.monotonic())
                wrong_elements.append(payload.wrong_elements(done))
                if done == 0:
                    answer["digest"] = payload.digest()
                if duration_s > 0:
                    last = payload.was_last()
        answer["received_bytes"] = difference(received_bytes(self._interfaces), before)
        answer["samples"] = [] if sampler is None else sampler.rows
        return answer


def serve(rank: Rank, commands: TextIO, answers: TextIO) -> None:
    """Runs until the conductor says stop or has ended. Answers a failed command with `failure`, and ends."""
    for line in commands:
        command = json.loads(line)
        stops = command["do"] == "stop"
        try:
            answer = rank.obey(command)
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}"}
            stops = True
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if stops:
            return


def main() -> None:
    library, rank, world, store, timeout_s, interfaces = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(
        Rank(
            library=Library(library),
            rank=int(rank),
            world=int(world),
            store=Path(store),
            timeout_s=float(timeout_s),
            interfaces=interfaces.split(","),
        ),
        sys.stdin,
        answers,
    )


if __name__ == "__main__":
    main()
