# SPDX-License-Identifier: Apache-2.0
"""`make gpu-bundle`: one folder that builds and measures sennit on a GPU machine without a network.

It has the sources that git tracks without the documentation, wheels of what such a machine may lack, `run.sh`, and
`manifest.json` with the size of everything. It is for Python 3.11 to 3.13, with torch and triton there
(docs/how-to/gpu.md). All wheels are pure but pyarrow's, which is for one version of Python. Only the standard library
is used here.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
MOST_BYTES: Final = 60 << 20
OLDEST_PYTHON: Final = "3.11"
USUAL_PYTHON: Final = "3.12"
NOT_NEEDED: Final = ("docs/", ".ci/", ".github/")
WHEELS: Final = ("rich", "typer", "pytest", "pytest-timeout", "hypothesis", "expecttest")
"""What the command and its tests import, beside numpy, torch and triton. What they need comes with them."""

COMPILED_WHEELS: Final = {"pyarrow": "pyarrow>=16,<22"}
"""What the parts that train import. Later wheels are 10 MiB larger, and the folder must stay below `MOST_BYTES`."""

PLATFORMS: Final = ("manylinux_2_28", "manylinux2014")

RUN: Final = """#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bash run.sh OUT [--rehearse]: builds sennit in OUT, runs all that needs a GPU, and writes OUT/results/summary.md.
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "run: error: $python is no Python of 3.11 or later ($("$python" -V 2>&1)); set PYTHON to one" >&2
  exit 1
}
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/src/tools/gpu_run.py" "$@"
"""


def sources() -> list[Path]:
    """The files that travel, relative to the root. Raises SystemExit if this is no clone."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"gpu-bundle: error: {ROOT} is no clone: {done.stderr.strip()}")
    names = [name for name in done.stdout.split("\0") if name and not name.startswith(NOT_NEEDED)]
    return [Path(name) for name in names if (ROOT / name).is_file() or (ROOT / name).is_symlink()]


def requirements() -> dict[str, str]:
    """Each package of the wheels, and what pip is asked for, as {"rich": "rich>=13"}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return {name: next(text for text in asked if text.startswith(f"{name}>=")) for name in WHEELS} | COMPILED_WHEELS


def download(folder: Path, python: str) -> str | None:
    """Fetches the wheels, the compiled ones for this version of Python; returns why that failed."""
    pure = ["--platform", "any", "--implementation", "py", "--abi", "none", "--python-version", OLDEST_PYTHON]
    compiled = ["--no-deps", "--implementation", "cp", "--python-version", python]
    for name in PLATFORMS:
        compiled += ["--platform", f"{name}_{platform.machine()}"]
    asked = requirements()
    names = [asked[name] for name in WHEELS]
    return _fetch(folder, [*pure, *names]) or _fetch(folder, [*compiled, *COMPILED_WHEELS.values()])


def _fetch(folder: Path, arguments: Sequence[str]) -> str | None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, "--only-binary", ":all:", *arguments], capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines or [f"pip ended with {done.returncode}"])[-1]


def make(folder: Path, *, python: str = USUAL_PYTHON, with_wheels: bool = True) -> dict[str, Any]:
    """Makes the folder anew for a version of Python, and returns its manifest.

    Raises SystemExit if it is larger than `MOST_BYTES`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    for name in sources():
        target = folder / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (folder / "run.sh").write_text(RUN, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    left_out = download(wheels, python) if with_wheels else "not asked for"
    sizes = {
        str(path.relative_to(folder)): path.lstat().st_size for path in sorted(folder.rglob("*")) if not path.is_dir()
    }
    manifest: dict[str, Any] = {
        "schema": 1,
        "commit": _commit(),
        "bytes": sum(sizes.values()),
        "minimum": {name: text.removeprefix(f"{name}>=").partition(",")[0] for name, text in requirements().items()},
        "wheels_left_out": left_out,
        "files": sizes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    if manifest["bytes"] > MOST_BYTES:
        raise SystemExit(f"gpu-bundle: error: {manifest['bytes'] / 2**20:.1f} MiB; allowed: {MOST_BYTES >> 20}")
    return manifest


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make gpu-bundle")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=USUAL_PYTHON, help="version of the GPU machine's; default: %(default)s")
    parser.add_argument("--without-wheels", action="store_true", help="for a machine that has all of them")
    chosen = parser.parse_args(arguments)
    manifest = make(chosen.folder, python=chosen.python, with_wheels=not chosen.without_wheels)
    if manifest["wheels_left_out"]:
        needed = ", ".join(manifest["minimum"])
        print(f"gpu-bundle: without wheels ({manifest['wheels_left_out']}): the GPU machine needs {needed}")
    print(f"gpu-bundle: {chosen.folder}, {manifest['bytes'] / 2**20:.1f} MiB, {len(manifest['files'])} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
