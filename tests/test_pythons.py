# SPDX-License-Identifier: Apache-2.0
"""Which Pythons `make matrix` takes, what it says of the others, and from which on one wheel fits all."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scikit_build_core.builder.wheel_tag import WheelTag

ROOT = Path(__file__).resolve().parents[1]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]


def load(name: str) -> Any:
    """A script, which no package has."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pythons = load("pythons")
sys.modules["tools.pythons"] = pythons  # by this name the matrix asks for it
matrix = load("matrix")


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


class Version(NamedTuple):
    major: int
    minor: int
    micro: int


@pytest.mark.parametrize(("minor", "stable"), [(11, False), (12, True), (14, True)])
def test_from_the_stable_abi_on_a_wheel_is_tagged_for_all_pythons(
    minor: int, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", Version(3, minor, 0))
        tag = str(WheelTag.compute_best(["x86_64"], WHEEL["py-api"]))
    assert tag.startswith("cp312-abi3-") == stable, tag
    assert pythons.Python("/x", f"3.{minor}.0").stable == stable


def test_every_module_of_the_core_is_compiled_for_the_stable_abi() -> None:
    """Otherwise a wheel would be tagged for Pythons that cannot load it."""
    files = [path for folder in WHEEL["packages"].values() for path in (ROOT / folder).rglob("CMakeLists.txt")]
    modules = [line for path in files for line in re.findall(r"nanobind_add_module\((.*)", path.read_text())]
    assert len(modules) >= 5
    assert not [line for line in modules if "STABLE_ABI" not in line.split()]
    # What they set, such as that leaks are not listed, is theirs alone.
    assert not [line for line in modules if "NB_DOMAIN sennit" not in line]


PRODUCTS = """
from sennit.runtime.kernels import _kernels
kept = _kernels.Products("portable")
"""
PLAN = """
from sennit.transport import _core
from sennit.transport.algorithms.barrier import barrier
from sennit.transport.plans.plan_codec import encode
kept = _core.Plan(encode(barrier(world=2, rank=0)))
"""


@pytest.mark.parametrize("keep", [PRODUCTS, PLAN], ids=["kernels", "core"])
def test_a_program_does_not_end_with_a_list_of_what_torch_holds(keep: str) -> None:
    """Torch lets go of an autograd graph after the end of Python, and so of our objects in it."""
    code = f"import ctypes\n{keep}\nctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_step_of_the_matrix_runs_once_and_shows_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    row = matrix.Row(matrix.Pair(pythons.Python("python3", "3.12.1"), ""), lambda _: None)
    counting = ["bash", "-c", "echo one >>times; wc -l <times; exit $1", "bash"]
    assert row.run([*counting, "0"], tmp_path).endswith("\n1\n")
    with pytest.raises(RuntimeError, match=r"^2$"):
        row.run([*counting, "3"], tmp_path)
    assert "wc -l" in row.log.read_text()
