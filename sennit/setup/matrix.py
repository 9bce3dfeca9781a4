# SPDX-License-Identifier: Apache-2.0
"""`make matrix`: sennit with every Python and every CPU build of torch that this machine can install.

Each pair gets a clone of the last commit in a folder of its own, and there: wheels, the README's first commands from
the wheels (`make try-wheels`: first AllReduce, training), and the quick ring of tests. Prints a table; a pair that
fails has its step and the file with the whole output in it. `make matrix PAIRS="3.11:2.13.0 3.12:2.14.1"` takes these
pairs alone.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "matrix"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 13)
STEP_TIMEOUT_S = 3600
QUICK_RING = ["tests/transport", "tests/runtime/test_backend_collectives.py", "tests/runtime/test_sharded.py"]
FIRST_ALLREDUCE = re.compile(r"([0-9.]+) s  from nothing to the first AllReduce")
TRAINED = re.compile(r"([0-9.]+) s  sennit train")
PASSED = re.compile(r"(\d+) passed")


class Pair(NamedTuple):
    python: str
    """The interpreter."""

    torch: str
    """A version, as 2.13.0."""

    @property
    def name(self) -> str:
        return f"{Path(self.python).name} torch-{self.torch}"


def version_of(python: str) -> tuple[int, int] | None:
    """Of an interpreter that can make a venv; None for any other."""
    code = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    found = tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()
    return (found[0], found[1]) if len(found) == 2 and found >= OLDEST_PYTHON else None


def pythons() -> list[str]:
    """One interpreter of each minor version, from the oldest that sennit takes."""
    names = ["/usr/bin/python3", "python3", *(f"python3.{minor}" for minor in range(OLDEST_PYTHON[1], 30))]
    found: dict[tuple[int, int], str] = {}
    for name in names:
        path = shutil.which(name)
        version = version_of(path) if path else None
        if path and version:
            found.setdefault(version, path)
    return [found[version] for version in sorted(found)]


def cpu_builds(python: str) -> list[str]:
    """The newest patch of each minor release of torch of which pip finds a CPU build for this Python, newest first.

    Their versions end in +cpu. The others are for CUDA, and bring gigabytes.
    """
    env = BUILD / f"pip-{Path(python).name}"
    if not env.exists():
        subprocess.run([python, "-m", "venv", str(env)], check=True)
    listed = subprocess.run(
        [str(env / "bin" / "pip"), "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    newest: dict[tuple[int, int], str] = {}
    for major, minor, patch in re.findall(r"\b(\d+)\.(\d+)\.(\d+)\+cpu", listed.stdout):
        if (int(major), int(minor)) >= OLDEST_TORCH:
            newest.setdefault((int(major), int(minor)), f"{major}.{minor}.{patch}")
    return [newest[release] for release in sorted(newest, reverse=True)]


def pairs() -> Iterator[Pair]:
    """Those of PAIRS, or all."""
    asked = os.environ.get("PAIRS", "").split()
    for pair in asked:
        python, _, torch = pair.partition(":")
        yield Pair(shutil.which(f"python{python}") or python, torch)
    if asked:
        return
    for python in pythons():
        found = cpu_builds(python)
        if not found:
            print(f"matrix: {python}: pip finds no CPU build of torch from {'.'.join(map(str, OLDEST_TORCH))} on")
        yield from (Pair(python, torch) for torch in found)


def ended(command: list[str], folder: Path, log: Path, variables: dict[str, str]) -> str:
    """Runs a step; returns what it printed. Raises RuntimeError with the last line of a step that fails."""
    with log.open("a") as output:
        start = output.tell()
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **variables},
                timeout=STEP_TIMEOUT_S,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(str(error)) from error
    printed = log.read_text()[start:]
    if code != 0:
        lines = [line for line in printed.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit status {code}")
    return printed


def figure(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else "?"


def row(pair: Pair, say: Callable[[str], None]) -> list[str]:
    """The cells of a pair: Python, torch, wheels, first AllReduce, training, tests."""
    cells = [Path(pair.python).name, pair.torch]
    folder, log = BUILD / pair.name.replace(" ", "-"), BUILD / f"{pair.name.replace(' ', '-')}.log"
    shutil.rmtree(folder, ignore_errors=True)
    log.write_text("")
    variables = {"PYTHON": pair.python, "SENNIT_BUILD_TORCH": f"torch=={pair.torch}"}
    try:
        ended(["git", "clone", "--quiet", str(ROOT), str(folder)], BUILD, log, variables)
        start = time.monotonic()
        say("wheels")
        ended(["make", "wheels"], folder, log, variables)
        cells.append(f"{time.monotonic() - start:.0f} s")
        say("first AllReduce and a training run from them")
        tried = ended(["sennit/setup/try_wheels.sh"], folder, log, variables)
        cells += [f"{figure(FIRST_ALLREDUCE, tried)} s", f"{figure(TRAINED, tried)} s"]
        say("quick ring")
        quick = [".venv/bin/python", "-m", "pytest", "-q", "-m", "not slow and not root", *QUICK_RING]
        cells.append(f"{figure(PASSED, ended(quick, folder, log, variables))} passed")
    except RuntimeError as error:
        cells.append(f"FAILED: {error} ({log.relative_to(ROOT)})")
    else:
        shutil.rmtree(folder)
    return cells


def main() -> None:
    """Exits with 1 if a pair fails, or if there is none."""
    BUILD.mkdir(parents=True, exist_ok=True)
    rows = [["python", "torch", "wheels", "first AllReduce", "training run", "quick ring"]]
    for pair in pairs():
        rows.append(row(pair, lambda step, pair=pair: print(f"matrix: {pair.name}: {step}", flush=True)))  # type: ignore[misc]
    widths = [max(len(cells[column]) for cells in rows if column < len(cells)) for column in range(len(rows[0]))]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())
    if len(rows) == 1 or any("FAILED" in cells[-1] for cells in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
