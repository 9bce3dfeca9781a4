# SPDX-License-Identifier: Apache-2.0
"""`bash run.sh OUT` of a bundle (gpu_bundle.py): builds sennit in OUT, and runs `sennit bench gpu` with it.

Nothing is installed, and nothing is fetched. OUT gets `site` (packages, native parts, tests), `wheels` (unpacked, only
what this Python lacks), `build`, `build.log` and `results`. A second run over the first compiles only what has changed.
Without a compiler, or if the build fails, the Python parts are there, and all that needs no native part runs. Only the
standard library is used here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

SOURCES: Final = Path(__file__).resolve().parents[1]
BUNDLE: Final = SOURCES.parent
COMPILERS: Final = ("c++", "g++", "clang++")
BUILD_LIMIT_S: Final = 1_800.0
"""Minutes on 16 cores. A busy machine with two takes a quarter of an hour."""

OLDEST_TORCH: Final = (2, 11)
BYTES_A_JOB: Final = 2 << 30
"""What the compiler takes for a file that includes torch's headers."""

LOG_LINES: Final = 40


def say(text: str) -> None:
    print(f"run: {text}", flush=True)


def lay_out(site: Path, project: dict[str, Any]) -> None:
    """Puts the packages where they are imported from, with the tests beside them, as if sennit were installed."""
    shutil.rmtree(site, ignore_errors=True)
    not_python = shutil.ignore_patterns("csrc", "__pycache__", "CMakeLists.txt")
    packages: dict[str, str] = project["tool"]["scikit-build"]["wheel"]["packages"]
    for target, source in sorted(packages.items()):  # `sennit` comes before what lies in it
        shutil.copytree(SOURCES / source, site / target, ignore=not_python, dirs_exist_ok=True)
    for folder in ("tests", "examples"):
        shutil.copytree(SOURCES / folder, site / folder)
    shutil.copy2(SOURCES / "pyproject.toml", site)
    about = project["project"]
    metadata = site / f"{about['name']}-{about['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n", encoding="utf-8"
    )
    groups = {"console_scripts": about["scripts"], **about["entry-points"]}
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in of.items()) for group, of in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def lacks(distribution: str, minimum: str) -> bool:
    """Whether this Python has no such distribution, or an older one."""
    try:
        there = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return True
    return _numbers(there) < _numbers(minimum)


def _numbers(version: str) -> list[int]:
    return [int(text) for text in re.findall(r"\d+", version)[:3]]


def is_for_this_python(wheel: Path) -> bool:
    """Its name ends with the tags of Python, of the ABI and of the platform."""
    python, abi, of = wheel.stem.rsplit("-", 3)[1:]
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return abi == "none" or (python == abi == ours and of.endswith(f"_{platform.machine()}"))


def unpack_wheels(folder: Path) -> list[str]:
    """Unpacks what is lacking, unless it is compiled for another Python; returns the names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    minimum = json.loads((BUNDLE / "manifest.json").read_text(encoding="utf-8"))["minimum"]
    found = []
    for path in sorted((BUNDLE / "wheels").glob("*.whl")):
        name = path.name.partition("-")[0].replace("_", "-").lower()
        if is_for_this_python(path) and lacks(name, minimum.get(name, "0")):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(folder)
            found.append(name)
    return found


def taken_from(environment: dict[str, str]) -> Path:
    """The folder that `import sennit` finds. An editable installation comes before PYTHONPATH."""
    ask = "import importlib.util as u; print(u.find_spec('sennit').submodule_search_locations[0])"
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True, cwd=BUNDLE
    )
    return Path(done.stdout.strip())


def build_problem() -> str | None:
    """What the native parts lack on this machine; None: they can be built."""
    compiler = os.environ.get("CXX")
    if not any(map(shutil.which, [compiler] if compiler else COMPILERS)):
        return f"no C++ compiler ({compiler or ', '.join(COMPILERS)})"
    if shutil.which("cmake") is None:
        return "no cmake"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"no headers of Python {sys.version_info.major}.{sys.version_info.minor} (Python.h)"
    if importlib.util.find_spec("nanobind") is None:
        return "no nanobind"
    return None


def torch_problem() -> str | None:
    """Why the extension for torch cannot be built; None: it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "no torch"
    needed = ".".join(map(str, OLDEST_TORCH))
    return f"torch {version}; needed: {needed} or later" if lacks("torch", needed) else None


def exit_code(command: Sequence[str], output: IO[bytes], limit_s: float) -> int | None:
    """The exit code of a command; None if it took too long: then it is killed, with all that it has started."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def build(out: Path, site: Path, defined: Sequence[str], *, with_torch: bool) -> str | None:
    """Compiles what has changed, and installs into `site`; returns why it failed. All output is in `build.log`.

    `with_torch`: the extension for torch, too.
    """
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    most = int(available[1]) * 1024 // BYTES_A_JOB if available else 1
    jobs = max(1, min(len(os.sched_getaffinity(0)), most))
    configure = ["cmake", "-S", str(SOURCES), "-B", str(out / "build"), f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DSENNIT_TORCH={int(with_torch)}", "-DSENNIT_LAB=OFF", "-DSENNIT_WARNINGS_ARE_ERRORS=OFF"]
    configure += [f"-D{text}" for text in defined]
    if shutil.which("ninja") is not None:
        configure += ["-G", "Ninja"]
    commands = [configure, ["cmake", "--build", str(out / "build"), "--parallel", str(jobs)]]
    for component in ("python", "torch") if with_torch else ("python",):
        commands.append(["cmake", "--install", str(out / "build"), "--component", component, "--prefix", str(site)])
    began_s = time.monotonic()
    with (out / "build.log").open("wb") as log:
        for command in commands:
            limit_s = max(0.0, BUILD_LIMIT_S - (time.monotonic() - began_s))
            code = exit_code(command, log, limit_s)
            if code != 0:
                how = f"exit code {code}" if code is not None else f"not done after {BUILD_LIMIT_S:.0f} s"
                return f"{how}: {' '.join(command)}"
    for line in (out / "build.log").read_text(errors="replace", encoding="utf-8").splitlines():
        if line.startswith("sennit: built without"):
            say(line.removeprefix("sennit: "))
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.sh")
    parser.add_argument("out", type=Path, help="folder for everything; it is made")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, in Triton's interpreter; times nothing")
    parser.add_argument("--build-only", action="store_true", help="run nothing: a later call finds all compiled")
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="an option of CMake")
    chosen = parser.parse_args(arguments)
    out: Path = chosen.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        print(f"run: error: cannot write {out}: {error.strerror}; choose another folder", file=sys.stderr)
        return 1
    began_s, site = time.monotonic(), out / "site"
    lay_out(site, tomllib.loads((SOURCES / "pyproject.toml").read_text(encoding="utf-8")))
    if unpacked := unpack_wheels(out / "wheels"):
        say(f"from wheels: {', '.join(unpacked)}")
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{out / 'wheels'}", "PYTHONSAFEPATH": "1"}
    if (other := taken_from(environment)) != site / "sennit":
        print(f"run: error: {sys.executable} has a sennit of its own, {other}; set PYTHON to another", file=sys.stderr)
        return 1
    problem, of_torch = build_problem(), torch_problem()
    if problem is None:
        say("building the native parts")
        problem = build(out, site, chosen.define, with_torch=of_torch is None)
        if problem is not None:
            print(
                "\n".join((out / "build.log").read_text(errors="replace", encoding="utf-8").splitlines()[-LOG_LINES:]),
                flush=True,
            )
    took_s = round(time.monotonic() - began_s, 1)
    say(f"the native parts are not built: {problem}" if problem else f"built in {took_s:.0f} s")
    if problem is None and of_torch is not None:
        problem = f"the extension for torch is not built: {of_torch}"
        say(problem)
    (out / "build.json").write_text(json.dumps({"seconds": took_s, "problem": problem}) + "\n", encoding="utf-8")
    if chosen.build_only:
        return int(problem is not None)
    results = out / "results"
    command = [sys.executable, "-m", "sennit", "bench", "gpu", "--report", str(results)]
    command += ["--json", str(results / "gpu.json"), *(["--interpreter"] if chosen.rehearse else [])]
    results.mkdir(exist_ok=True)
    code = subprocess.run(command, cwd=out, env=environment, check=False).returncode
    if (results / "summary.md").exists():
        print((results / "summary.md").read_text(encoding="utf-8"))
        say(f"{results / 'summary.md'}; the JSON and the output of each part are beside it")
    return code or int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
