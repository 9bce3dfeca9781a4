# SPDX-License-Identifier: Apache-2.0
"""`sennit trace packets`: the file has what was on the wire, packet by packet."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scapy", reason="scapy is not installed (pip install scapy)")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")
pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")

from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.utils import RawPcapNgReader

from sennit.testbed.topology import Planes
from sennit.transport.oracle import roce
from tests.forked_commands import forked
from tests.testbed.answering_ranks import DEADLINE_S, WORLD, Ranks, Start
from tests.testbed.trace_runs import SENNIT, last_pages, session

ROCE_PORT = 4791
WRITE_IMMEDIATE, SEND_ONLY = 0x2B, 0x24
SEGMENTS_MAX = 128  # Linux's UDP_MAX_SEGMENTS
RETH_ADDRESS = slice(12, 20)  # after the BTH


def packets_of(path: Path) -> list[tuple[str, UDP, bytes]]:
    """Returns source address, UDP header and datagram of each packet of the file."""
    found = []
    with RawPcapNgReader(str(path)) as reader:
        for data, _ in reader:
            frame = Ether(data)
            ip = frame[IPv6] if IPv6 in frame else frame[IP]
            found.append((ip.src, frame[UDP], bytes(frame[UDP].payload)))
    return found


def dropped_of(path: Path) -> int:
    """The super-packets that the file says are missing in it: option 7 of its statistics, block 5."""
    content, begin, found = path.read_bytes(), 0, None
    while begin < len(content):
        kind, length = struct.unpack_from("<II", content, begin)
        option = begin + 20
        while kind == 5 and option < begin + length - 4:
            code, size = struct.unpack_from("<HH", content, option)
            if code == 7:
                (found,) = struct.unpack_from("<Q", content, option + 4)
            option += 4 + size + -size % 4
        begin += length
    assert found is not None
    return int(found)


def is_probe_of_trial(datagram: bytes) -> bool:
    return datagram[0] == WRITE_IMMEDIATE and not any(datagram[RETH_ADDRESS])


def barriers(ranks: Ranks) -> None:
    for _ in range(50):
        for rank in range(WORLD):
            ranks.begin_barrier(rank)
        for rank in range(WORLD):
            assert ranks.answer(rank)


@contextlib.contextmanager
def planes_and_starter() -> Iterator[tuple[Planes, Start]]:
    """Each rank has its own host, a namespace. So both can use RoCE's port, whatever else runs on this machine."""
    environment = {**os.environ, "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    with Planes(hosts=WORLD, planes=1) as planes:

        def start(rank: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
            return planes.popen(rank, command, env=environment | planes.environment(rank), **options)

        yield planes, start


def of_first_host(planes: Planes) -> tuple[list[str], list[str]]:
    """Returns the command prefix that runs a command on the first host, and the options of a capture there."""
    enter = ["nsenter", f"--net=/run/netns/{planes.netns_name(0)}"]
    return enter, ["packets", "--interface", planes.interfaces(0)[0]]


@pytest.mark.root
@pytest.mark.needs("tc-bpf", "nsenter")
def test_every_packet_of_a_host_is_there_as_it_was_on_the_wire(tmp_path: Path, seed: int) -> None:
    """Super-packets of 64 KiB are captured too. Each packet cut from one has the right ICRC."""
    path = tmp_path / "all.pcapng"
    with planes_and_starter() as (planes, start):
        enter, options = of_first_host(planes)
        with session(*options, "--write", str(path), said="packets of", enter=enter):
            pages = last_pages(Ranks(start, tmp_path, seed))
        ours = planes.addresses(0)[0]
    found = packets_of(path)
    assert {udp.dport for _, udp, _ in found} == {ROCE_PORT}
    missing = 0
    mine, theirs = ([one for one in found if (one[0] == ours) is own] for own in (True, False))
    for captured, page in ((mine, pages[0]), (theirs, pages[1])):
        # The trial's probes come before a flow counts packets. They are data packets to address 0.
        opcodes = [datagram[0] for _, _, datagram in captured if not is_probe_of_trial(datagram)]
        assert len(opcodes) < len(captured)
        for opcode, counter in ((WRITE_IMMEDIATE, "data_packets_sent"), (SEND_ONLY, "control_packets_sent")):
            sent = page.total("flow", counter)
            assert opcodes.count(opcode) <= sent
            missing += sent - opcodes.count(opcode)
        assert len(opcodes) == opcodes.count(WRITE_IMMEDIATE) + opcodes.count(SEND_ONLY)
    # On a busy machine the session may be too late for some. It says for how many super-packets.
    assert missing <= SEGMENTS_MAX * dropped_of(path)
    theirs_address = theirs[0][0]
    for source, udp, datagram in found:
        ends = ((source, udp.sport), (theirs_address if source == ours else ours, ROCE_PORT))
        assert roce.Packet.pull(datagram).icrc == roce.icrc(datagram[:-4], *ends)


@pytest.mark.root
@pytest.mark.needs("tc-bpf", "nsenter")
def test_one_flow_is_filtered_in_the_kernel(tmp_path: Path, seed: int) -> None:
    with planes_and_starter() as (planes, start), Ranks(start, tmp_path, seed) as ranks:
        enter, options = of_first_host(planes)

        def capture(name: str, *flow: str) -> AbstractContextManager[subprocess.Popen[str]]:
            return session(*options, "--write", str(tmp_path / name), *flow, said="packets of", enter=enter)

        # Numbers of queue pairs and ports are random, so a first capture finds them.
        with capture("all"):
            barriers(ranks)
        _, udp, datagram = packets_of(tmp_path / "all")[-1]
        qpn, source_port = roce.Packet.pull(datagram).bth.qpn, udp.sport
        with (
            capture("qpn", "--qpn", f"{qpn}"),
            capture("source_port", "--source-port", f"{source_port}"),
            capture("peer", "--peer", planes.addresses(1)[0]),
            capture("stranger", "--peer", "10.9.8.7"),
        ):
            barriers(ranks)
        command = [*enter, *SENNIT, "trace", *options, "--count", "40", "--write", str(tmp_path / "some")]
        ended = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert ended.stderr is not None
        assert "packets of" in ended.stderr.readline()
        barriers(ranks)
        output, _ = ended.communicate(timeout=DEADLINE_S)
    assert (ended.returncode, output) == (0, f"{tmp_path / 'some'}: 40 packets, 0 dropped\n")
    assert len(packets_of(tmp_path / "some")) == 40
    assert {roce.Packet.pull(datagram).bth.qpn for _, _, datagram in packets_of(tmp_path / "qpn")} == {qpn}
    assert {udp.sport for _, udp, _ in packets_of(tmp_path / "source_port")} == {source_port}
    assert len(packets_of(tmp_path / "peer")) > len(packets_of(tmp_path / "source_port"))
    assert packets_of(tmp_path / "stranger") == []


@pytest.mark.root
@pytest.mark.needs("tc-bpf")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--interface", "none0", "--write", "x"], "there is no interface 'none0' here; there are"),
        (["--interface", "lo", "--write", "x", "--peer", "nobody"], "'nobody' does not appear to be an IPv4"),
        (["--interface", "lo", "--write", "x", "--qpn", "16777216"], "16777215"),
        (["--interface", "lo", "--write", "/proc/none/x"], "cannot be written"),
        (["--interface", "lo", "--write", "/dev/full"], "No space left on device"),
    ],
)
def test_what_cannot_be_captured_is_said(options: list[str], said: str, tmp_path: Path) -> None:
    given = [str(tmp_path / "x") if option == "x" else option for option in options]
    done = forked("sennit", "trace", "packets", "--seconds", "0.1", *given, timeout_s=DEADLINE_S)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.replace("│", " ").split())
