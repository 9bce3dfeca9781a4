# SPDX-License-Identifier: Apache-2.0
"""Plays a training run on hosts with two networks each, and counts what passes each of them.

Like a ZionEX node (Mudigere et al., ISCA '22), a host has a front-end network for torchrun, its store, the samples and
the checkpoints, and a back-end network for the collectives. Only addresses and SENNIT_INTERFACES say which network is
which.
"""

from __future__ import annotations

import filecmp
import json
import socket
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from sennit.testbed.scenarios.cast import Cast
from sennit.testbed.scenarios.counters import total
from sennit.testbed.scenarios.model import Job
from sennit.testbed.topology import Planes
from sennit.testbed.topology.traffic import Kind, PacketCounter, filter_of, interface_bytes

STORAGE_PORT: Final = 2049
CARRY_TIMEOUT_S: Final = 60.0


def carry(planes: Planes, folder: Path, target: Path, *, source: int, destination: int, address: str) -> int:
    """Sends `folder` from host `source` to host `destination`, as storage would. Returns the bytes of its files.

    `address` is of the destination, in the network that the bytes take. All hosts of a topology see the same disks, so
    only sockets of both hosts make the bytes travel. Raises OSError if files differ after it.
    """
    with (
        planes.within(destination, socket.create_server, (address, STORAGE_PORT)) as server,
        planes.within(source, socket.create_connection, (address, STORAGE_PORT), CARRY_TIMEOUT_S) as sender,
    ):
        server.settimeout(CARRY_TIMEOUT_S)
        receiver, _ = server.accept()
        with receiver:
            receiver.settimeout(CARRY_TIMEOUT_S)
            thread = threading.Thread(target=_send, args=(folder, sender), name="carry", daemon=True)
            thread.start()
            with receiver.makefile("rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                # Python 3.11 before its fourth patch has no filters.
                archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                archive.extractall(target)
            thread.join(CARRY_TIMEOUT_S)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    _, different, missing = filecmp.cmpfiles(folder, target, names, shallow=False)
    if different or missing:
        raise OSError(f"{folder} did not arrive whole: {[*different, *missing]}")
    return sum((target / name).stat().st_size for name in names)


def _send(folder: Path, sender: socket.socket) -> None:
    with sender.makefile("wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        archive.add(folder, arcname=".")
    sender.shutdown(socket.SHUT_WR)


FRONT, BACK = "front_end", "back_end"
PLANES: Final = {FRONT: "plane0", BACK: "plane1"}
RANK_PORTS: Final = (5000, 5199)
RENDEZVOUS_PORT: Final = 29400


def play(job: Job, planes: Planes, folder: Path) -> dict[str, int]:
    """Runs the job with its logs in `folder`. Returns what passed the interfaces, by network, summed over hosts.

    `NETWORK.bytes` with headers, and packets of each `Kind`; both in and out. `payload_bytes` is what the ranks say
    that they sent to each other, `record_bytes` what they took from the feeder, `checkpoint_bytes` what the files of
    their checkpoints have, which the last host gets. Raises RankError if a process fails, or at the deadline.
    """
    with counted(planes) as passed:
        before = _interface_bytes(planes)
        _run(job, planes, folder)
        last = planes.hosts - 1
        carried = carry(
            planes, folder / "checkpoints", folder / "stored",
            source=0, destination=last, address=planes.ipv4_addresses(last)[0],
        )  # fmt: skip
        found = {name: count - before[name] for name, count in _interface_bytes(planes).items()}
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return (
        found
        | passed
        | {
            "payload_bytes": report["bytes_moved"]["data_bytes_sent"],
            "record_bytes": report["ingest"]["body_bytes"],
            "checkpoint_bytes": carried,
        }
    )


@contextmanager
def counted(planes: Planes) -> Iterator[dict[str, int]]:
    """`NETWORK.KIND`: packets that passed the interfaces of all hosts meanwhile, in and out. Filled at the end."""
    found: dict[str, int] = {}
    with ExitStack() as stack:
        counters = [
            (
                f"{network}.{kind}",
                stack.enter_context(planes.within(host, PacketCounter, interface, filter_of(kind, *RANK_PORTS))),
            )
            for network, interface in PLANES.items()
            for kind in Kind
            for host in range(planes.hosts)
        ]
        yield found
        found |= total({name: counter.read()} for name, counter in counters)


def _interface_bytes(planes: Planes) -> dict[str, int]:
    return total(
        {f"{network}.bytes": planes.within(host, interface_bytes, interface)}
        for network, interface in PLANES.items()
        for host in range(planes.hosts)
    )


def _run(job: Job, planes: Planes, folder: Path) -> None:
    """Starts a torchrun on each host but the last, and a feeder there. Waits until all of them have ended."""
    data = ["--data=synthetic", f"--samples={job.samples}", "--row-limit=1000"]
    ranks = planes.hosts - 1
    front = [planes.ipv4_addresses(host)[0] for host in range(planes.hosts)]
    with Cast(planes, folder, timeout_s=job.timeout_s) as cast:
        for host in range(ranks):
            options = [
                f"--nnodes={ranks}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=split",
                f"--rdzv-endpoint={front[0]}:{RENDEZVOUS_PORT}", f"--rdzv-conf=is_host={int(host == 0)}",
                f"--local-addr={front[host]}",
                "-m", "sennit.runtime.training", f"--ingest=cpu://{front[host]}", f"--batch-size={job.batch_size}",
                f"--steps={job.steps}", "--epochs=1000", "--dim=4", "--bottom=8", "--top=8",
                f"--checkpoint={folder / 'checkpoints'}", f"--checkpoint-every={max(1, job.steps // 2)}",
                f"--json={folder / 'report.json'}",
            ]  # fmt: skip
            network = planes.environment(host) | {
                "SENNIT_INTERFACES": PLANES[BACK],
                "SENNIT_PORTS": "-".join(map(str, RANK_PORTS)),
            }
            cast.start(f"rank{host}", host, [sys.executable, "-m", "torch.distributed.run", *options], network)
        feed = ["feed", *data, f"--to={front[0]}:4800", f"--timeout={job.timeout_s:g}"]
        cast.start("feeder", ranks, [sys.executable, "-m", "sennit", *feed], {})
        cast.wait()
