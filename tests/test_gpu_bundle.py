# SPDX-License-Identifier: Apache-2.0
"""`make gpu-bundle`, and `run.sh` in what it makes: on a machine without a network, and on one that lacks something."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_ENVIRONMENT = ("TRITON_INTERPRET", "SENNIT_INTERFACES", "PYTHONPATH")


def load(name: str) -> Any:
    """A script, which no package has."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "sennit" / "setup" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_bundle = load("gpu_bundle")
gpu_run = load("gpu_run")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without wheels, because there may be no index: what they have is installed."""
    folder: Path = tmp_path_factory.mktemp("bundle") / "gpu-bundle"
    gpu_bundle.make(folder, with_wheels=False)
    return folder


def bare_python(folder: Path) -> Path:
    """A Python with the packages of this one, but without sennit, whose installation is editable."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "packages.pth").write_text(sysconfig.get_path("platlib") + "\n")
    return folder / "bin" / "python3"


def run(
    bundle: Path, out: Path, python: Path, *arguments: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in TEST_ENVIRONMENT}
    return subprocess.run(
        [*before, "bash", str(bundle / "run.sh"), str(out), "--rehearse", *arguments],
        env=inherited | {"PYTHON": str(python)} | environment,
        cwd=bundle,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_bundle_is_small_and_knows_what_it_has(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["bytes"] < 60 << 20
    for name in ("run.sh", "src/CMakeLists.txt", "src/sennit/setup/gpu_run.py", "src/tests/conftest.py"):
        assert manifest["files"][name] == (bundle / name).stat().st_size
    assert not (bundle / "src" / "docs").exists()
    assert manifest["minimum"]["rich"] == "13"
    assert manifest["wheels_left_out"] == "not asked for"


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "sources", lambda: [Path("tests/vectors/packets.json")])
    monkeypatch.setattr(gpu_bundle, "MOST_BYTES", 1 << 10)
    with pytest.raises(SystemExit, match=r"0\.2 MiB; allowed: 0"):
        gpu_bundle.make(tmp_path / "large", with_wheels=False)


def test_a_folder_that_cannot_be_written_is_said_in_one_line(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(bundle, tmp_path / "file" / "out", Path(sys.executable))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (f"run: error: cannot write {tmp_path}/file/out: Not a directory; choose another folder\n")


def test_another_sennit_is_not_measured_by_mistake(bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "python"
    python = bare_python(other)
    packages = next(other.glob("lib/*/site-packages"))
    (packages / "sennit").mkdir()
    (packages / "sennit" / "__init__.py").touch()
    (packages / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(packages)!r})\n")
    done = run(bundle, tmp_path / "out", python)
    assert done.returncode == 1
    assert done.stderr == f"run: error: {python} has a sennit of its own, {packages}/sennit; set PYTHON to another\n"


def test_what_the_build_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_run.build_problem() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert gpu_run.build_problem() == "no C++ compiler (no-such-compiler)"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_run.build_problem() == "no C++ compiler (c++, g++, clang++)"
    (tmp_path / "c++").symlink_to("/bin/true")
    assert gpu_run.build_problem() == "no cmake"


def test_a_build_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (tmp_path / "log").open("wb") as log:
        code = gpu_run.exit_code(["flock", str(lock), "sh", "-c", "sleep 1000 & sleep 1000"], log, 1.0)
        assert code is None
        assert gpu_run.exit_code(["sh", "-c", "exit 3"], log, 60.0) == 3
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_only_wheels_that_are_lacking_are_unpacked() -> None:
    assert gpu_run.lacks("no-such-distribution", "1")
    assert gpu_run.lacks("pytest", "999.0")
    assert not gpu_run.lacks("pytest", "9.0")


def test_without_a_compiler_the_python_parts_run(bundle: Path, tmp_path: Path) -> None:
    """Parts that need native code say so; the summary is there."""
    pytest.importorskip("triton")
    done = run(bundle, tmp_path / "out", bare_python(tmp_path / "python"), CXX="no-such-compiler")
    assert "run: the native parts are not built: no C++ compiler (no-such-compiler); the rest runs\n" in done.stdout
    assert done.returncode == 1
    report = json.loads((tmp_path / "out" / "results" / "gpu.json").read_text())
    assert report["versions"]["torch"] is not None
    assert "error" not in report["parts"]["machine"]
    assert (tmp_path / "out" / "results" / "summary.md").exists()


@pytest.mark.long
@pytest.mark.root
@pytest.mark.needs("backend", "shm")
@pytest.mark.timeout(3_600)
def test_rehearsal_without_network_and_optional_libraries(bundle: Path, tmp_path: Path) -> None:
    """Builds everything, runs all parts, and does both again over the first."""
    pytest.importorskip("triton")
    python, out = bare_python(tmp_path / "python"), tmp_path / "out"
    launcher = shutil.which("ccache") or ""
    for _ in range(2):
        done = run(
            bundle, out, python, "--define", "SENNIT_OPTIONAL_LIBRARIES=OFF",
            before=("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"),
            CMAKE_CXX_COMPILER_LAUNCHER=launcher,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "run: built without ISA-L" in done.stdout
        summary = (out / "results" / "summary.md").read_text()
        assert "## Wrong\n\nNothing.\n\n## Did not run\n\nNothing.\n" in summary
        assert summary in done.stdout
