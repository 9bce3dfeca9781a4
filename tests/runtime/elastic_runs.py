# SPDX-License-Identifier: Apache-2.0
"""`sennit train --elastic` in the background, whose ranks die and wait where a test says so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sennit.runtime.training.command import main
from tests.forked_commands import LOOK_S, ForkedCommand

PROGRAM = "sennit.testbed.scenarios.mortal_trainer"
DEADLINE_S = 120.0


class ElasticRun:
    """A `sennit train --elastic` in the background."""

    def __init__(self, command: ForkedCommand, report: Path) -> None:
        self._command, self._report = command, report

    def address(self) -> str:
        """Returns the first join address that the run prints."""
        before, _, address = self._command.first_line(DEADLINE_S).rpartition("--join ")
        assert before, self.end()
        return address.strip()

    def wait_for(self, marker: Path) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not marker.exists():
            assert self._command.returncode is None, self.end()
            assert time.monotonic() < deadline_s, f"no {marker.name}"
            time.sleep(LOOK_S)

    def end(self) -> tuple[int, str]:
        """Returns exit code and output."""
        done = self._command.end(DEADLINE_S)
        return done.returncode, done.stdout + done.stderr

    def report(self) -> dict[str, Any]:
        code, output = self.end()
        assert code == 0, output
        result: dict[str, Any] = json.loads(self._report.read_text())
        return result


@contextmanager
def elastic_run(folder: Path, name: str, *arguments: str, **variables: Any) -> Iterator[ElasticRun]:
    report = folder / f"{name}.json"
    texts: dict[str, Any] = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()
    }
    # As in whole_run.py.
    given = ["--elastic", "--sharding", "table_wise", *arguments, "--json", str(report)]
    with ForkedCommand(PROGRAM, *given, **texts) as command:
        yield ElasticRun(command, report)


def join(address: str, *arguments: str) -> int:
    """Joins from the process of the tests (whole_run.py says why). Returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["--elastic", "--join", address, *arguments])
    return int(ended.value.code or 0)


def died_and_rejoined(
    folder: Path, options: list[str], *, ranks: int = 2, death_step: int, halt_step: int
) -> dict[str, Any]:
    """The report of a run with checkpoints in which rank 1 dies, and a newcomer takes its place.

    `death_step`: the step in which it dies. `halt_step`: the later one in which the last rank waits for the newcomer.
    """
    kept = [*options, "--checkpoint", str(folder / "kept"), "--checkpoint-every", "4"]
    deaths = [[1, death_step, str(folder / "died")]]
    halts = [[ranks - 1, halt_step, str(folder / "waits")]]
    with elastic_run(folder, "run", *kept, "--ranks", str(ranks), DEATHS=deaths, HALTS=halts) as run:
        address = run.address()
        run.wait_for(folder / "waits")
        assert join(address, *kept) == 0
        return run.report()
