# SPDX-License-Identifier: Apache-2.0
"""A compiler launcher of CMake: takes objects that a checkout has of the same sources, and compiles the others.

    -DCMAKE_CXX_COMPILER_LAUNCHER="python3;tests/checkout_objects.py;BUILD FOLDER;ccache"

An object is taken if its command has the same definitions and flags for the same source of the same target. Warnings,
places of headers, and what only files ask for that name it (`OPTIONAL`) do not count.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

OPTIONAL: Final = ("SENNIT_ISAL", "SENNIT_LIBURING")
"""Definitions of targets whose headers never ask for them."""

_WITH_VALUE: Final = ("-I", "-isystem", "-o", "-c", "-MT", "-MF")
_LEFT_OUT: Final = ("-I", "-W", "-MD")


_INCLUDED: Final = re.compile(r'^#include "(/.*\.cpp)"$', re.MULTILINE)


def sources_of(source: Path) -> list[Path]:
    """The files of a group that CMake compiles as one, else the file alone."""
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    return [Path(one) for one in _INCLUDED.findall(text)] or [source]


def part_of(command: Sequence[str]) -> tuple[str, str, list[str], list[str]]:
    """Target, object, names of sources, and what decides the object, of a command of the compiler with arguments."""
    words, found, kept = iter(command), dict[str, str](), []
    for word in words:
        if word in _WITH_VALUE:
            found[word] = next(words)
        elif not word.startswith(_LEFT_OUT):
            kept.append(word)
    sources = sources_of(Path(found.get("-c", "")))
    text = "".join(one.read_text(encoding="utf-8") for one in sources if one.is_file())
    unasked = tuple(f"-D{name}" for name in OPTIONAL if name not in text)
    decides = sorted(word for word in kept if not (unasked and word.startswith(unasked)))
    made = found.get("-o", "")
    return made.partition(".dir/")[0], made, [one.name for one in sources], decides


def known(build: Path, command: Sequence[str]) -> Path | None:
    """The object of the checkout for this command."""
    target, _, sources, decides = part_of(command)
    for one in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        if [path.name for path in sources_of(Path(one["file"]))] == sources:
            there, made, _, other = part_of(shlex.split(one["command"])[1:])
            if (there, other) == (target, decides) and (build / made).is_file():
                return build / made
    return None


def main(build: Path, launcher: str, command: Sequence[str]) -> None:
    found = known(build, command[1:])
    if found is None:
        words = [*filter(None, [launcher]), *command]
        os.execvp(words[0], words)
    made, depends = (Path(command[command.index(flag) + 1]) for flag in ("-o", "-MF"))
    shutil.copyfile(found, made)
    depends.write_text(f"{made}: {command[command.index('-c') + 1]}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
