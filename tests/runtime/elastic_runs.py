# SPDX-License-Identifier: Apache-2.0
"""`sennit train --elastic` in the background, whose ranks die and wait where a test says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = ("-m", "sennit.testbed.scenarios.mortal_trainer")
DEADLINE_S = 120.0
LOOK_S = 0.02


class ElasticRun:
    """A `sennit train --elastic` in the background."""

    def __init__(self, folder: Path, name: str, *arguments: str, **variables: Any) -> None:
        self._report = folder / f"{name}.json"
        environment = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()
        }
        self._process = subprocess.Popen(
            [sys.executable, *PROGRAM, "--elastic", *arguments, "--json", str(self._report)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._said: list[str] = []

    def address(self) -> str:
        """Returns the first join address that the run prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._said.append(line)
        before, _, address = line.rpartition("--join ")
        assert before, self.end()
        return address.strip()

    def wait_for(self, marker: Path) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not marker.exists():
            assert self._process.poll() is None, self.end()
            assert time.monotonic() < deadline_s, f"no {marker.name}"
            time.sleep(LOOK_S)

    def end(self) -> tuple[int, str]:
        """Returns exit code and output."""
        rest, _ = self._process.communicate(timeout=DEADLINE_S)
        return self._process.returncode, "".join(self._said) + rest

    def report(self) -> dict[str, Any]:
        code, output = self.end()
        assert code == 0, output
        result: dict[str, Any] = json.loads(self._report.read_text())
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def elastic_run(folder: Path, name: str, *arguments: str, **variables: Any) -> Iterator[ElasticRun]:
    run = ElasticRun(folder, name, *arguments, **variables)
    try:
        yield run
    finally:
        run.close()
