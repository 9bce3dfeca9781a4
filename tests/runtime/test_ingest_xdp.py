# SPDX-License-Identifier: Apache-2.0
"""A feeder in one network namespace, a trainer with XDP in another: the weights equal those of a run from memory."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sennit.ebpf.kernel_features import CAPABILITIES
from sennit.testbed.topology import Impairment, Planes, namespace
from tests.forked_commands import ForkedCommand
from tests.runtime.whole_run import train

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.needs("bpf", "arena", "native-xdp", "tc-bpf"),
    pytest.mark.timeout(240),
]
PROGRAM = "sennit.testbed.scenarios.mortal_trainer"
DATA = ["--data", "flights"]
SMALL_DATA = ["--data", "synthetic", "--samples", "3000", "--row-limit", "200"]
SMALL = ["--batch-size", "64", "--dim", "4", "--bottom", "8", "--top", "8", "--sharding", "table_wise"]
RUN = ["--ranks", "2", "--steps", "24", "--timeout", "60"]
FEEDER_HOST, TRAINER_HOST = 0, 1
DEADLINE_S = 90.0
# 24 batches and the evaluation rows are 5 MB of records, which take some seconds.
RATE_BITS_PER_S, QUEUE_BYTES = 6_000_000, 200_000
LOSS = 0.02
# Bytes: what every driver takes in one piece, what a virtual interface does, and jumbo frames.
ETHERNET_MTU, MTU, JUMBO_MTU = 1500, 3500, 9000

# Root with the capabilities of the DaemonSet (examples/cluster/kubernetes/xdp.yaml), and no others.
GIVEN = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in CAPABILITIES)])
AS_IN_A_POD = ["setpriv", f"--inh-caps={GIVEN}", f"--bounding-set={GIVEN}", "--no-new-privs"]


def sennit(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sennit", *arguments]


@pytest.fixture(scope="module")
def from_memory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the fingerprint of the weights of a run from memory."""
    return str(
        train(tmp_path_factory.mktemp("memory") / "report.json", *DATA, "--order", "shuffled", *RUN)["weights_sha256"]
    )


@pytest.fixture
def planes(request: pytest.FixtureRequest) -> Iterator[Planes]:
    with Planes(hosts=2, planes=2, mtu=getattr(request, "param", MTU), per_packet=True) as made:
        yield made


class Trainer:
    """`sennit train --ingest xdp://…` on its host."""

    def __init__(self, planes: Planes, folder: Path, interfaces: int = 2, prefix: Sequence[str] = ()) -> None:
        self.path = folder / "report.json"
        target = f"xdp://{','.join(planes.interfaces(TRAINER_HOST)[:interfaces])}"
        command = [*prefix, *sennit("train", "--ingest", target, *RUN, "--json", str(self.path))]
        self.process = planes.popen(TRAINER_HOST, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def report(self) -> dict[str, Any]:
        said, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, said
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content


def feed(planes: Planes) -> subprocess.Popen[str]:
    to = f"[{planes.addresses(TRAINER_HOST)[0]}]:4800"
    command = sennit("feed", *DATA, "--to", to, "--timeout", "60")
    return planes.popen(FEEDER_HOST, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("planes", [JUMBO_MTU], indirect=True, ids=["jumbo frames"])
def test_weights_are_those_of_a_run_from_memory(planes: Planes, tmp_path: Path, from_memory: str) -> None:
    """Both ranks use one interface, with no rights but those that XDP takes. In the next test each has its own."""
    trainer = Trainer(planes, tmp_path, interfaces=1, prefix=AS_IN_A_POD)
    feeder = feed(planes)
    report = trainer.report()
    assert report["weights_sha256"] == from_memory
    assert report["ingest"]["records"] == 24 * 2048 + report["quality"]["sample_count"]
    assert report["ingest"]["feeders_lost"] == 0
    assert "bpf" not in report["cost"]["roles"], "CAP_SYS_ADMIN is not among the rights"
    said, _ = feeder.communicate(timeout=DEADLINE_S)
    assert feeder.returncode == 0, said


@pytest.mark.long
def test_so_they_are_with_loss_strangers_and_a_feeder_that_is_killed(
    planes: Planes, tmp_path: Path, from_memory: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is slow, so that the first feeder dies in the middle. Another one continues there."""
    monkeypatch.setenv("SENNIT_BPF_STATISTICS", "1")
    planes.impair(Impairment(loss_fraction=LOSS, seed=seed), hosts=[FEEDER_HOST])
    planes.limit_rate(RATE_BITS_PER_S, queue_bytes=QUEUE_BYTES, hosts=[FEEDER_HOST])
    trainer = Trainer(planes, tmp_path)
    first = feed(planes)
    # What it says while it reads its data, for long on a busy machine, has far fewer bytes.
    wait_for(lambda: planes.counters(FEEDER_HOST, 0).bytes > 300_000, "the first feeder sends nothing")
    assert trainer.process.poll() is None
    first.kill()
    first.wait(DEADLINE_S)
    stranger = planes.within(FEEDER_HOST, lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
    with stranger:
        for number in range(100):
            stranger.sendto(bytes(number), (planes.addresses(TRAINER_HOST)[0], 4800))
    second = feed(planes)
    report = trainer.report()
    assert report["weights_sha256"] == from_memory
    counted = report["ingest"]
    assert counted["records"] == 24 * 2048 + report["quality"]["sample_count"]
    # Both ranks had both. One that dies while it owes nobody rows is not counted as lost.
    assert counted["feeders"] == 4
    assert report["cost"]["roles"]["bpf"]["processor_s"] > 0
    assert report["cost"]["roles"]["ingest"]["processor_s"] > 0
    assert counted["gaps"] + counted["silences"] > 0
    assert counted["datagrams"]["foreign"] + counted["datagrams"]["truncated"] > 0
    assert planes.counters(FEEDER_HOST, 0).dropped > 0
    said, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, said


@pytest.mark.parametrize("planes", [ETHERNET_MTU], indirect=True, ids=["Ethernet"])
def test_ranks_that_are_left_share_the_interface_anew(planes: Planes, tmp_path: Path) -> None:
    """The rank dies that had attached the dispatcher. Without a checkpoint, two ranks begin again."""
    small = [*SMALL, "--steps", "24", "--timeout", "60"]
    expected = train(tmp_path / "memory.json", *SMALL_DATA, "--order", "shuffled", *small, "--ranks", "2")
    path = tmp_path / "report.json"
    target = f"xdp://{planes.interfaces(TRAINER_HOST)[0]}"
    to = f"[{planes.addresses(TRAINER_HOST)[0]}]:4800"
    there, here = (namespace.path_of(planes.netns_name(host)) for host in (TRAINER_HOST, FEEDER_HOST))
    deaths = json.dumps([[0, 3, str(tmp_path / "died")]])
    training = [*small, "--ranks", "3", "--elastic", "--json", str(path), "--ingest", target]
    with (
        ForkedCommand(PROGRAM, *training, network=there, DEATHS=deaths) as trainer,
        ForkedCommand("sennit", "feed", *SMALL_DATA, "--to", to, "--timeout", "60", network=here) as feeder,
    ):
        done = trainer.end(DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        fed = feeder.end(DEADLINE_S)
        assert fed.returncode == 0, fed.stdout + fed.stderr
    report = json.loads(path.read_text())
    (change,) = report["changes"]
    assert (change["lost"], change["world_size"], change["step"]) == ([0], 2, 0)
    assert report["weights_sha256"] == expected["weights_sha256"]
