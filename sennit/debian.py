# SPDX-License-Identifier: Apache-2.0
"""Packages of the distribution, downloaded and unpacked without being installed: no root needed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sennit.errors import SennitError

QUERY_TIMEOUT_S: Final = 60.0
DOWNLOAD_TIMEOUT_S: Final = 1200.0
OUTPUT_TAIL_LINES: Final = 30


class Unavailable(SennitError):
    """This machine lacks something that has to be installed first; the message says what, and how."""


class StepFailed(SennitError):
    """A program that should have worked did not; the message has the end of its output."""


def require(commands: Iterable[tuple[str, str]], purpose: str) -> None:
    """Raises `Unavailable`, which names all that are missing, unless every (command, package) is there."""
    missing = [(command, package) for command, package in commands if shutil.which(command) is None]
    if missing:
        names = ", ".join(command for command, _ in missing)
        packages = " ".join(sorted({package for _, package in missing}))
        raise Unavailable(f"{purpose} needs {names}: apt-get install {packages}")


def execute(command: list[str], *, cwd: Path | None = None, timeout_s: float, log: Path | None = None) -> str:
    """The output of a program that has to succeed. It is also added to `log`."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepFailed(f"'{' '.join(command[:3])} ...' did not end within {timeout_s:g} s") from None
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stdout}")
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-OUTPUT_TAIL_LINES:])
        raise StepFailed(f"'{' '.join(command[:3])} ...' ended with status {done.returncode}:\n{tail}")
    return done.stdout


def system() -> str:
    """What this system calls itself, such as `Ubuntu 24.04` (os-release(5))."""
    try:
        known = platform.freedesktop_os_release()
    except OSError:
        return "this system"
    return f"{known['NAME']} {known.get('VERSION_ID', '')}".strip()


def candidate(package: str) -> str:
    """The version that apt would install."""
    _require_apt(package)
    policy = execute(["apt-cache", "policy", package], timeout_s=QUERY_TIMEOUT_S)
    found = re.search(r"^ *Candidate: (\S+)$", policy, re.MULTILINE)
    if found is None or found[1] == "(none)":
        raise Unavailable(f"apt knows no package {package}: run 'apt-get update'; Debian 12 and 13 have it")
    return found[1]


def names(prefix: str) -> list[str]:
    """The packages that apt knows whose names begin so, in no order."""
    _require_apt(f"{prefix}*")
    return execute(["apt-cache", "pkgnames", prefix], timeout_s=QUERY_TIMEOUT_S).splitlines()


def _require_apt(packages: str) -> None:
    missing = [program for program in ("apt-get", "apt-cache", "dpkg") if shutil.which(program) is None]
    if missing:
        raise Unavailable(f"{packages} is a package of Debian or Ubuntu: {system()} has no {', '.join(missing)}")


def unpack(package: str, version: str, into: Path) -> None:
    """Puts the files of a package below `into`."""
    with tempfile.TemporaryDirectory(dir=into.parent) as downloads:
        execute(["apt-get", "download", f"{package}={version}"], cwd=Path(downloads), timeout_s=DOWNLOAD_TIMEOUT_S)
        (archive,) = Path(downloads).glob("*.deb")
        execute(["dpkg", "-x", str(archive), str(into)], timeout_s=DOWNLOAD_TIMEOUT_S)
