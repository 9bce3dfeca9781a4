# SPDX-License-Identifier: Apache-2.0
"""Compiled objects are cached on disk. The cache trusts no file that another user could have written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sennit.ebpf import compiler, object_cache
from sennit.ebpf.elf import Elf

pytestmark = pytest.mark.needs("clang")

SOURCE = '#include "own.h"\nint run(void *context) { return VALUE; }\n'


class Bench:
    """A folder of programs, a cache, and a compiler that records what it compiles."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.noted = folder / "compiled"
        clang = shutil.which("clang")
        script = folder / "bin" / "clang"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) echo >>"{self.noted}";; esac\nexec {clang} "$@"\n')
        script.chmod(0o755)
        (folder / "program.bpf.c").write_text(SOURCE)
        monkeypatch.setattr(compiler, "PROGRAMS", folder)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def compile(self, value: int = 7) -> bytes:
        image = compiler.compile_with_header("program", "own.h", f"#define VALUE {value}\n")
        assert ".text" in Elf(image).sections
        return image

    @property
    def count(self) -> int:
        return self.noted.read_text().count("\n") if self.noted.exists() else 0

    @property
    def cached(self) -> Path:
        """What was written first: the object by compiler and text. The other one is for machines without a compiler."""
        found = (self.folder / "cache" / "sennit" / object_cache.FOLDER).iterdir()
        return min(found, key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_the_same_text_is_compiled_once(bench: Bench) -> None:
    assert bench.compile() == bench.compile()
    assert bench.count == 1


def test_without_a_compiler_the_cache_is_enough_or_one_line_says_what_to_install(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.compile()
    monkeypatch.setenv("PATH", str(bench.folder))
    assert bench.compile() == first
    with pytest.raises(compiler.ToolMissing, match=r"^clang: command not found; install it \(Debian: clang-22 .*$"):
        bench.compile(8)


SAYS_ITS_VERSION = '#!/bin/sh\ncase "$*" in -dumpversion|--version) echo 22.1.0; exit;; esac\n'


@pytest.mark.parametrize(
    ("clang", "told"),
    [
        pytest.param(
            f"{SAYS_ITS_VERSION}echo \"f.c:1:10: fatal error: 'linux/bpf.h' file not found\" >&2; exit 1",
            r"^clang: no header linux/bpf\.h; install it \(Debian: clang-22 libbpf-dev\)",
            id="no headers",
        ),
        pytest.param(
            f"{SAYS_ITS_VERSION}echo 'error: unable to create target: bpf' >&2; exit 1",
            "unable to create target",
            id="no target bpf",
        ),
        pytest.param(
            "#!/bin/sh\necho 'error while loading shared libraries: libLLVM.so' >&2; exit 127",
            "clang does not start; install it",
            id="no libraries",
        ),
        pytest.param("#!/nowhere/interpreter\n", "clang does not start; install it", id="no interpreter"),
        pytest.param("#!/bin/sh\nexec /bin/sleep 60\n", "clang does not start; install it", id="no end of the start"),
        pytest.param(f"{SAYS_ITS_VERSION}exec /bin/sleep 60\n", "no end within 10 s", id="no end"),
    ],
)
def test_with_a_compiler_that_cannot_do_it_the_cache_is_enough_or_one_error_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, clang: str, told: str
) -> None:
    first = bench.compile()
    broken = bench.folder / "broken" / "clang"
    broken.parent.mkdir()
    broken.write_text(clang)
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 10.0 if "sleep" in clang else 20.0)
    assert bench.compile() == first
    with pytest.raises(compiler.CompileError, match=told):
        bench.compile(8)


def test_source_header_flags_and_compiler_each_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.compile()
    assert bench.compile(8) != first
    (bench.folder / "program.bpf.c").write_text(SOURCE.replace("VALUE", "VALUE + 1"))
    bench.compile()
    monkeypatch.setattr(compiler, "INSTRUCTION_SET", "v2")
    bench.compile()
    monkeypatch.setattr(compiler, "_identity", lambda clang: "another version")
    bench.compile()
    assert bench.count == 5


def hostile(image: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(bytes(object_cache.DIGEST_BYTES) + image)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere.o"
    shutil.copy(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(hostile(b"not what was compiled"), id="other content"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="cut"),
        pytest.param(lambda path: path.chmod(0o666), id="writable by others"),
        pytest.param(lambda path: path.parent.chmod(0o777), id="folder writable by others"),
        pytest.param(link, id="symbolic link"),
        pytest.param(fifo, id="fifo"),
        pytest.param(folder, id="folder"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_compiled_again(bench: Bench, spoil: Callable[[Path], object]) -> None:
    first = bench.compile()
    spoil(bench.cached)
    assert bench.compile() == first
    assert bench.count == 2


@pytest.mark.needs("root")
def test_a_file_of_another_user_is_compiled_again(bench: Bench) -> None:
    first = bench.compile()
    os.chown(bench.cached, 65_534, 65_534)
    assert bench.compile() == first
    assert bench.count == 2


def test_a_cache_that_cannot_be_written_is_no_error(bench: Bench) -> None:
    (bench.folder / "cache").write_text("no folder")
    assert bench.compile() == bench.compile()
    assert bench.count == 2


def test_the_least_recently_used_are_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "KEPT_MAX", 2)
    folder = bench.folder / "cache" / "sennit" / object_cache.FOLDER
    for age_s, key in ((30, "oldest"), (20, "used"), (10, "newest")):
        object_cache.write(key, key.encode())
        if (folder / f"{key}.o").exists():
            stamp_s = os.stat(folder).st_mtime - age_s
            os.utime(folder / f"{key}.o", (stamp_s, stamp_s))
    assert object_cache.read("oldest") is None
    assert object_cache.read("used") == b"used"
    object_cache.write("later", b"later")
    assert (object_cache.read("used"), object_cache.read("newest")) == (b"used", None)
