# SPDX-License-Identifier: Apache-2.0
"""Finds the Pythons of this machine that sennit can be built with: on the path, and those that pyenv has installed."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

OLDEST = (3, 11)
NEWEST_MINOR = 29
# nanobind's stable ABI starts here.
STABLE = (3, 12)
START_TIMEOUT_S = 60
PROBE = """
import os, sys, sysconfig
print(*sys.version_info[:3])
print(os.path.realpath(sys.executable))
import ensurepip, venv
print(os.path.join(sysconfig.get_path("include"), "Python.h"))
"""


class Python(NamedTuple):
    path: str
    """The interpreter itself, not a shim that starts it."""

    version: str
    """The version, such as 3.12.1."""

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def stable(self) -> bool:
        """Whether a wheel for the stable ABI fits this Python."""
        return tuple(map(int, self.minor.split("."))) >= STABLE


def find_pythons() -> tuple[list[Python], list[tuple[str, str]]]:
    """One Python of each minor version, from the oldest that sennit takes on; and what was skipped, with the reason."""
    found: dict[str, Python] = {}
    skipped: dict[str, str] = {}
    for path in candidates():
        answer = ask(path)
        if isinstance(answer, str):
            skipped[path] = answer
        elif (taken := found.setdefault(answer.minor, answer)).path != answer.path:
            skipped[answer.path] = f"{answer.minor} is {taken.path} already"
    return sorted(found.values(), key=lambda python: tuple(map(int, python.version.split(".")))), list(skipped.items())


def candidates() -> list[str]:
    """Paths of interpreters, each once: the system's, those on the path, those of pyenv.

    pyenv's on the path are shims, which start the versions chosen for a folder alone.
    """
    names = ["/usr/bin/python3", "python3", *(f"python3.{minor}" for minor in range(OLDEST[1], NEWEST_MINOR + 1))]
    paths = [path for name in names if (path := shutil.which(name))]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths += [str(path) for path in sorted(versions.glob("*/bin/python3"))]
    return list(dict.fromkeys(paths))


def ask(path: str) -> Python | str:
    """The Python of a path, or why it cannot be taken."""
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stdout.splitlines()
    if not lines:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"it does not start: {said[0]}"
    version = lines[0].split()
    if tuple(map(int, version[:2])) < OLDEST:
        return f"it is {'.'.join(version)}, and sennit needs {'.'.join(map(str, OLDEST))} or later"
    if len(lines) < 3:
        return "it cannot make a virtual environment (Debian: python3-venv)"
    if not Path(lines[2]).exists():
        return f"{lines[2]} is missing, so nothing can be compiled for it (Debian: python3-dev)"
    return Python(lines[1], ".".join(version))
