# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the extension `_c10d` that fits this torch and this Python (docs/decisions/0059).

torch's C++ interface changes with each minor release, so an extension fits one of them, and one Python. It may be
beside this file (`make build`), in the package `sennit_torch` (a wheel of its own), or in the cache (`sennit
build-extension`). What is particular to a torch release is in torch_versions.py and csrc/torch_versions.hpp.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import sennit
from sennit.errors import Unsupported
from sennit.transport.light_tuple import LightTuple
from sennit.transport.native import require_core

MODULE: Final = "sennit.runtime.backend._c10d"
DISTRIBUTION: Final = "sennit-torch"
PACKAGE: Final = "sennit_torch"
RECORD: Final = "build_info.json"
# As .cpython-311-x86_64-linux-gnu.so: names the Python that an extension fits.
SUFFIX: Final = importlib.machinery.EXTENSION_SUFFIXES[0]


class Build(LightTuple):
    """An extension on this machine."""

    path: Path
    """The shared object."""

    torch: str
    """The torch that it was compiled for, as 2.13.0+cpu."""

    @property
    def for_this_python(self) -> bool:
        return self.path.name.endswith(SUFFIX)

    def fits(self, torch: str) -> bool:
        """Whether this Python can load it beside this torch."""
        return self.for_this_python and minor(self.torch) == minor(torch)


def minor(torch: str) -> str:
    """2.13 of 2.13.0+cpu. Builds for other processors and patch releases keep the interface."""
    return ".".join(torch.partition("+")[0].split(".")[:2])


def record_of(folder: Path) -> Build | None:
    """The extension in a folder; None if there is none that can be read. Neither torch nor the extension is loaded."""
    try:
        torch = str(json.loads((folder / RECORD).read_text(encoding="utf-8"))["torch"])
        fitting = folder / f"_c10d{SUFFIX}"
        files = [fitting] if fitting.exists() else sorted(folder.glob("_c10d.*.so"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Build(path=files[0], torch=torch) if files else None


def builds(torch: str | None = None) -> Iterator[Build]:
    """All extensions on this machine, in the order in which they are tried. `torch`: also what was cached for it."""
    for folder in _folders(torch):
        if (build := record_of(folder)) is not None:
            yield build


def _folders(torch: str | None) -> Iterator[Path]:
    yield from _portions("sennit.runtime.backend")
    yield from _portions(PACKAGE)
    from sennit import cache

    # The key is a digest of all sources. Where an extension was built or installed, nobody comes so far.
    if torch is not None and (key := cache_key(torch)) is not None:
        yield from cache.find(key)


def sources() -> Path | None:
    """The installed sources of the extension; None if they are missing."""
    for folder in _portions("sennit.runtime.backend"):
        if (folder / "sources" / "unit.cpp").exists():
            return folder / "sources"
    return None


def cache_key(torch: str) -> str | None:
    """The name of the cache's entry for a torch, this Python and these sources."""
    folder = sources()
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"extension-torch-{torch}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


@functools.cache
def load() -> ModuleType:
    """Loads the extension. Raises Unsupported, which says what is missing and what to do, if none fits."""
    import torch

    version = str(torch.__version__)
    chosen = _chosen(version)
    # libsennit_core.so is now in this process, and the extension finds it by its name, wherever it lies.
    require_core()
    spec = importlib.util.spec_from_file_location(MODULE, chosen.path)
    assert spec is not None, chosen.path
    assert spec.loader is not None, chosen.path
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise _not_loaded(chosen, version, str(error)) from error
    sys.modules[MODULE] = module
    # Peers hear a goodbye even from programs that never call destroy_process_group.
    atexit.register(module.close_all)
    return module


# Links the files that it is given, in their order, and their symbols at once. What torch preloads is not needed here.
_LINK: Final = "import ctypes, os, sys; [ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_GLOBAL) for path in sys.argv[1:]]"
_LINK_TIMEOUT_S: Final = 60.0


def try_link(torch: str) -> None:
    """Raises Unsupported as `load` does, if the extension cannot be linked with the installed torch, as 2.13.0+cpu.

    It takes a fifth of the time of `import torch`: a process of its own links the shared objects, and runs no Python of
    torch.
    """
    from sennit.transport import tracepoints

    chosen = _chosen(torch)
    folder = next(_portions("torch"))
    files = [tracepoints.library(), folder / "lib" / "libtorch_python.so", chosen.path]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LINK, *map(str, files)],
            capture_output=True,
            text=True,
            timeout=_LINK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_loaded(chosen, torch, f"no answer within {_LINK_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        # A file that is cut off kills the process that maps it.
        why = done.stderr.strip().splitlines() or [f"damaged: the process that linked it got signal {-done.returncode}"]
        raise _not_loaded(chosen, torch, why[-1].removeprefix("OSError: "))


def _chosen(torch: str) -> Build:
    found = []
    for build in builds(torch):
        if build.fits(torch):
            return build
        found.append(build)
    raise Unsupported("torch-extension", missing(torch, found))


def _not_loaded(build: Build, torch: str, why: str) -> Unsupported:
    text = f"{build.path} cannot be loaded with torch {torch} ({why}); {remedy(torch)}"
    return Unsupported("torch-extension", text)


def missing(torch: str, found: list[Build]) -> str:
    """Says that no extension fits, which torch and Python there are, and what to do."""
    text = f"no extension for torch {torch} and Python {platform.python_version()}"
    if found:
        text += f", but for {'; '.join(map(_fitting, found))}"
    return f"{text}; {remedy(torch)}"


def remedy(torch: str) -> str:
    """The command that gets an extension for this torch."""
    from sennit import extras

    if extras.from_checkout():
        return "make build"
    wheel = f"{DISTRIBUTION}=={sennit.__version__}+torch{minor(torch)}"
    return f"pip install '{wheel}', or with a C++ compiler: sennit build-extension"


def _fitting(build: Build) -> str:
    python = build.path.name.removeprefix("_c10d.").partition("-x86_64")[0].removesuffix(".so")
    return f"torch {build.torch}" + ("" if build.for_this_python else f" and {python}")


def _portions(package: str) -> Iterator[Path]:
    found = importlib.util.find_spec(package)
    yield from map(Path, (found.submodule_search_locations or ()) if found else ())
