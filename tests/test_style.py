# SPDX-License-Identifier: Apache-2.0
"""Runs `make lint` as tests, so that a run of all tests tells whether a change can be merged.

`make test` runs `make types` beside them: it keeps a cache.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ebpf", "offload", "runtime", "sennit", "testbed", "tests", "transport")
CLANG_FORMAT = Path(sys.executable).parent / "clang-format"


def check(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command[:4])} found:\n{done.stdout}{done.stderr}", pytrace=False)


def test_ruff_finds_nothing() -> None:
    check(sys.executable, "-m", "ruff", "check", "--quiet", ".")


def test_python_is_formatted() -> None:
    check(sys.executable, "-m", "ruff", "format", "--check", "--quiet", ".")


@pytest.mark.skipif(not CLANG_FORMAT.exists(), reason="the package clang-format of the extra `dev` is not installed")
def test_cpp_is_formatted() -> None:
    sources = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".cpp", ".hpp", ".h"}
    ]
    check(str(CLANG_FORMAT), "--dry-run", "-Werror", *map(str, sorted(sources)))
