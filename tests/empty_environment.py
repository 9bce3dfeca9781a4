# SPDX-License-Identifier: Apache-2.0
"""Virtual environments that hold the built wheels, the requirements of one extra, and nothing else.

Nothing is downloaded: each distribution is linked from the environment that runs the tests.
"""

from __future__ import annotations

import email.parser
import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
BUILD_TIMEOUT_S = 600.0
INSTALL_TIMEOUT_S = 120.0
BUILD_OPTIONS = ["--no-build-isolation", "--no-deps", "--no-index"]


class NotHere(Exception):
    """A distribution that an extra requires is not installed in the environment of the tests."""


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this checkout. Its native parts are those that `make build` has compiled."""
    environment = {
        **os.environ,
        "CMAKE_GENERATOR": "Ninja",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # The build must see torch without the backend.
    }
    # The folder of `make build`, as it is: with the torch extension, which the wheel leaves out.
    settings = ["build-dir=build/{wheel_tag}", "cmake.define.SENNIT_TORCH=ON"]
    options = [argument for setting in settings for argument in ("--config-settings", setting)]
    _pip(["wheel", *BUILD_OPTIONS, *options, "--wheel-dir", str(folder), str(ROOT)], environment, BUILD_TIMEOUT_S)
    (wheel,) = folder.glob("sennit-*.whl")
    return wheel


def build_extension_wheel(folder: Path, environment: Environment) -> Path:
    """Builds the wheel of the torch extension in an environment that has the other wheel, torch and setuptools."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "tools" / "torch_extension", sources, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = ["--python", str(environment.python), "wheel", *BUILD_OPTIONS, "--wheel-dir", str(folder), str(sources)]
    _pip(command, {**environment.variables, **compiler(folder.parent)}, BUILD_TIMEOUT_S)
    (wheel,) = folder.glob("sennit_torch-*.whl")
    return wheel


def compiler(base: Path) -> dict[str, str]:
    """Environment variables for compiling what an earlier run may have compiled, below another `base`."""
    if not shutil.which("ccache"):
        return {}
    return {"CXX": "ccache g++", "CCACHE_BASEDIR": str(base), "CCACHE_NOHASHDIR": "1"}


class Environment:
    """An environment with the wheel. `run` starts its Python."""

    def __init__(
        self, folder: Path, wheel: Path, extra: str = "", *, beside: Sequence[str] = (), wheels: Sequence[Path] = ()
    ) -> None:
        """`beside`: requirements that no extra has, such as torch. `wheels`: further ones. Raises NotHere."""
        self.folder = folder
        # Looked up before the environment is made, because a distribution may be missing.
        distributions = closure([*_requirements(wheel, extra), *map(Requirement, beside)])
        shutil.copytree(_with_wheel(wheel), folder, symlinks=True, dirs_exist_ok=True)
        self.python = folder / "bin" / "python"
        if wheels:
            _install(self.python, *wheels)
        (site,) = folder.glob("lib/python*/site-packages")
        for distribution in distributions:
            _link(distribution, site, folder)

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """Environment variables of its processes, without those that would show them more than the environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "PATH": path, "VIRTUAL_ENV": str(self.folder)}

    def run(self, *arguments: str, timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs `python ARGUMENTS` in the environment's own folder. This checkout is not on its path."""
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.folder, env={**self.variables, **variables},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `python ARGUMENTS` without waiting for its end, with a pipe to each of its standard streams."""
        return subprocess.Popen(
            [self.python, *arguments], cwd=self.folder, env=self.variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


@functools.cache
def _with_wheel(wheel: Path) -> Path:
    """An environment with the wheel alone. The others are copies of it, because pip takes seconds."""
    folder = wheel.parent / "with-wheel"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    _install(folder / "bin" / "python", wheel)
    return folder


def _install(python: Path, *wheels: Path) -> None:
    install = ["--python", str(python), "install", "--no-deps", "--no-index", "--no-compile"]
    _pip([*install, *map(str, wheels)], dict(os.environ), INSTALL_TIMEOUT_S)


def closure(requirements: Iterable[Requirement]) -> list[Distribution]:
    """Returns the distributions that the requirements need, directly and through others."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = found.setdefault(key[0], importlib.metadata.distribution(requirement.name))
        except importlib.metadata.PackageNotFoundError:
            raise NotHere(f"{requirement.name} is not installed") from None
        waiting += _applying(distribution.requires or [], requirement.extras or {""})
    return list(found.values())


def _requirements(wheel: Path, extra: str) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.parser.BytesParser().parsebytes(archive.read(name))
    return _applying([str(text) for text in metadata.get_all("Requires-Dist", [])], {extra})


def _applying(texts: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    requirements = map(Requirement, texts)
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def _link(distribution: Distribution, site: Path, environment: Path) -> None:
    for relative in _entries(distribution):
        source = Path(str(distribution.locate_file(relative)))
        target = site / relative
        if target.exists() or not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    for file in distribution.files or ():  # Its commands, such as mpirun.
        if file.parts[-2:-1] == ("bin",) and ".." in file.parts:
            command = environment / "bin" / file.name
            if not command.exists():
                command.symlink_to(Path(str(file.locate())).resolve())


def _entries(distribution: Distribution) -> list[str]:
    """Returns paths below site-packages: whole packages, but single files of a package that distributions share."""
    files = [str(file) for file in distribution.files or () if ".." not in file.parts]
    if not files:  # A system package, which lists no files.
        names = (distribution.read_text("top_level.txt") or distribution.metadata["Name"]).split()
        files = [path for name in names for path in (f"{name}/__init__.py", f"{name}.py")]
    entries = set()
    for file in files:
        top = file.partition("/")[0]
        entries.add(file if len(_owners().get(top, ())) > 1 else top)
    return sorted(entries)


@functools.cache
def _owners() -> dict[str, set[str]]:
    return {top: set(names) for top, names in importlib.metadata.packages_distributions().items()}


def _pip(arguments: Sequence[str], environment: dict[str, str], timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
