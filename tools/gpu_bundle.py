# SPDX-License-Identifier: Apache-2.0
"""`make gpu-bundle`: one folder that builds and measures sennit on a GPU machine without a network.

It has the sources that git tracks without the documentation, pure wheels of what such a machine may lack, `run.sh`, and
`manifest.json` with the size of everything. It is for Python 3.11 to 3.13, with torch and triton there
(docs/how-to/gpu.md). Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import json
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
NOT_NEEDED: Final = ("docs/", ".ci/", ".github/")
WHEELS: Final = ("rich", "typer", "pytest", "pytest-timeout", "hypothesis", "expecttest")
"""What the command and its tests import, beside numpy, torch and triton. What they need comes with them."""

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
    """Each of `WHEELS`, and what pyproject.toml asks of it, as {"rich": "rich>=13"}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return {name: next(text for text in asked if text.startswith(f"{name}>=")) for name in WHEELS}


def download(folder: Path) -> str | None:
    """Fetches the wheels; returns why that failed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", str(folder)]
    pure = ["--only-binary", ":all:", "--platform", "any", "--implementation", "py", "--abi", "none"]
    done = subprocess.run(
        [*command, *pure, "--python-version", OLDEST_PYTHON, *requirements().values()],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines or [f"pip ended with {done.returncode}"])[-1]


def make(folder: Path, *, with_wheels: bool = True) -> dict[str, Any]:
    """Makes the folder anew, and returns its manifest. Raises SystemExit if it is larger than `MOST_BYTES`."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    for name in sources():
        target = folder / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (folder / "run.sh").write_text(RUN, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    left_out = download(wheels) if with_wheels else "not asked for"
    sizes = {
        str(path.relative_to(folder)): path.lstat().st_size for path in sorted(folder.rglob("*")) if not path.is_dir()
    }
    manifest: dict[str, Any] = {
        "schema": 1,
        "commit": _commit(),
        "bytes": sum(sizes.values()),
        "minimum": {name: text.removeprefix(f"{name}>=") for name, text in requirements().items()},
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
    parser.add_argument("--without-wheels", action="store_true", help="for a machine that has all of them")
    chosen = parser.parse_args(arguments)
    manifest = make(chosen.folder, with_wheels=not chosen.without_wheels)
    if manifest["wheels_left_out"]:
        print(f"gpu-bundle: without wheels ({manifest['wheels_left_out']}): the GPU machine needs {', '.join(WHEELS)}")
    print(f"gpu-bundle: {chosen.folder}, {manifest['bytes'] / 2**20:.1f} MiB, {len(manifest['files'])} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
