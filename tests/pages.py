# SPDX-License-Identifier: Apache-2.0
"""The blocks of code of a page, and a page run as its reader would: its files saved, its commands in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"Save this as `([^`]+)`")
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)
MARK = "--- block "


@dataclass(frozen=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    saved_as: str
    """The file that the page says to save it as."""

    not_run: str
    """Why no test runs it, from a comment right above it."""

    shown: str
    """What the page says that it prints."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks that have a language. One without is what the block before it prints."""
    text = page.read_text()
    found: list[Block] = []
    end = 0
    fences = list(FENCE.finditer(text))
    for number, fence in enumerate(fences):
        before = text[end : fence.start()]
        end = fence.end()
        if not fence[2]:
            continue
        after = fences[number + 1] if number + 1 < len(fences) else None
        saved, why = SAVED.findall(before), NOT_RUN.search(before)
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text[: fence.start()].count("\n") + 1,
                language=fence[2],
                text=re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE),
                saved_as=saved[-1] if saved else "",
                not_run=why[1] if why else "",
                shown=after[3] if after and not after[2] else "",
            )
        )
    return found


def run(
    page: Path,
    folder: Path,
    *,
    deadline_s: float,
    enter: list[str] | None = None,
    shorter: Mapping[str, str] | None = None,
    until: str | None = None,
) -> dict[int, list[str]]:
    """Runs a page in a folder; returns line of each block of commands -> the lines that it printed.

    `enter` goes before the shell. `shorter` maps words of the page's commands to those of a shorter run. What comes
    after the heading `until` is not run.
    """
    script = ["set -euo pipefail"]
    lines = page.read_text().splitlines()
    end = len(lines) if until is None else lines.index(until)
    for block in blocks(page):
        if block.line > end:
            break
        text = block.text
        for word, other in (shorter or {}).items():
            text = text.replace(word, other)
        if block.saved_as:
            (folder / block.saved_as).write_text(text)
        elif block.language == "sh" and not block.not_run:
            script.append(f"echo '{MARK}{block.line}'\nexport PET_LOG_DIR={folder}/logs/{block.line}\n{text}")
    # Ranks that share an output mix their lines, so torchrun gives each one a file.
    variables = {**os.environ, "PET_REDIRECTS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*(enter or []), "bash", "-c", "\n".join(script)],
        cwd=folder,
        env=variables,
        timeout=deadline_s,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed: dict[int, list[str]] = {}
    for part in done.stdout.split(MARK)[1:]:
        line, _, output = part.partition("\n")
        logs = sorted((folder / "logs" / line).rglob("stdout.log"))
        printed[int(line)] = [*output.splitlines(), *(text for log in logs for text in log.read_text().splitlines())]
    return printed
