# SPDX-License-Identifier: Apache-2.0
"""Networks that drop everything one way, large packets, or some paths: new groups notice before their first use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from pyroute2 import IPRoute

from sennit.testbed.topology import Impairment, Planes, namespace
from sennit.testbed.topology.fabric import port_ifindex
from tests.extent import briefly
from tests.ranks import command
from tests.testbed import meeting_rank

pytestmark = [pytest.mark.root, pytest.mark.needs("tc-bpf", "nsenter")]

# Far more than a group may take, so an error at this deadline does not come from the trial.
DEADLINE_S = 60.0
NOTHING_PASSES = Impairment(loss_fraction=1.0)


def meet(planes: Planes, folder: Path, settings: Sequence[dict[str, str]] = ({}, {})) -> list[dict[str, Any]]:
    """Returns the report of each rank."""
    ranks = []
    for rank in range(planes.hosts):
        meets = command(partial(meeting_rank.meet, rank, planes.hosts, folder / "store"))
        environment = {**os.environ, **planes.environment(rank), "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"} | settings[rank]
        ranks.append(planes.popen(rank, meets, env=environment, stdout=subprocess.PIPE, text=True))
    found = []
    for process in ranks:
        with process:
            output, _ = process.communicate(timeout=2 * DEADLINE_S)
            assert process.returncode == 0
            found.append(json.loads(output))
    return found


def set_switch_mtu(planes: Planes, mtu_bytes: int, ports: Sequence[tuple[int, int]]) -> None:
    """Makes the switch drop larger packets without telling anybody."""

    def change() -> None:
        with IPRoute() as route:
            for port in ports:
                route.link("set", index=port_ifindex(*port), mtu=mtu_bytes)

    namespace.within(planes.switch_name, change)


@pytest.mark.parametrize("mute", briefly([0, 1], [1]))
def test_a_one_way_black_hole_is_named_by_both_ranks_before_the_first_collective(mute: int, tmp_path: Path) -> None:
    with Planes(hosts=2, planes=1) as planes:
        planes.impair(NOTHING_PASSES, hosts=[mute])
        deaf = 1 - mute
        wanted = f"rank {deaf} hears nothing from rank {mute}: UDP {planes.addresses(mute)[0]} -> "
        for found in meet(planes, tmp_path):
            assert found["error"].startswith(f"PeerError: {wanted}[{planes.addresses(deaf)[0]}]:4791 "), found
            assert "packets of 4,180 to 340 bytes; the other direction works" in found["error"]
            assert "SENNIT_PORTS" in found["error"]
            assert found["took_s"] < DEADLINE_S / 2


def test_hosts_with_jumbo_frames_talk_across_a_switch_that_drops_them(tmp_path: Path) -> None:
    with Planes(hosts=2, planes=2, per_packet=True) as planes:
        set_switch_mtu(planes, 1500, [(host, plane) for host in range(2) for plane in range(2)])
        for found in meet(planes, tmp_path):
            assert not found["error"]
            assert not found["warnings"]
            assert len(found["notes"]) == 1
            assert "have 1,108 bytes: those of 4,180, which the interfaces take, do not pass" in found["notes"][0]
            assert found["notes"][0] in found["describe"]


def test_a_smaller_mtu_one_way_on_one_plane_sets_the_size_for_both(tmp_path: Path) -> None:
    with Planes(hosts=2, planes=2, per_packet=True) as planes:
        set_switch_mtu(planes, 1500, [(1, 0)])
        for found in meet(planes, tmp_path):
            assert not found["error"]
            assert "have 1,108 bytes" in found["notes"][0]
            assert "over 8 of 16 paths" in found["notes"][0]


def test_a_group_is_made_over_the_paths_that_work_and_names_the_others(tmp_path: Path) -> None:
    with Planes(hosts=2, planes=2) as planes:
        planes.impair(NOTHING_PASSES, hosts=[0], planes=[1])
        for found in meet(planes, tmp_path):
            assert not found["error"]
            assert len(found["warnings"]) == 1
            assert found["warnings"][0].startswith(
                "rank 1 hears nothing from rank 0 over 8 of 16 paths, which stay out of use: "
                f"{planes.addresses(0)[1]} -> [{planes.addresses(1)[1]}]:4791"
            )


def remove_addresses(planes: Planes, host: int, family: int) -> None:
    def remove() -> None:
        with IPRoute() as route:
            for interface in planes.interfaces(host):
                route.flush_addr(index=route.link_lookup(ifname=interface)[0], family=family)

    planes.within(host, remove)


def lose_ipv6(planes: Planes, host: int, to: int, plane: int = 0) -> None:
    """Sends the IPv6 packets between two hosts to an unused hardware address, one way."""

    def cut() -> None:
        with IPRoute() as route:
            index = route.link_lookup(ifname=planes.interfaces(host)[plane])[0]
            route.neigh(
                "replace", dst=planes.addresses(to)[plane], lladdr="02:00:00:00:00:01", ifindex=index, state=0x80
            )

    planes.within(host, cut)


@pytest.mark.parametrize("mute", briefly([0, 1], [0]))
def test_where_ipv6_is_lost_one_way_the_group_uses_ipv4_and_says_so(mute: int, tmp_path: Path) -> None:
    with Planes(hosts=2, planes=1) as planes:
        lose_ipv6(planes, mute, to=1 - mute)
        for rank, found in enumerate(meet(planes, tmp_path)):
            assert not found["error"], found
            assert not found["warnings"]
            assert len(found["notes"]) == 1
            assert found["notes"][0].startswith(
                f"ranks 0 and 1 use IPv4, because over IPv6 rank {1 - mute} hears nothing from rank {mute}: "
                f"UDP {planes.addresses(mute)[0]} -> [{planes.addresses(1 - mute)[0]}]:4791 "
            )
            assert found["took_s"] < DEADLINE_S / 2
            # The sockets of the family that is not used are closed.
            assert f"udp {planes.ipv4_addresses(rank)[0]}:4791 (4096 bytes a packet), " in found["describe"]


def test_each_interface_has_its_own_family_and_a_third_host_keeps_ipv6(tmp_path: Path) -> None:
    with Planes(hosts=3, planes=2) as planes:
        lose_ipv6(planes, 1, to=0, plane=1)
        first, second, third = meet(planes, tmp_path, [{}, {}, {}])
        for found in (first, second):
            assert not found["error"], found
            assert "ranks 0 and 1 use IPv4" in found["notes"][0]
            assert f"UDP {planes.addresses(1)[1]} -> " in found["notes"][0]
            assert planes.addresses(1)[0] not in found["notes"][0]
        assert not third["error"]
        assert third["notes"] == []


def test_a_host_with_both_families_meets_one_with_ipv4_only(tmp_path: Path) -> None:
    with Planes(hosts=2, planes=1) as planes:
        remove_addresses(planes, 1, socket.AF_INET6)
        first, second = meet(planes, tmp_path)
        assert not first["error"], first
        assert first["notes"] == []
        assert not second["error"], second
        assert second["notes"] == [
            f"rank 1 uses IPv4, because there is no IPv6 address on plane0 ({planes.ipv4_addresses(1)[0]})"
        ]


def test_other_ranks_hear_why_there_is_no_group(tmp_path: Path) -> None:
    with Planes(hosts=3, planes=1) as planes:
        # Host 1's packets to host 0 are lost. Its packets to host 2 arrive.
        for host in range(3):
            remove_addresses(planes, host, socket.AF_INET)
        lose_ipv6(planes, 1, to=0)
        first, second, third = meet(planes, tmp_path, [{}, {}, {}])
        wanted = "rank 0 hears nothing from rank 1"
        assert first["error"].startswith(f"PeerError: {wanted}")
        assert second["error"].startswith(f"PeerError: {wanted}")
        assert f"allreduce (operation 1 of the group): {wanted}" in third["error"]


def test_two_doctors_meet_over_the_network_and_say_what_passes() -> None:
    with Planes(hosts=2, planes=1) as planes:
        doctors = []
        for host, ends in enumerate((["--listen"], ["--peer", planes.addresses(0)[0]])):
            command = [sys.executable, "-m", "sennit", "doctor", "--json", *ends]
            environment = {**os.environ, "SENNIT_INTERFACES": planes.interfaces(host)[0]}
            pipe = subprocess.PIPE
            process = planes.popen(host, command, env=environment, stdout=pipe, stderr=pipe, text=True)
            doctors.append(process)
            if host == 0:
                # It writes a line when it listens.
                assert process.stderr is not None
                assert "waiting for the other machine" in process.stderr.readline()
        for host, process in enumerate(doctors):
            with process:
                output, _ = process.communicate(timeout=DEADLINE_S)
            report = json.loads(output)
            assert report["ok"], report
            assert report["route"] == "udp"
            assert f"[{planes.addresses(host)[0]}]:4791" in report["description"]


def test_a_path_that_becomes_narrower_later_is_named(tmp_path: Path) -> None:
    with Planes(hosts=2, planes=1) as planes:
        ranks = []
        for rank in range(2):
            meets = command(partial(meeting_rank.meet, rank, 2, tmp_path / "store", again=True))
            environment = {**os.environ, **planes.environment(rank), "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
            pipe = subprocess.PIPE
            ranks.append(planes.popen(rank, meets, env=environment, stdin=pipe, stdout=pipe, text=True))
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "once\n"

        def narrow() -> None:
            # Sets the route as the kernel does when a router says "packet too big".
            with IPRoute() as route:
                index = route.link_lookup(ifname=planes.interfaces(0)[0])[0]
                destination = f"{planes.addresses(1)[0]}/128"
                route.route("add", dst=destination, oif=index, metrics={"mtu": 1500}, family=socket.AF_INET6)

        planes.within(0, narrow)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        found = []
        for process in ranks:
            with process:
                output, _ = process.communicate(timeout=2 * DEADLINE_S)
                found.append(json.loads(output))
        for rank in found:
            assert "cannot be sent packets of 4180 bytes any more" in rank["error"], rank
            assert f" -> [{planes.addresses(1)[0]}]:4791 has become too narrow" in rank["error"]
