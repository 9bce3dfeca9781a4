# SPDX-License-Identifier: Apache-2.0
"""`make gpu-bundle`, and `run.sh` in what it makes: on a machine without a network, and on one that lacks something."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import checkout_objects, gpu_report

ROOT = Path(__file__).resolve().parents[1]
TEST_ENVIRONMENT = ("TRITON_INTERPRET", "SENNIT_INTERFACES", "PYTHONPATH")


def load(name: str) -> Any:
    """A script, which no package has."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_bundle = load("gpu_bundle")
gpu_run = load("gpu_run")


GPU_MACHINE = ("torch", "triton", "numpy", "nanobind")
"""Its distributions. It has what they require, too."""


def with_requirements(names: Iterable[str]) -> set[str]:
    """Names of distributions, and of all that they need here."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
    return found


def write_wheel(name: str, folder: Path) -> None:
    """A wheel of what is installed."""
    distribution = importlib.metadata.distribution(name)
    told = distribution.read_text("WHEEL") or ""
    tag = next(line.removeprefix("Tag: ") for line in told.splitlines() if line.startswith("Tag: "))
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{distribution.version}-{tag}.whl", "w") as wheel:
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                wheel.write(str(distribution.locate_file(file)), str(file))


def bare_python(folder: Path, names: Iterable[str] = ()) -> Path:
    """A Python without packages but these distributions, which are links."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not top.endswith(".pth") and not (packages / top).exists():
                (packages / top).symlink_to(str(distribution.locate_file(top)))
    return folder / "bin" / "python3"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle. There may be no index, so its wheels are of what is installed."""
    folder: Path = tmp_path_factory.mktemp("machine") / "gpu-bundle"
    gpu_bundle.make(folder, with_wheels=False)
    for name in with_requirements(gpu_bundle.requirements()) - with_requirements(GPU_MACHINE):
        write_wheel(name, folder / "wheels")
    return folder


@pytest.fixture(scope="module")
def python(bundle: Path) -> Path:
    """The Python of a GPU machine, beside the bundle."""
    pytest.importorskip("triton")
    return bare_python(bundle.parent / "python", with_requirements(GPU_MACHINE))


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
    for name in ("run.sh", "src/CMakeLists.txt", "src/tools/gpu_run.py", "src/tests/conftest.py"):
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


def test_an_old_python_is_said_in_one_line(bundle: Path, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.9.2\nexit 1\n")
    python.chmod(0o755)
    done = run(bundle, tmp_path / "out", python)
    assert done.returncode == 1
    assert done.stderr == f"run: error: {python} is no Python of 3.11 or later (Python 3.9.2); set PYTHON to one\n"


def test_an_old_torch_costs_its_extension_alone(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version, built = importlib.metadata.version, []
    monkeypatch.setattr(gpu_run, "BUNDLE", bundle)
    monkeypatch.setattr(gpu_run, "taken_from", lambda _: tmp_path / "out" / "site" / "sennit")
    monkeypatch.setattr(gpu_run, "build", lambda *_, with_torch: built.append(with_torch))
    assert gpu_run.main([str(tmp_path / "out"), "--build-only"]) == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cu130" if name == "torch" else version(name))
    assert gpu_run.main([str(tmp_path / "out"), "--build-only"]) == 1
    assert built == [True, False]
    last = "the extension for torch is not built: torch 2.9.1+cu130; needed: 2.11 or later"
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {last}"
    assert json.loads((tmp_path / "out" / "build.json").read_text())["problem"] == last


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


def test_wheels_for_another_python_stay_packed() -> None:
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    names = {
        "rich-14.0-py3-none-any": True,
        f"pyarrow-21.0.0-{here}-{here}-manylinux_2_28_{platform.machine()}": True,
        f"pyarrow-21.0.0-{here}-{here}-manylinux_2_28_other": False,
        f"pyarrow-21.0.0-cp39-cp39-manylinux_2_28_{platform.machine()}": False,
    }
    assert {name: gpu_run.is_for_this_python(Path(f"{name}.whl")) for name in names} == names


@pytest.mark.long
@pytest.mark.timeout(900)
def test_without_a_compiler_the_python_parts_run(bundle: Path, python: Path, tmp_path: Path) -> None:
    """Parts that need native code say so; the summary is there."""
    done = run(bundle, tmp_path / "out", python, CXX="no-such-compiler")
    assert "run: the native parts are not built: no C++ compiler (no-such-compiler)\n" in done.stdout
    assert done.returncode == 1
    report = json.loads((tmp_path / "out" / "results" / "gpu.json").read_text())
    assert report["versions"]["torch"] is not None
    assert "error" not in report["parts"]["machine"]
    assert (tmp_path / "out" / "results" / "summary.md").exists()


def built() -> Path:
    """The build folder of this checkout, which `make build` has brought up to date."""
    return next(path.parent for path in sorted(ROOT.glob("build/cp*/compile_commands.json")))


def test_the_bundle_has_all_files_that_the_checkout_compiles(bundle: Path) -> None:
    """So objects of the checkout stand for those of the bundle. No header asks for what only its libraries change."""
    told = subprocess.run(
        ["ninja", "-C", str(built()), "-t", "deps"], capture_output=True, text=True, check=True
    ).stdout
    used = {Path(line.strip()) for line in told.splitlines() if line.startswith("    ")}
    own = [path.relative_to(ROOT) for path in used if path.is_relative_to(ROOT) and ".venv" not in path.parts]
    own = [path for path in own if path.parts[0] not in ("build", "testbed")]
    assert len(own) > 200
    for path in own:
        assert (bundle / "src" / path).read_bytes() == (ROOT / path).read_bytes(), path
        text = path.read_text()
        assert path.suffix == ".cpp" or not any(name in text for name in checkout_objects.OPTIONAL), path


@pytest.mark.parametrize(("text", "is_taken"), [("int x;", True), ("#if SENNIT_ISAL", False)])
def test_an_object_of_a_group_of_files_is_taken_if_none_of_them_asks_for_a_library(
    text: str, is_taken: bool, tmp_path: Path
) -> None:
    """Files of a layer are compiled as one, which only includes them (CMake's unity builds)."""
    build, group, made = tmp_path / "build", "x.dir/Unity/unity_0_cxx.cxx", "x.dir/Unity/unity_0_cxx.cxx.o"
    for folder in (build, tmp_path / "other"):
        source = folder / "one.cpp"
        (folder / group).parent.mkdir(parents=True)
        source.write_text(f"{text}\n")
        (folder / group).write_text(f'/* generated by CMake */\n\n#include "{source}"\n')
    (build / made).touch()
    words = f"c++ -DSENNIT_ISAL={{}} -o {made} -c {{}}/{group}"
    command = words.format(1, build)
    (build / "compile_commands.json").write_text(json.dumps([{"file": f"{build}/{group}", "command": command}]))
    found = checkout_objects.known(build, words.format(0, tmp_path / "other").split()[1:])
    assert found == (build / made if is_taken else None)


@pytest.mark.long
@pytest.mark.root
@pytest.mark.needs("backend", "shm")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("compiles", [False, True], ids=["checkout", "compiled"])
def test_rehearsal_without_network_and_optional_libraries(bundle: Path, python: Path, compiles: bool) -> None:
    """All parts run, with nothing but the bundle, and with packages that a GPU machine has.

    Objects are those that `make build` has compiled of the same files, but for what an absent library changes.
    """
    out = bundle.parent / ("compiled" if compiles else "checkout")
    isolated = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    ccache = shutil.which("ccache") or ""
    taken = f"{sys.executable};-S;-I;{ROOT / 'tests/checkout_objects.py'};{built()};{ccache}"
    launcher = ccache if compiles else taken
    define = ("--define", "SENNIT_OPTIONAL_LIBRARIES=OFF", "--define", f"CMAKE_CXX_COMPILER_LAUNCHER={launcher}")
    # Folders of tests have other names each time.
    cached = {"CCACHE_BASEDIR": str(bundle.parent), "CCACHE_NOHASHDIR": "1"}
    done = run(bundle, out, python, *define, before=isolated, **cached)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run: built without ISA-L" in done.stdout
    for name in ("rich", "typer", "pytest", "pyarrow"):
        assert (out / "wheels" / name).is_dir(), f"{name} is not from its wheel"
    summary = (out / "results" / "summary.md").read_text()
    assert summary in done.stdout
    gpu_report.check(json.loads((out / "results" / "gpu.json").read_text()), summary)

    done = run(bundle, out, python, *define, "--build-only", before=isolated, **cached)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Building CXX" not in (out / "build.log").read_text()
