# SPDX-License-Identifier: Apache-2.0
"""Takes from the first page what a newcomer without a clone copies: the programs that it says to save, the commands.

Used by try_wheels.sh: `first_page.py README.md FOLDER` writes the programs, and `first_page.sh` with a command a line.
"""

import re
import sys
from pathlib import Path

SECTION = "Without a clone"
SAVED = re.compile(r"Save this as `([^`]+)`[^`]*?(?:`[^`]*`[^`]*?)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def take(page: Path, folder: Path) -> None:
    """Writes what the page shows. Raises SystemExit if it has no such section, or nothing to save."""
    text = page.read_text(encoding="utf-8")
    section = re.search(rf"^## {SECTION}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    commands = re.search(r"^```sh\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL) if section else None
    programs = SAVED.findall(text)
    if commands is None or not programs:
        raise SystemExit(f"{page}: no commands in a section '{SECTION}', or no program to save")
    for name, program in programs:
        (folder / name).write_text(program, encoding="utf-8")
    lines = [line.partition("  #")[0].rstrip() for line in commands[1].splitlines()]
    (folder / "first_page.sh").write_text("".join(f"{line}\n" for line in lines if line), encoding="utf-8")


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
