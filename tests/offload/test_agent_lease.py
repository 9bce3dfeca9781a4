# SPDX-License-Identifier: Apache-2.0
"""Trainers without rights receive by XDP through the agent: their batches, their ends, and the ends of the agent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sennit.ebpf.kernel_features import CAPABILITIES
from sennit.ebpf.library import library
from sennit.offload.agent import receiver
from sennit.offload.agent.permissions import Grant, Permissions, read_permissions
from sennit.offload.agent.receiver import LeasedReceiver
from sennit.offload.agent.server import Agent
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import TargetUnavailable
from sennit.offload.host_receiver import HostReceiver
from sennit.offload.records import encode_packets, encode_records
from sennit.testbed.topology import Planes
from tests.offload import leased_trainer
from tests.offload.strategies import random_rows

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena", "native-xdp", "tc-bpf")]
FEEDER_HOST, TRAINER_HOST = 0, 1
INTERFACE, OTHER_INTERFACE, IPV4 = "plane0", "extra0", "192.0.2.1"
PORT = 4800
# As many as there are slots, so that none of them waits for room.
BATCHES = leased_trainer.SLOTS
USER, STRANGER, AGENT_USER = 65_534, 65_533, 65_532
DEADLINE_S = 60.0
BODY_BYTES = 1300
WITHOUT_RIGHTS = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]


@pytest.fixture(scope="module")
def planes() -> Iterator[Planes]:
    with Planes(hosts=2, planes=1, mtu=1500, per_packet=True) as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    """Returns a folder that other users can go through. pytest closes its own to them whenever one begins."""
    with tempfile.TemporaryDirectory(prefix="sennit-test-") as name:
        found = Path(name)
        found.chmod(0o755)
        yield found


def write_permissions(folder: Path) -> Path:
    file = folder / "agent.toml"
    interfaces = f"interfaces = [{INTERFACE!r}, {OTHER_INTERFACE!r}]"
    file.write_text(f"[[allow]]\nusers = [{USER}, {os.getuid()}]\n{interfaces}\nports = [{PORT}, {PORT + 9}]\n")
    return file


@pytest.fixture
def agent(planes: Planes, folder: Path) -> Iterator[Path]:
    """Returns the socket of an agent on the trainer's host, which this process runs."""
    path, permissions = folder / "agent.sock", read_permissions(write_permissions(folder))

    def start() -> tuple[Agent, threading.Thread]:
        made = Agent(permissions, path)
        running = threading.Thread(target=made.run, daemon=True)
        running.start()  # stays in the namespace
        return made, running

    serving, running = planes.within(TRAINER_HOST, start)
    with serving:
        yield path
    running.join(DEADLINE_S)
    assert attached(planes) == 0


def trainer(
    planes: Planes, agent: Path, *, user: int = USER, interface: str = INTERFACE, port: int = PORT
) -> subprocess.Popen[str]:
    program = str(Path(leased_trainer.__file__))
    command = ["setpriv", f"--reuid={user}", *WITHOUT_RIGHTS, sys.executable, program, str(agent)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return planes.popen(TRAINER_HOST, [*command, interface, str(port), str(BATCHES)], **pipes)


def attached(planes: Planes) -> int:
    """Returns the number of the program at the interface, 0 for none."""

    def ask() -> int:
        found = ctypes.c_uint32()
        assert library().bpf_xdp_query_id(socket.if_nametoindex(INTERFACE), 0, ctypes.byref(found)) == 0
        return found.value

    return planes.within(TRAINER_HOST, ask)


def wait_until_detached(planes: Planes) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while attached(planes):
        assert time.monotonic() < deadline_s, "something is still attached"
        time.sleep(0.001)


def feed(planes: Planes, rng: np.random.Generator, port: int = PORT, address: str = "") -> list[str]:
    """Sends all batches. Returns what the trainer is to say about them."""
    schema, session, digests = leased_trainer.PLAN.schema, leased_trainer.SESSION, []
    place = (address or planes.addresses(TRAINER_HOST)[0], port)
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    sender = planes.within(FEEDER_HOST, lambda: socket.socket(family, socket.SOCK_DGRAM))
    with sender, HostReceiver(leased_trainer.LAYOUT, session=session) as expected:
        for batch in range(BATCHES):
            records = encode_records(schema, random_rows(schema, leased_trainer.ROWS, rng))
            for packet in encode_packets(schema, records, session=session, batch=batch, body_max_bytes=BODY_BYTES):
                sender.sendto(packet, place)
                expected.deliver(packet)
            digests.append(leased_trainer.digest(expected.batch(batch)))
            expected.release(batch)
    return digests


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_a_trainer_without_rights_has_the_batches_of_the_reference(
    planes: Planes, agent: Path, rng: np.random.Generator
) -> None:
    """And two of them share an interface."""
    with trainer(planes, agent) as first, trainer(planes, agent, port=PORT + 9) as second:
        for process, port in ((first, PORT), (second, PORT + 9)):
            assert said(process) == "ready"
            digests = feed(planes, rng, port)
            assert [said(process) for _ in digests] == digests
            assert said(process) == f"{BATCHES * leased_trainer.ROWS}"
        assert first.communicate(timeout=DEADLINE_S)[0] == ""
        assert attached(planes), "the second one has its program"
        assert second.communicate(timeout=DEADLINE_S)[0] == ""
    assert attached(planes) == 0, "the end of the second one waited for this"


def test_a_killed_trainer_leaves_nothing_attached(planes: Planes, agent: Path) -> None:
    """Though a child of it still has the connection."""
    with trainer(planes, agent) as process:
        assert said(process) == "ready"
        process.kill()
        wait_until_detached(planes)


def test_a_killed_agent_leaves_nothing_attached_and_its_trainer_says_so(planes: Planes, folder: Path) -> None:
    """And the agent is a user with three capabilities, as its unit makes it (examples/cluster/systemd)."""
    file, path = write_permissions(folder), folder / "run" / "agent.sock"
    for own in (path.parent, folder / "cache"):
        own.mkdir()
        os.chown(own, AGENT_USER, -1)
    given = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in CAPABILITIES)])
    rights = [f"--inh-caps={given}", f"--ambient-caps={given}", f"--bounding-set={given}", "--no-new-privs"]
    cache = f"XDG_CACHE_HOME={folder / 'cache'}"
    user = ["setpriv", f"--reuid={AGENT_USER}", "--clear-groups", *rights, "env", cache]
    command = [*user, sys.executable, "-m", "sennit", "agent", "--config", str(file), "--socket", str(path)]
    with planes.popen(TRAINER_HOST, command, stdout=subprocess.PIPE, text=True) as killed:
        assert said(killed) == f"ready: {path}, 1 grants of {file}"
        with trainer(planes, path) as process:
            assert said(process) == "ready"
            assert attached(planes)
            killed.kill()
            wait_until_detached(planes)
            assert said(process) == f"xdp: the agent at {path}: has ended"
            assert process.wait(DEADLINE_S) == 1
    # The next one takes the place of the socket that is left.
    with planes.popen(TRAINER_HOST, command, stdout=subprocess.PIPE, text=True) as second:
        assert said(second).startswith("ready: ")
        second.send_signal(signal.SIGTERM)
        assert second.wait(DEADLINE_S) == 0
    assert not path.exists()


def test_what_is_not_allowed_is_refused_by_name(planes: Planes, agent: Path) -> None:
    with trainer(planes, agent, user=STRANGER) as process:
        reason = f"user {STRANGER} may have no program; the agent's file says who may"
        assert said(process) == f"xdp: the agent at {agent}: {reason}"
        assert process.wait(DEADLINE_S) == 1
    with trainer(planes, agent, port=PORT + 10) as process:
        assert f"port {PORT + 10}; allowed: {OTHER_INTERFACE}, {INTERFACE} ports {PORT} to {PORT + 9}" in said(process)
    assert attached(planes) == 0


def test_a_program_needs_the_socket_of_its_port(planes: Planes, agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that forges it: of another port, of another address, of another kind, of another namespace, none."""

    def attempt() -> None:
        options: dict[str, Any] = {"session": 1, "interface": INTERFACE, "udp_port": PORT, "agent": agent}
        LeasedReceiver(leased_trainer.LAYOUT, **options).close()
        own = planes.addresses(TRAINER_HOST)[0]
        allowed = f"allowed: {own} or another address of {INTERFACE}, port {PORT}"
        forged = [
            (socket.SOCK_DGRAM, (own, PORT + 1), f"a socket of {own} port {PORT + 1}; {allowed}"),
            (socket.SOCK_DGRAM, ("::1", PORT), f"a socket of ::1 port {PORT}; {allowed}"),
            (socket.SOCK_STREAM, (own, PORT), "the socket that came along; allowed: one of UDP"),
        ]
        for kind, place, told in forged:

            def bound(address: str, port: int, kind: int = kind, place: tuple[str, int] = place) -> socket.socket:
                made = socket.socket(socket.AF_INET6, kind)
                made.bind(place)
                return made

            monkeypatch.setattr(receiver, "bound_socket", bound)
            with pytest.raises(TargetUnavailable, match=told):
                LeasedReceiver(leased_trainer.LAYOUT, **options)
        elsewhere = planes.within(FEEDER_HOST, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        monkeypatch.setattr(receiver, "bound_socket", lambda address, port: elsewhere)
        with pytest.raises(TargetUnavailable, match="another network namespace; allowed: that of the agent"):
            LeasedReceiver(leased_trainer.LAYOUT, **options)

    planes.within(TRAINER_HOST, attempt)
    assert attached(planes) == 0


def test_one_user_has_no_more_programs_and_memory_than_allowed(planes: Planes, tmp_path: Path) -> None:
    grant = Grant(
        users=frozenset({os.getuid()}),
        groups=frozenset(),
        interfaces=frozenset({INTERFACE}),
        ports=range(PORT, PORT + 9),
        leases=2,
        memory_mib=8,
    )
    small = leased_trainer.LAYOUT
    large = BatchLayout(plan=leased_trainer.PLAN, batch_rows=1 << 14, slots=4)

    def attempt() -> None:
        with Agent(Permissions((grant,)), tmp_path / "agent.sock") as serving, contextlib.ExitStack() as held:
            threading.Thread(target=serving.run, daemon=True).start()

            def ask(layout: BatchLayout, port: int) -> LeasedReceiver:
                return LeasedReceiver(layout, session=1, interface=INTERFACE, udp_port=port, agent=serving.path)

            with pytest.raises(TargetUnavailable, match=r"user \d+: \d\d MiB for batches; allowed: 8"):
                ask(large, PORT)
            held.enter_context(ask(small, PORT))
            second = held.enter_context(ask(small, PORT + 1))
            with pytest.raises(TargetUnavailable, match="has 2 programs; allowed: 2"):
                ask(small, PORT + 2)
            second.close()
            held.enter_context(ask(small, PORT + 2))

    planes.within(TRAINER_HOST, attempt)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=DEADLINE_S)


@pytest.mark.needs("ip")
def test_an_interface_of_ipv4_that_goes_away_ends_its_leases(
    planes: Planes, agent: Path, rng: np.random.Generator
) -> None:
    ends = "type", "veth", "peer", "name", OTHER_INTERFACE, "netns", planes.netns_name(FEEDER_HOST)
    planes.within(TRAINER_HOST, ip, "link", "add", OTHER_INTERFACE, *ends)
    for host, address in ((TRAINER_HOST, IPV4), (FEEDER_HOST, IPV4.replace(".1", ".2"))):
        planes.within(host, ip, "address", "add", f"{address}/24", "dev", OTHER_INTERFACE)
        planes.within(host, ip, "link", "set", OTHER_INTERFACE, "up")
    with trainer(planes, agent, interface=OTHER_INTERFACE) as process:
        assert said(process) == "ready"
        digests = feed(planes, rng, address=IPV4)
        assert [said(process) for _ in digests] == digests
        assert said(process) == f"{BATCHES * leased_trainer.ROWS}"
        planes.within(TRAINER_HOST, ip, "link", "delete", OTHER_INTERFACE)
        gone = f"{OTHER_INTERFACE} has gone, or somebody detached the program there"
        assert said(process) == f"xdp: the agent at {agent}: {gone}"
        assert process.wait(DEADLINE_S) == 1
