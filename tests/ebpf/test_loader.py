# SPDX-License-Identifier: Apache-2.0
"""Compiling and loading BPF programs, and the errors when that fails."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from sennit.doctor import capabilities
from sennit.ebpf import compiler, library, loader
from sennit.ebpf.library import BpfError
from sennit.ebpf.loader import BpfObject, RunTimes

root = pytest.mark.root
needs_bpf = pytest.mark.needs("bpf")
needs_clang = pytest.mark.needs("clang")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the loader looks for programs."""
    monkeypatch.setattr(compiler, "PROGRAMS", tmp_path)
    return tmp_path


@root
@needs_bpf
@needs_clang
@pytest.mark.parametrize("path", sorted(compiler.PROGRAMS.glob("*.bpf.c")), ids=lambda path: path.name)
def test_every_program_compiles_and_passes_the_verifier(path: Path) -> None:
    """The capability tc-bpf cannot show this: if a program is refused, tests are only skipped."""
    name = path.name.removesuffix(".bpf.c")
    arena = compiler.ARENAS.get(name)
    if arena and (reason := capabilities.missing("arena")):
        pytest.skip(reason)
    with BpfObject(compiler.compile_program(name), arenas={arena: 4096} if arena else {}) as loaded:
        names = loaded.programs()
        # (Programs at tracepoints need a library: tests/testbed/test_trace_core.py loads them.)
        assert names or "TRACEPOINT_ENTRIES" in path.read_text()
        assert all(loaded.program(name).descriptor > 0 for name in names)


@root
@needs_bpf
@needs_clang
def test_maps_are_read_and_written() -> None:
    with BpfObject(compiler.compile_program("fabric"), max_entries={"hold_states": 7}) as loaded:
        states = loaded.map("hold_states")
        assert (states.entries, states.value_bytes) == (7, 8)
        states.write(6, b"12345678")
        assert states.read(6) == b"12345678"
        assert states.read(5) == bytes(8)
        with pytest.raises(BpfError, match="entry 7 of 7"):
            states.read(7)
        with pytest.raises(BpfError, match="3 bytes; allowed: 8"):
            states.write(0, b"123")
        with pytest.raises(BpfError, match="no map 'nothing'"):
            loaded.map("nothing")
        with pytest.raises(BpfError, match="no program 'nothing'"):
            loaded.program("nothing")
    with pytest.raises(BpfError, match="closed"):
        loaded.program("fabric")


@root
@needs_bpf
@needs_clang
def test_the_verifier_is_quoted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another thread loads meanwhile."""
    (folder / "wild.bpf.c").write_text(
        '__attribute__((section("tc"), used)) int wild(void *skb) { return *(int *)(long)skb == *(int *)8; }\n'
        'char licence[] __attribute__((section("license"), used)) = "Apache-2.0";\n'
    )
    image = compiler.compile_program("wild")
    with pytest.raises(BpfError, match="invalid mem access"):
        BpfObject(image)

    def clear_in_another_thread(code: int, what: str) -> BpfError:
        other = threading.Thread(target=library.clear_log)
        other.start()
        other.join()
        return library.refusal(code, what)

    monkeypatch.setattr(loader, "refusal", clear_in_another_thread)
    with pytest.raises(BpfError, match="invalid mem access"):
        BpfObject(image)


@root
@needs_bpf
def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(BpfError, match="cannot be opened"):
        BpfObject(b"not an ELF file")


@needs_clang
def test_the_compiler_is_quoted(folder: Path) -> None:
    (folder / "broken.bpf.c").write_text("int broken(void) { return }\n")
    with pytest.raises(compiler.CompileError, match="expected expression"):
        compiler.compile_program("broken")
    (folder / "poor.bpf.c").write_text('#include "no/such.h"\n')
    with pytest.raises(compiler.ToolMissing, match=r"no header no/such\.h"):
        compiler.compile_program("poor")


def test_a_missing_compiler_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (folder / "any.bpf.c").write_text("int any;\n")
    with pytest.raises(compiler.ToolMissing, match="clang: command not found"):
        compiler.compile_program("any")


@root
@needs_bpf
@needs_clang
def test_run_times_are_counted_while_somebody_asks() -> None:
    with BpfObject(compiler.compile_program("dispatch")) as loaded:
        program = loaded.program("dispatch")
        with RunTimes() as one:
            with RunTimes():
                program.test_run(bytes(64), repeat=1000)
            one.close()
            one.close()
        counted = program.statistics()
        assert counted.runs >= 1000
        assert counted.run_time_ns > 0
