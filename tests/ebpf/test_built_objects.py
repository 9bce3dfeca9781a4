# SPDX-License-Identifier: Apache-2.0
"""Objects that a wheel brings: where there is no clang and nothing is cached, they are enough."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import elftools
import numpy as np
import pytest

from sennit.doctor import capabilities
from sennit.ebpf import compiler, kernel_features, usdt, usdt_entries
from sennit.ebpf.loader import BpfObject
from sennit.offload import tracepoints as offload_tracepoints
from sennit.runtime.trace import ingest, paths, stalls
from sennit.testbed.bench.samples.record_source import RecordSource
from sennit.testbed.bench.transport import aggregate
from sennit.testbed.topology import cable
from sennit.transport import tracepoints as core_tracepoints
from tests.offload.ingest_world import packet

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bpf_objects.py"
SESSIONS = {
    paths.PROGRAM: (paths.PROBES, core_tracepoints),
    stalls.PROGRAM: (stalls.PROBES, core_tracepoints),
    ingest.PROGRAM: (ingest.PROBES, offload_tracepoints),
}
DEADLINE_S = 20.0
NAMES = sorted(path.name.removesuffix(".bpf.c") for path in compiler.PROGRAMS.glob("*.bpf.c"))

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "clang", "tracepoints")]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What CMake installs in a wheel."""
    folder = tmp_path_factory.mktemp("built") / "objects"
    (site,) = elftools.__path__
    libraries = [core_tracepoints.library(), offload_tracepoints.library()]
    command = [sys.executable, "-S", str(SCRIPT), str(folder), site, *map(str, libraries)]
    subprocess.run(command, check=True, timeout=100)
    return folder


@pytest.fixture
def alone(objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without clang, with an empty cache."""
    monkeypatch.setattr(compiler, "OBJECTS", objects)
    monkeypatch.setattr(compiler, "compile_program", compiler.compile_program.__wrapped__)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arenas_of(name: str) -> dict[str, int]:
    """One page for the arena of a program, if it has one and the kernel has arenas."""
    if name not in compiler.ARENAS:
        return {}
    if not (arena := kernel_features.probe("arena")).available:
        pytest.skip(arena.absent_because)
    return {compiler.ARENAS[name]: 4096}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES)
def test_every_program_of_the_package_is_loaded_without_clang(name: str) -> None:
    if name in SESSIONS:
        probes, module = SESSIONS[name]
        points = {point.name: point for point in usdt.read(module.library())}
        text = usdt_entries.source(points[probe] for probe in probes)
        image = compiler.compile_with_header(name, usdt_entries.HEADER, text)
    else:
        image = compiler.compile_program(name)
    with BpfObject(image, arenas=arenas_of(name)) as loaded:
        assert loaded.programs()


@pytest.mark.usefixtures("alone")
@pytest.mark.needs("arena")
def test_the_benchmark_of_aggregation_needs_no_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "LEAVES", (2,))
    monkeypatch.setattr(aggregate, "ARITHMETICS", {"int32": 1})
    (result,) = aggregate.run(rounds=1, seed=1)
    assert min(result.xdp_ns, result.forward_ns, result.native_ns) > 0


@pytest.mark.usefixtures("alone")
@pytest.mark.needs("native-xdp")
@pytest.mark.parametrize("rows", [1, 2])  # frames of 99 and 104 bytes: the map has whole words
def test_the_load_of_the_benchmark_of_offload_needs_no_clang(rows: int) -> None:
    batches, port = 2, 4800
    datagrams = [packet(0, row, np.arange(rows)) for row in (0, rows)]
    with (
        cable.Cable(mtu_bytes=1500) as link,
        link.within(cable.FAR, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)) as receiver,
        RecordSource(datagrams, link, batches) as source,
    ):
        receiver.settimeout(DEADLINE_S)
        receiver.bind((cable.FAR_ADDRESS, port))
        source.prepare(7)
        for batch in (7, 8):
            link.within(cable.NEAR, source.send, port, batch, 0, 2)
            for row in (0, rows):
                found = receiver.recv(1 << 16)
                assert found == packet(batch, row, np.arange(rows))


@pytest.mark.usefixtures("alone")
def test_the_testbed_asks_for_no_clang_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyroute2")
    probe = capabilities.PROBES["tc-bpf"]
    capabilities.probe.cache_clear()
    try:
        assert probe().available
        monkeypatch.setattr(compiler, "OBJECTS", Path("/nowhere"))
        assert (probe().available, probe().detail.partition(";")[0]) == (False, "clang: command not found")
    finally:
        capabilities.probe.cache_clear()


@pytest.mark.usefixtures("alone")
def test_an_object_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(compiler.ToolMissing):
        compiler.compile_with_header("paths", usdt_entries.HEADER, "// the entries of another library\n")
    include = tmp_path / "include"
    include.mkdir()
    for header in compiler.INCLUDE.glob("*.h"):
        (include / header.name).write_text(header.read_text() + "\n")
    monkeypatch.setattr(compiler, "INCLUDE", include)
    with pytest.raises(compiler.ToolMissing):
        compiler.compile_program("dispatch")
