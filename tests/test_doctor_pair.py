# SPDX-License-Identifier: Apache-2.0
"""`sennit doctor --listen` and `--peer`: two machines test the network between them; here, one machine over lo."""

from __future__ import annotations

import json
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from typer.testing import CliRunner

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit import host_name
from sennit.commands.cli import app
from sennit.doctor import capabilities, doctor_pair, pair_store
from sennit.transport.errors import ConfigError, DeviceError, TimeoutError
from tests.free_ports import free_ports

runner = CliRunner()


def test_two_doctors_meet_and_find_the_paths_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENNIT_INTERFACES", "lo")
    monkeypatch.setattr(host_name, "leads_here_only", lambda *_: "")
    port = free_ports(1)[0]
    said: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(doctor_pair.listen, port, say=said.put, timeout_s=30.0)
        assert f"sennit doctor --peer {socket.gethostname()} --port {port}" in said.get(timeout=30.0)
        visited = doctor_pair.visit("127.0.0.1", port)
        listened = listening.result(60.0)
    for report in (visited, listened):
        assert report.ok, report.error
        assert report.route == "udp"
        assert "4096 bytes a packet" in report.description
        assert "8 paths a rail" in report.description
        assert report.notes == ()


def test_a_name_that_leads_to_this_machine_itself_is_refused_with_what_to_do() -> None:
    report = doctor_pair.visit("web1", resolve=lambda _: ["127.0.1.1"])
    assert not report.ok
    assert report.error.startswith("web1 resolves to 127.0.1.1 here, which is this machine itself")
    assert "/etc/hosts" in report.error


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "Localhost.", "localhost.localdomain"])
def test_no_advice_would_give_localhost_another_address(host: str) -> None:
    """Whoever follows the one for names would break the machine."""
    assert doctor_pair.visit(host, resolve=lambda _: ["127.0.0.1"]).error == (
        f"{host} is this machine itself; give an address of the other one (there: `ip -brief address`)"
    )
    assert "/etc/hosts" not in host_name.what_to_do(host, "127.0.0.1")
    assert "/etc/hosts" in host_name.what_to_do("web1.localhost.example", "127.0.0.1")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.1.1"], "127.0.1.1"),
        (["::1", "127.0.0.1"], "::1"),
        (["127.0.1.1", "10.0.0.5"], ""),
        (["10.0.0.5"], ""),
        ([], ""),
    ],
)
def test_only_a_name_with_no_other_address_leads_nowhere_else(addresses: list[str], expected: str) -> None:
    assert host_name.leads_here_only("web1", lambda _: addresses) == expected

    def unknown(_: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert host_name.leads_here_only("web1", unknown) == ""


def test_the_doctor_of_one_machine_names_the_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_name, "leads_here_only", lambda _: "127.0.1.1")
    found = capabilities.PROBES["host-name"]()
    assert not found.available
    assert f"{socket.gethostname()} is 127.0.1.1, where nobody else meets it" in found.detail
    assert "MASTER_ADDR" in found.remedy


def test_nobody_there_is_an_error_with_what_to_do() -> None:
    result = runner.invoke(app, ["doctor", "--peer", "127.0.0.2", "--port", str(free_ports(1)[0]), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"].startswith("127.0.0.2 is this machine itself; give an address")
    with pytest.raises(DeviceError, match=r"cannot reach 127.0.0.1 at TCP port .*sennit doctor --listen"):
        pair_store.connect("127.0.0.1", free_ports(1)[0], 5.0)
    with pytest.raises(ConfigError, match=r"name.invalid has no address"):
        pair_store.connect("name.invalid", 4790, 5.0)
    with (
        pair_store.listen(0) as server,
        pytest.raises(DeviceError, match=r"cannot listen at TCP port .*--port"),
    ):
        pair_store.listen(server.getsockname()[1])
    report = doctor_pair.listen(free_ports(1)[0], say=lambda _: None, timeout_s=0.05)
    assert report.error == "no other machine came within 0.05 s; run sennit doctor --peer HOST on it"


def test_one_command_does_not_do_both() -> None:
    assert runner.invoke(app, ["doctor", "--listen", "--peer", "127.0.0.1"]).exit_code == 2


def use_both(local: pair_store.LocalStore, remote: pair_store.RemoteStore) -> None:
    remote.set("a", "1")
    assert local.get("a") == remote.get("a") == b"1"
    assert not remote.check(["a", "b"])
    assert remote.add("n", 2) == 2
    assert local.add("n", 3) == 5
    assert remote.compare_set("c", "", "x") == b"x"
    assert remote.compare_set("c", "y", "z") == b"x"
    threading.Timer(0.05, local.set, ("b", "2")).start()
    remote.wait(["a", "b"], timedelta(seconds=10))
    with pytest.raises(TimeoutError):
        remote.wait(["never"], timedelta(seconds=0.01))


def test_the_store_of_two_machines() -> None:
    with pair_store.listen(0) as server:
        remote = pair_store.connect("127.0.0.1", server.getsockname()[1], 5.0)
        local, peer = pair_store.accept(server, 5.0)
    with remote:
        use_both(local, remote)
    assert peer == "127.0.0.1"
