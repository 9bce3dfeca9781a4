# SPDX-License-Identifier: Apache-2.0
"""What a container or an old machine lacks is named, with what to do: by `sennit doctor` and by the first call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sennit import cache, extras, surroundings
from sennit.doctor import capabilities
from sennit.errors import DeviceError
from sennit.transport import native

COMMAND_TIMEOUT_S = 100.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("flags", "fine", "what"),
    [
        ("sse2 avx", False, "no AVX2"),
        ("sse2 avx avx2", False, "no AVX2"),  # f16c is in the same kernels
        ("sse2 avx avx2 f16c", True, "AVX2"),
        ("sse2 avx avx2 f16c avx512f avx512bw avx512dq avx512vl", True, "AVX-512 and AVX2"),
    ],
)
def test_a_processor_without_avx2_is_named(tmp_path: Path, flags: str, fine: bool, what: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} rdtscp\nbugs\t\t: avx2\n")
    answer = surroundings.vector_units(tmp_path / "cpuinfo")
    assert (answer.fine, answer.what.partition(":")[0]) == (fine, what)
    assert bool(answer.remedy) is not fine


# Groups of one rank, on a processor without AVX2 as far as Python knows.
SLOW = """
from sennit import surroundings
from sennit.transport import _core
_core.HAS_WIDE_VECTORS = False
surroundings.vector_units = lambda: surroundings.Answer(fine=False, what="no AVX2: slower", remedy="another processor")
"""
GROUPS = {
    "torch": """
import torch.distributed as dist
dist.init_process_group("sennit", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
dist.destroy_process_group()
""",
    "arrays": """
from sennit.transport.communicator import Communicator
for _ in range(2):
    with Communicator(rank=0, world=1):
        pass
""",
}


@pytest.mark.needs("backend")
@pytest.mark.parametrize("program", GROUPS.values(), ids=GROUPS)
def test_the_first_group_names_a_processor_without_avx2_once(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", SLOW + program],
        capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True,
    )  # fmt: skip
    assert done.stderr.count("RuntimeWarning: no AVX2: slower; what helps: another processor") == 1, done.stderr


def test_an_old_glibc_is_named() -> None:
    version = surroundings.libc_version()
    assert version is not None
    assert surroundings.libraries(version).fine
    newer = surroundings.libraries((version[0], version[1] + 1))
    assert newer.what == f"glibc {version[0]}.{version[1]} is too old: the wheel asks for {version[0]}.{version[1] + 1}"
    assert "newer distribution" in newer.remedy


def test_the_tag_of_a_wheel_says_which_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wheel:
        def read_text(self, name: str) -> str:
            assert name == "WHEEL"
            return "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_9_35_x86_64\n"

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Wheel())
    assert surroundings.wheel_glibc() == (9, 35)
    assert not surroundings.libraries().fine


def test_a_proxy_before_this_machine_is_named_without_its_password(no_proxies: pytest.MonkeyPatch) -> None:
    assert surroundings.proxy() == surroundings.Answer(fine=True, what="none")
    no_proxies.setenv("https_proxy", "http://user:secret@10.0.0.1:3128")
    found = surroundings.proxy()
    assert not found.fine
    assert found.what.startswith("https_proxy set")
    assert "secret" not in found.what + found.remedy
    no_proxies.setenv("no_proxy", "localhost,127.0.0.1")
    assert surroundings.proxy().fine


@pytest.mark.parametrize("place", ["/proc/nowhere", "relative"])
def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with pytest.raises(DeviceError, match=r"the cache's folder cannot be made .* set XDG_CACHE_HOME to a folder"):
        cache.provide("entry", lambda folder: None)
    answer = surroundings.cache_folder()
    assert not answer.fine
    assert answer.remedy == cache.REMEDY
    assert cache.REMEDY not in answer.what


@pytest.mark.needs("backend")
def test_a_command_names_a_home_that_cannot_be_written_in_one_line() -> None:
    variables = {**os.environ, "XDG_CACHE_HOME": "", "HOME": "/proc/nowhere"}
    done = subprocess.run(
        [sys.executable, "-m", "sennit", "build-extension"],
        env=variables, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 69, done.stderr
    assert done.stderr.startswith("error: the cache's folder cannot be made")
    assert done.stderr.endswith(f"; {cache.REMEDY}\n")
    assert len(done.stderr.splitlines()) == 1


def test_a_core_that_needs_newer_libraries_says_so() -> None:
    text = "/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by _core.so)"
    said = native.explain(ImportError(text))
    assert said.startswith(text)
    assert "newer distribution" in said


def test_a_core_for_another_python_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_core.cpython-399-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(extras, "from_checkout", lambda: False)
    said = native.explain(ModuleNotFoundError("No module named 'sennit.transport._core'"))
    assert "there is _core.cpython-399-x86_64-linux-gnu.so, and this Python takes _core.cpython-3" in said
    assert said.endswith("pip install --force-reinstall sennit")


def in_namespace(setup: str, code: str, *before: str) -> str:
    """Runs a program in a network namespace of its own, after a shell command, and returns what it prints."""
    command = [*before, "unshare", "--net", "sh", "-c", f'{setup}; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


PROBE = "from sennit.doctor.capabilities import probe; it = probe({!r}); print(it.available, it.detail, it.remedy)"
# What the first group over UDP asks after it has met the others.
RAILS = """
from sennit.errors import ConfigError
from sennit.transport.meeting.rails import find_rails
try:
    print(find_rails(()))
except ConfigError as error:
    print(error)
"""
# Two ranks that meet in a folder; {} is the port that carries their bytes.
TWO_RANKS = """
import multiprocessing, sys, tempfile
import numpy as np
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config, TransportKind
from sennit.transport.meeting.store import FileStore

def rank(number, folder):
    config = Config(transport=TransportKind.{})
    with Communicator(rank=number, world=2, store=FileStore(folder), config=config) as group:
        assert (group.allreduce(np.full(1000, number + 1.0, np.float32)) == 3.0).all()
        if number == 0:
            print(group.describe())

with tempfile.TemporaryDirectory() as folder:
    other = multiprocessing.get_context("fork").Process(target=rank, args=(1, folder))
    other.start()
    rank(0, folder)
    other.join()
    sys.exit(other.exitcode)
"""
PACKETS = """
from sennit.errors import Unsupported
from sennit.testbed.packet_socket import packet_socket
try:
    print(packet_socket(0))
except Unsupported as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.needs("netns", "core")
def test_without_lo_the_first_call_and_the_doctor_say_how_to_bring_it_up() -> None:
    assert "ip link set lo up" in in_namespace(":", PROBE.format("loopback-ipv4"))
    assert "(ip link set lo up), or" in in_namespace(":", RAILS)
    assert "rank 0 of 2" in in_namespace(":", TWO_RANKS.format("SHM"))


@pytest.mark.long
@pytest.mark.root
@pytest.mark.needs("netns", "backend")
def test_without_lo_training_says_at_once_how_to_bring_it_up() -> None:
    command = ["unshare", "--net", sys.executable, "-m", "sennit", "train", "--data", "synthetic", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: loopback-ipv4: cannot send to 127.0.0.1: Network is unreachable, where ranks")
    assert done.stderr.endswith("; ip link set lo up\n")


@pytest.mark.root
@pytest.mark.needs("netns", "core")
def test_without_ipv6_the_doctor_and_the_group_say_that_ipv4_is_used() -> None:
    off = "ip link set lo up; echo 1 >/proc/sys/net/ipv6/conf/lo/disable_ipv6"
    said = in_namespace(off, PROBE.format("loopback-ipv6"))
    assert said.startswith("False cannot send to ::1")
    assert "IPv4 is used" in said
    assert in_namespace(off, PROBE.format("rails")).startswith("True lo 127.0.0.1")
    assert "rank 0 uses IPv4, because there is no IPv6 address on lo (127.0.0.1)" in in_namespace(
        off, TWO_RANKS.format("UDP")
    )


@pytest.mark.root
@pytest.mark.needs("netns")
def test_without_cap_net_raw_the_doctor_and_the_first_packet_socket_say_so() -> None:
    drop = ("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw")
    probes = "import sennit.testbed.probes; "
    assert in_namespace(":", probes + PROBE.format("packet-sockets"), *drop).startswith("False no CAP_NET_RAW")
    assert in_namespace(":", PACKETS, *drop).startswith("packet-sockets: no CAP_NET_RAW")


@pytest.mark.parametrize(("mib", "fine", "hint"), [(16, False, True), (64, True, True), (4096, True, False)])
def test_a_small_shm_is_named(monkeypatch: pytest.MonkeyPatch, mib: int, fine: bool, hint: bool) -> None:
    values = list(os.statvfs("/dev/shm"))
    values[0], values[1], values[4] = 4096, 4096, mib << 8  # f_bsize, f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    found = capabilities.PROBES["shm"]()
    assert found.available is fine
    assert ("docker run --shm-size=1g" in found.detail + found.remedy) is hint


def test_the_doctor_says_what_a_build_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from sennit.transport import _core

    monkeypatch.setattr(_core, "CRC_BY", "tables")
    monkeypatch.setattr(_core, "HAS_VERBS", False)
    core, roce = capabilities.PROBES["core"](), capabilities.PROBES["roce"]()
    assert core.available
    assert core.detail.endswith("; built without ISA-L, so CRCs are by tables and udp is slower")
    assert not roce.available
    assert roce.detail == "built without libibverbs"
    assert "Debian: libibverbs-dev" in roce.remedy
