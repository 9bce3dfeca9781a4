# SPDX-License-Identifier: Apache-2.0
"""Which Pythons `make matrix` takes, and what it says of the others."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load() -> Any:
    """The script, which no package has."""
    spec = importlib.util.spec_from_file_location("pythons", ROOT / "sennit" / "setup" / "pythons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pythons = load()


def program(folder: Path, text: str) -> Path:
    path = folder / "bin" / "python3"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_pyenv_has_is_taken_although_its_shim_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = program(tmp_path / "versions" / "here", f'exec {sys.executable} "$@"')
    shim = program(tmp_path / "shims", "echo 'pyenv: python3: command not found' >&2; exit 127")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(pythons.shutil, "which", lambda name: str(shim) if name == "python3" else None)
    assert pythons.candidates() == [str(shim), str(here)]
    found, skipped = pythons.find_pythons()
    assert [python.version for python in found] == [platform.python_version()]
    assert skipped == [(str(shim), "it does not start: pyenv: python3: command not found")]


def test_what_is_too_old_or_cannot_compile_is_named(tmp_path: Path) -> None:
    old = program(tmp_path / "old", "echo 3 10 13; echo /usr/bin/python3.10")
    assert pythons.ask(str(old)) == "it is 3.10.13, and sennit needs 3.11 or later"
    bare = program(tmp_path / "bare", "echo 3 14 0; echo /x; echo /nowhere/Python.h")
    assert pythons.ask(str(bare)).startswith("/nowhere/Python.h is missing")
    half = program(tmp_path / "half", "echo 3 14 0; echo /x; exit 1")
    assert "virtual environment" in pythons.ask(str(half))
    assert pythons.Python("/x", "3.12.1").stable
    assert not pythons.Python("/x", "3.11.2").stable
