# SPDX-License-Identifier: Apache-2.0
"""The verbs port on the kernel's RoCE: the same collectives, bit for bit, under any impairment by netem."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sennit.testbed.vm import links
from sennit.transport.communicator import Communicator
from sennit.transport.config import TransportKind, VerbsService
from sennit.transport.errors import PeerError
from tests.ranks import command
from tests.rdma.steady_sums import sum_until_told, until
from tests.transport import collective_scenarios as scenarios
from tests.transport import processes
from tests.transport.processes import Collective, act

pytestmark = pytest.mark.rdma

DEADLINE_S = 300.0
COMMAND_TIMEOUT_S = 30.0
SEED = 1
Netem = Callable[[int, str], None]
Play = Callable[..., None]
Seats = Callable[..., list[Any]]


class Ranks:
    """The ranks of one test, as processes. Leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **variables: str) -> None:
        with self._log(len(self._processes)).open("wb") as log:
            environment = {**os.environ, **variables}
            self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

    def output(self, rank: int) -> str:
        return self._log(rank).read_text()

    def are_running(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def finish(self) -> None:
        """Waits for all ranks. Fails with the output of failed ranks."""
        deadline_s = time.monotonic() + DEADLINE_S
        codes: list[int | None] = []
        try:
            for process in self._processes:
                try:
                    codes.append(process.wait(max(deadline_s - time.monotonic(), 0.1)))
                except subprocess.TimeoutExpired:
                    codes.append(None)
        finally:
            self.kill()
        texts = [
            f"rank {rank} ({'hangs' if code is None else f'exit {code}'}):\n{self.output(rank)[-3000:]}"
            for rank, code in enumerate(codes)
        ]
        assert codes == [0] * len(codes), "\n".join(texts)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _log(self, rank: int) -> Path:
        return self.folder / f"log{rank}"


@pytest.fixture
def play(groups: ModuleType, tmp_path: Path) -> Play:
    """Runs collectives on the ranks of these seats. Each rank checks its own results."""

    def run(seats: Sequence[Any], *collectives: Collective, timeout_s: float = 60.0) -> None:
        def work(group: Communicator) -> None:
            others = {route for rank, route in enumerate(group.routes) if rank != group.rank}
            assert others == {str(seats[group.rank].transport)}
            for collective in collectives:
                collective(group, SEED)

        groups.run(seats, tmp_path, work, timeout_s=timeout_s)

    return run


@pytest.fixture
def on_devices(groups: ModuleType) -> Callable[..., list[Any]]:
    """Returns seats that alternate between the two devices."""

    def make(world: int = 2, service: VerbsService = VerbsService.UC) -> list[Any]:
        return [
            groups.Seat(
                transport=TransportKind.VERBS, interface=links.netdev(rank % 2), host=f"host{rank}", service=service
            )
            for rank in range(world)
        ]

    return make


@pytest.mark.parametrize(
    ("world", "collectives"),
    [(2, [scenarios.reductions, scenarios.movement]), (3, [scenarios.point_to_point, scenarios.overlapping])],
    ids=["reductions,movement", "point_to_point,overlapping"],
)
def test_collectives_have_the_bits_of_the_definition(
    world: int, collectives: Sequence[Collective], play: Play, on_devices: Seats
) -> None:
    play(on_devices(world), *collectives)


def test_reliable_queue_pairs_carry_the_same(play: Play, on_devices: Seats) -> None:
    play(on_devices(service=VerbsService.RC), scenarios.reductions)


def test_reliable_queue_pairs_that_fail_are_brought_up_again_on_both_sides(
    netem: Netem, play: Play, on_devices: Seats
) -> None:
    # A late duplicate from the device finds its key gone, which breaks a reliable queue pair.
    for device in (0, 1):
        netem(device, "loss 1%")
    play(on_devices(service=VerbsService.RC), scenarios.reductions)


@pytest.mark.parametrize("mute", [0, 1])
def test_a_black_hole_between_devices_is_named_when_the_group_is_made(
    mute: int, netem: Netem, groups: ModuleType, on_devices: Seats, tmp_path: Path
) -> None:
    netem(mute, "loss 100%")
    with pytest.raises(PeerError) as raised:  # not TimeoutError, at the deadline
        groups.run(on_devices(), tmp_path, lambda group: None)
    deaf = 1 - mute
    assert str(raised.value).startswith(f"rank {deaf} hears nothing from rank {mute} (device rxe0 of rank 0): UDP ")
    assert f"{links.address(mute, 6)} -> [{links.address(deaf, 6)}]:4791 (" in str(raised.value)
    assert "the other direction works. Open UDP port 4791" in str(raised.value)


@pytest.mark.parametrize("settings", ["loss 1%", "duplicate 2%", "delay 2ms reorder 75% 25%", "corrupt 1%"])
def test_bytes_survive_a_bad_network(settings: str, netem: Netem, play: Play, on_devices: Seats) -> None:
    for device in (0, 1):
        netem(device, settings)
    play(on_devices(), scenarios.reductions, *([scenarios.movement] if settings.startswith("loss") else []))


@pytest.mark.parametrize("collective", [scenarios.mismatch, scenarios.late])
def test_failures_are_named(collective: Collective, play: Play, on_devices: Seats) -> None:
    play(on_devices(), collective, timeout_s=5.0)


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in range(2):
        ranks.start(
            command(partial(act, partial(processes.play, [scenarios.killed], SEED), rank, 2, tmp_path)),
            SENNIT_TRANSPORT="verbs",
            SENNIT_INTERFACES=links.netdev(rank),
            SENNIT_HOST_ID=f"host{rank}",
            SENNIT_TIMEOUT_S="5",
            HOSTS="host0,host1",
        )
    ranks.finish()


def test_too_little_memory_that_may_be_locked_is_named_with_what_to_do(tmp_path: Path) -> None:
    # The limit counts only without this capability, which root has.
    limited = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536"]
    code = "from sennit.transport import _core; c = _core.Communicator(0, 2, timeout_s=1.0, seed=1); c.verbs_open("
    code += f"['{links.address(0, 6)}'], path_count=1, path_policy='reps', congestion='fixed', window_bytes=65536, "
    code += "service='uc')"
    ended = subprocess.run(
        [*limited, sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "DeviceError: verbs: rxe0: cannot register" in ended.stderr, ended.stderr
    assert "the limit of locked memory is 65536 bytes: raise it (`ulimit -l unlimited`" in ended.stderr


def start_mixed(mixed: ModuleType, ranks: Ranks, folder: Path) -> None:
    """Starts steady sums: rank 0 with the device and rank 1 with sockets."""
    ranks.start(
        command(partial(sum_until_told, 0, 2, folder, 1)),
        SENNIT_TIMEOUT_S="60",
        SENNIT_TRANSPORT="verbs",
        SENNIT_INTERFACES=mixed.NEAR,
        SENNIT_HOST_ID="near",
    )
    ranks.start(
        ["ip", "netns", "exec", mixed.FAR, *command(partial(sum_until_told, 1, 2, folder, 1))],
        SENNIT_TIMEOUT_S="60",
        SENNIT_TRANSPORT="udp",
        SENNIT_INTERFACES=mixed.FAR,
        SENNIT_HOST_ID="far",
    )


def test_a_device_and_a_socket_understand_each_other(mixed: ModuleType, groups: ModuleType, play: Play) -> None:
    near = groups.Seat(transport=TransportKind.VERBS, interface=mixed.NEAR, host="near")
    far = groups.Seat(transport=TransportKind.UDP, interface=mixed.FAR, host="far", namespace=mixed.FAR)
    play([near, far], scenarios.reductions, scenarios.movement)


def rounds(folder: Path, rank: int) -> int:
    path = folder / f"rounds{rank}"
    return int(path.read_text() or 0) if path.exists() else 0


def test_a_link_that_goes_down_and_up_again_is_used_again(mixed: ModuleType, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    start_mixed(mixed, ranks, tmp_path)
    try:
        until(lambda: rounds(tmp_path, 0) >= 3 or not ranks.are_running(), "the first rounds")
        mixed.execute(f"ip link set {mixed.NEAR} down")
        until(lambda: not ranks.are_running() or port_state(mixed.NEAR_DEVICE) == "DOWN", "the port to be down")
        mixed.execute(f"ip link set {mixed.NEAR} up")
        before = rounds(tmp_path, 0)
        until(lambda: rounds(tmp_path, 0) >= before + 3 or not ranks.are_running(), "rounds after the break")
        (tmp_path / "stop").touch()
    except BaseException:
        ranks.kill()
        raise
    ranks.finish()
    counters = dict(line.split() for line in ranks.output(0).splitlines())
    assert int(counters["port_events"]) >= 2, counters


def test_a_device_that_is_removed_ends_nothing_before_its_users_do(mixed: ModuleType, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    start_mixed(mixed, ranks, tmp_path)
    removal: subprocess.Popen[bytes] | None = None
    try:
        until(lambda: rounds(tmp_path, 0) >= 3 or not ranks.are_running(), "the first rounds")
        # rxe cannot take a device from its users, so the command waits for them.
        removal = subprocess.Popen(["rdma", "link", "delete", mixed.NEAR_DEVICE])
        before = rounds(tmp_path, 0)
        until(lambda: rounds(tmp_path, 0) >= before + 3 or not ranks.are_running(), "rounds after it was asked to go")
        (tmp_path / "stop").touch()
        ranks.finish()
        assert removal.wait(COMMAND_TIMEOUT_S) == 0
    finally:
        ranks.kill()
        if removal is not None:
            removal.kill()
            removal.wait(COMMAND_TIMEOUT_S)
    assert not Path(f"/sys/class/infiniband/{mixed.NEAR_DEVICE}").exists()


def port_state(device: str) -> str:
    return Path(f"/sys/class/infiniband/{device}/ports/1/state").read_text().split()[-1]
