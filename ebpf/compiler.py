# SPDX-License-Identifier: Apache-2.0
"""Compiles BPF programs with clang when they are first needed, and keeps the objects on disk.

A wheel brings the objects of all programs that depend on nothing but the package (tools/bpf_objects.py). They
are found by the same key as those of the cache: flags and sources. So an object of other sources is never taken.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sennit.ebpf import object_cache
from sennit.errors import SennitError

PROGRAMS: Final = Path(__file__).parent / "programs"
INCLUDE: Final = Path(__file__).parent / "include"
# What a wheel brings. A checkout has no such folder.
OBJECTS: Final = Path(__file__).parent / "objects"
COMPILE_TIMEOUT_S: Final = 60.0
# v3 has compare-and-swap and fetch-and-add (Linux 5.12).
INSTRUCTION_SET: Final = "v3"
# v4 has signed division and byte swaps, and clang 19 knows the arena address space (Linux 6.9).
ARENA_INSTRUCTION_SET: Final = "v4"
ARENA_CLANG_VERSION: Final = 19
ARENAS: Final = {"aggregate": "memory"}
"""Programs of `programs/` that have an arena -> its name."""

# The architecture names of bpf_tracing.h.
TARGET_ARCHITECTURES: Final = {"x86_64": "x86", "aarch64": "arm64"}
NEWEST_CLANG_VERSION: Final = 40


class CompileError(SennitError):
    """clang failed; the message has its output."""


class ToolMissing(CompileError):
    """No clang is new enough, or headers are missing."""


def find_clang(version: int = 0) -> str:
    """The path of a clang: `clang` if it has this version or later, else the newest `clang-N` that has.

    One that cannot say its version, because it cannot start, does not count. Raises ToolMissing.
    """
    plain = shutil.which("clang")
    numbered = (shutil.which(f"clang-{number}") for number in range(NEWEST_CLANG_VERSION, version - 1, -1))
    for found in (plain, *numbered):
        if found is not None and _version(found) >= max(1, version):
            return found
    wanted = f"; version {version} or later is needed" if version else ""
    if plain is None:
        raise ToolMissing(f"clang: command not found{wanted}")
    has = _version(plain)
    raise ToolMissing((f"clang is version {has}" if has else f"{plain} does not start") + wanted)


@functools.cache
def _version(path: str) -> int:
    """Of a compiler; 0 if it does not say it: it cannot start, or does not end."""
    try:
        first = _run([path, "-dumpversion"]).partition(".")[0]
    except CompileError:
        return 0
    return int(first) if first.isdigit() else 0


@functools.cache
def compile_program(name: str) -> bytes:
    """The object file of `programs/<name>.bpf.c`, once a process."""
    return _image(_program(name), _clang_version(name))


def compile_with_header(name: str, header: str, text: str) -> bytes:
    """The object file of `programs/<name>.bpf.c`, for which the include file `header` has this text."""
    with _with_header(name, header, text) as unit:
        return _image(unit, 0)


def compile_source(name: str, source: str) -> bytes:
    """The object file of a generated program, which may have an arena. `name` is for messages."""
    with tempfile.TemporaryDirectory(prefix="sennit-bpf-") as folder:
        path = Path(folder) / f"{name}.bpf.c"
        path.write_text(source, encoding="utf-8")
        # Generated programs compute some values that nobody reads. clang removes them.
        unit = _Unit(path, ARENA_INSTRUCTION_SET, "-Wno-unused-variable", "-Wno-unused-label")
        return _image(unit, ARENA_CLANG_VERSION)


def write_object(folder: Path, name: str, header: str = "", text: str = "") -> None:
    """Compiles `programs/<name>.bpf.c` into a folder that a wheel has as OBJECTS. `header`: see compile_with_header."""
    with _with_header(name, header, text) if header else contextlib.nullcontext(_program(name)) as unit:
        (folder / f"{unit.key}.o").write_bytes(unit.compiled(find_clang(_clang_version(name))))


def _clang_version(name: str) -> int:
    return ARENA_CLANG_VERSION if name in ARENAS else 0


def _program(name: str) -> _Unit:
    return _Unit(PROGRAMS / f"{name}.bpf.c", ARENA_INSTRUCTION_SET if name in ARENAS else INSTRUCTION_SET)


@contextlib.contextmanager
def _with_header(name: str, header: str, text: str) -> Iterator[_Unit]:
    with tempfile.TemporaryDirectory(prefix="sennit-bpf-") as folder:
        (Path(folder) / header).write_text(text, encoding="utf-8")
        yield _Unit(PROGRAMS / f"{name}.bpf.c", INSTRUCTION_SET, f"-I{folder}")


class _Unit:
    """A source file, and how it is compiled."""

    def __init__(self, source: Path, instruction_set: str, *options: str) -> None:
        # For the target bpf, clang does not search the folder where the host's compiler finds asm/types.h.
        multiarch = Path("/usr/include") / (sysconfig.get_config_var("MULTIARCH") or "")
        includes = [option for option in options if option.startswith("-I")] + [f"-I{INCLUDE}"]
        flags = ["-target", "bpf", f"-mcpu={instruction_set}", "-O2", "-g", "-Wall", "-Werror"]
        flags += [f"-D__TARGET_ARCH_{TARGET_ARCHITECTURES.get(platform.machine(), platform.machine())}"]
        flags += [option for option in options if not option.startswith("-I")]
        self._source, self._flags = source, flags
        self._arguments = [*flags, *includes, f"-I{multiarch}"]
        folders = [Path(include.removeprefix("-I")) for include in includes]
        sources = [source, *(path for folder in folders for path in sorted(folder.glob("*.h")))]
        self.key = _key(*flags, *(path.read_text(encoding="utf-8") for path in sources))
        """A hash of flags and sources. It does not depend on the compiler or the headers of the system."""

    def exact_key(self, clang: str) -> str:
        """A hash of the compiler, the flags, and the text with all its headers, without the paths of this machine."""
        text = _run([clang, *self._arguments, "-E", "-P", os.fspath(self._source)])
        return _key(_identity(clang), *self._flags, text)

    def compiled(self, clang: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="sennit-bpf-") as folder:
            target = Path(folder) / "program.o"
            _run([clang, *self._arguments, "-c", os.fspath(self._source), "-o", os.fspath(target)])
            return target.read_bytes()


def _image(unit: _Unit, clang_version: int) -> bytes:
    """Returns the object of the wheel, or of the cache if the same text was compiled in the same way before.

    If it cannot be compiled here, as without a clang of this version or without headers, the cache may have an object
    of the same sources. The headers of the system do not count then. Raises CompileError if it has none.
    """
    with contextlib.suppress(OSError):
        return (OBJECTS / f"{unit.key}.o").read_bytes()
    try:
        clang = find_clang(clang_version)
        key = unit.exact_key(clang)
        image = object_cache.read(key)
        if image is None:
            image = unit.compiled(clang)
            object_cache.write(key, image)
            object_cache.write(unit.key, image)
        return image
    except CompileError as error:
        image = object_cache.read(unit.key)
        if image is not None:
            return image
        if isinstance(error, ToolMissing):
            raise ToolMissing(
                f"{error}; install it (Debian: clang-22 libbpf-dev), or bring a cache that has the object"
            ) from None
        raise


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _identity(clang: str) -> str:
    """Version, revision and packaging of a compiler."""
    return _run([clang, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{' '.join(command)}: no end within {COMPILE_TIMEOUT_S:g} s") from None
    except OSError as error:  # a file of another machine, or one whose interpreter is missing
        raise CompileError(f"{' '.join(command)}: {error.strerror}") from None
    if done.returncode != 0:
        missing = re.search(r"fatal error: '(.*)' file not found", done.stderr)
        if missing:
            raise ToolMissing(f"clang: no header {missing[1]}")
        raise CompileError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")
    return done.stdout
