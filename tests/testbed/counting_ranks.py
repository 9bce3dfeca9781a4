# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes, whose counters other processes read."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

from sennit.transport import counters
from tests.ranks import command
from tests.testbed.answering_rank import run_and_answer

WORLD = 2
DEADLINE_S = 60.0
# 9 AllReduces and 9 AlltoAlls, then a barrier for each line on the standard input.
OPERATIONS = 18


class Ranks:
    """Two ranks that have exchanged something and are idle."""

    def __init__(self, folder: Path, transport: str) -> None:
        environment = {**os.environ, "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
        environment["SENNIT_TRANSPORT"] = transport
        self.processes = [
            subprocess.Popen(
                command(partial(run_and_answer, rank, WORLD, folder / "store", 1)),
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"

    def counted(self) -> list[dict[str, int]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("counters\n")
            process.stdin.flush()
        found = []
        for process in self.processes:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.readline()))
        return found

    def pages(self) -> list[counters.Page]:
        numbers = {process.pid for process in self.processes}
        return sorted((page for page in counters.pages() if page.process in numbers), key=lambda page: page.rank)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
