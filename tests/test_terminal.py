# SPDX-License-Identifier: Apache-2.0
"""What commands show on a terminal, and there alone: colours, and how far they are."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.terminal import run_on_terminal

ROOT = Path(__file__).resolve().parents[1]
QUIETLY = str(ROOT / "sennit" / "setup" / "quietly.sh")
COMMAND_TIMEOUT_S = 60.0
SENNIT = (sys.executable, "-m", "sennit")
# ECMA-48, Select Graphic Rendition: 30..38, 40..48, 90..97 and 100..107 are colours. The others, such as bold, are not.
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;\dm]")


def test_colours_are_for_terminals_and_no_color_turns_them_off() -> None:
    _, coloured = run_on_terminal([*SENNIT, "doctor"], timeout_s=COMMAND_TIMEOUT_S, NO_COLOR=None)
    assert COLOUR.search(coloured), coloured
    _, plain = run_on_terminal([*SENNIT, "doctor"], timeout_s=COMMAND_TIMEOUT_S, NO_COLOR="1")
    assert "RoCEv2 over UDP" in plain
    assert not COLOUR.search(plain), plain
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    piped = subprocess.run(
        [*SENNIT, "doctor"], env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    assert "RoCEv2 over UDP" in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr


def test_a_bar_says_what_the_steps_wait_for() -> None:
    torch = pytest.importorskip("torch")
    from sennit.runtime.training.display import ConsoleDisplay
    from sennit.runtime.training.trainer import StepReport

    file = io.StringIO()
    display = ConsoleDisplay(Console(file=file, force_terminal=True, width=120), batch_size=64)
    display.on_step(StepReport(step=1, step_count=300, epoch=0, samples=64, loss_sum=torch.tensor(1.0)))
    with display.on_wait("saving a checkpoint"):
        during = len(file.getvalue())
    display.close()
    assert "saving a checkpoint 0 s" in file.getvalue()[:during]
    assert "saving a checkpoint" not in file.getvalue()[during:]


def test_what_builds_shows_its_log_on_a_terminal_alone(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    command = [QUIETLY, str(log), "bash", "-c", f"echo first; until [ -e {go} ]; do sleep 0.05; done; exit 3"]
    status, shown = run_on_terminal(command, timeout_s=COMMAND_TIMEOUT_S, until="first", then=lambda _: go.touch())
    assert status == 3
    assert re.search(r"[|/\\-] 0:0\d first", shown), shown
    assert f"failed; the whole output is in {log}" in shown
    piped = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert (piped.returncode, piped.stdout) == (3, "")
    assert piped.stderr.startswith("first\nerror: 'bash -c ")
    assert log.read_text() == "first\n"


# Commands of the build that may take longer than two seconds.
LONG = re.compile(
    r"cmake --build|cmake --install|apt-get (install|update)|pip\S* (--\S+ (\S+ )?)*(install|download)|-m (build|venv|"
    r"auditwheel|mkdocs)|\bfuzz_\$name"
)

# Comments, what is told to people, and a folder of links that is made at once.
SAID = re.compile(r"^\s*#|\b(fail|say|echo) [\"$]|--without-pip")


@pytest.mark.parametrize("path", [ROOT / "Makefile", *sorted((ROOT / "sennit" / "setup").glob("*.sh"))], ids=str)
def test_every_long_step_of_the_build_shows_that_it_runs(path: Path) -> None:
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line for line in text.splitlines() if LONG.search(line) and not SAID.search(line)]
    assert not [line for line in lines if not re.search(r"quietly |waiting |\$\(QUIETLY\) ", line)]
