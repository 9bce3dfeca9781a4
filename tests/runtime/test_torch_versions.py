# SPDX-License-Identifier: Apache-2.0
"""What torch does not promise to keep is used in one file of Python and one of C++."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sennit.runtime.backend import building

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ebpf", "examples", "offload", "runtime", "sennit", "testbed", "transport")
PYTHON = ROOT / "runtime" / "backend" / "torch_versions.py"
CXX = ROOT / "runtime" / "backend" / "csrc" / "torch_versions.hpp"
# Of the standard library.
PUBLIC = {"_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a file defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def of_others(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of other packages that a file imports or uses, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("sennit", "__future__")):
            if any(map(is_private, [*node.module.split("."), *(alias.name for alias in node.names)])):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            if any(is_private(part) for alias in node.names for part in alias.name.split(".")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PUBLIC:
            text = ast.unparse(node)
            if node.attr not in ours or text.startswith(("torch.", "dist.")):
                yield node.lineno, text


def test_private_names_of_torch_are_used_in_one_file() -> None:
    trees = {
        path: ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != PYTHON
    }
    ours = {name for tree in trees.values() for name in own_names(tree)}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, tree in trees.items()
        for line, text in of_others(tree, ours)
    ]
    assert not found, f"move what is private to {PYTHON.relative_to(ROOT)}, or take a public name: {found}"
    assert list(of_others(ast.parse(PYTHON.read_text()), ours)), "the search finds nothing at all"


def test_private_headers_of_torch_are_included_in_one_file() -> None:
    private = re.compile(r"#include <torch/|TORCH_VERSION")
    using = {path for path in CXX.parent.glob("*.[ch]pp") if private.search(path.read_text())}
    # The version that the extension was built for, which Python compares.
    told = {path for path in using if path.name == "module.cpp" and "TORCH_VERSION;" in path.read_text()}
    assert using - told == {CXX}


def test_the_backend_is_there_where_a_module_of_ours_imports_torch_first() -> None:
    """torch then registers the backend while torch_versions.py is read."""
    program = "import sennit.runtime.backend.torch_versions, torch.distributed as dist; print(dist.Backend.SENNIT)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("sennit\n", "")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["2.11.0", "2.12.0", "2.14.1"])
def test_the_extension_compiles_with_other_releases_of_torch(version: str, tmp_path: Path) -> None:
    """Against the headers in the wheel for macOS: they are those for Linux, and the wheel is the smallest, 80 MB."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(tmp_path)]
    for oldest in ("11_0", "14_0"):
        command += ["--platform", f"macosx_{oldest}_arm64"]
    done = subprocess.run([*command, f"torch=={version}"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip finds no torch {version} for macOS: {done.stderr[-200:]}")
    (path,) = tmp_path.glob("torch-*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if name.startswith("torch/include/")])
    path.unlink()
    headers = tmp_path / "torch" / "include"
    includes = [f"-I{CXX.parent}", f"-I{ROOT / 'transport' / 'csrc' / 'include'}", "-isystem", str(headers)]
    includes += ["-isystem", str(headers / "torch" / "csrc" / "api" / "include")]
    includes += ["-isystem", sysconfig.get_path("include")]
    done = subprocess.run(
        [*building.compiler(), *building.FLAGS, "-fsyntax-only", *includes, str(CXX.parent / "unit.cpp")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
