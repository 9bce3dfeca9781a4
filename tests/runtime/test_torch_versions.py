# SPDX-License-Identifier: Apache-2.0
"""What torch does not promise to keep is used in one file of C++ and one of Python (tests/test_private_names.py)."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from sennit.runtime.backend import building

ROOT = Path(__file__).resolve().parents[2]
CXX = ROOT / "runtime" / "backend" / "csrc" / "torch_versions.hpp"


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
