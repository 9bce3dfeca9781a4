# SPDX-License-Identifier: Apache-2.0
"""What `make try-wheels` takes from the README: the commands of a newcomer without a clone, and what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import pages

TAKE = pages.ROOT / "tools" / "first_page.py"
README = pages.ROOT / "README.md"


def take(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TAKE), str(page), str(folder)], capture_output=True, text=True, check=False
    )


def test_every_program_that_the_commands_start_is_one_to_save(tmp_path: Path) -> None:
    assert take(README, tmp_path).returncode == 0
    commands = (tmp_path / "first_page.sh").read_text().splitlines()
    programs = {word for command in commands for word in command.split() if word.endswith(".py")}
    assert programs
    assert programs == {path.name for path in tmp_path.glob("*.py")}
    assert sum(command.startswith(("torchrun", "sennit")) for command in commands) >= 5
    assert not any("#" in command for command in commands)


def test_a_page_without_them_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(README.read_text().replace("## Without a clone", "## Elsewhere"))
    refused = take(page, tmp_path)
    assert refused.returncode == 1
    assert "no commands in a section 'Without a clone'" in refused.stderr
