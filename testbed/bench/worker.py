# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the benchmark: obeys the conductor's commands, one at a time.

`python -m sennit.testbed.bench.worker torch|openmpi SOCKET [RANK WORLD STORE]`. Between commands a worker sleeps in
a socket read, whatever its peer library does while it waits.
"""

import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Protocol

from sennit.testbed.bench.cases import Case
from sennit.testbed.bench.commands import (
    Allocate,
    Command,
    Failure,
    Join,
    Measure,
    ReadPeak,
    ResetPeak,
    Stop,
    Verify,
)


class Peer(Protocol):
    """A collective library, on one rank."""

    def join(self, peer: str) -> None: ...

    def prepare(self, peer: str, case: Case) -> Callable[[], None]:
        """The operation, ready to run any number of times on tensors that are kept for the case."""

    def barrier(self, peer: str) -> None: ...

    def verify(self, peer: str, case: Case) -> None: ...

    def stop(self) -> None: ...


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def _measure(library: Peer, command: Measure) -> float:
    operation = library.prepare(command.peer, command.case)
    library.barrier(command.peer)
    operation()  # untimed: brings the ranks into step
    begin = time.perf_counter()
    for _ in range(command.iterations):
        operation()
    return (time.perf_counter() - begin) / command.iterations


def _obey(library: Peer, command: Command) -> float | int | None:
    match command:
        case Join(peer):
            library.join(peer)
        case Verify(peer, case):
            library.verify(peer, case)
        case Measure():
            return _measure(library, command)
        case Allocate(case):
            library.prepare("", case)
        case ResetPeak():
            # proc(5), clear_refs: 5 resets the peak resident set size.
            Path("/proc/self/clear_refs").write_text("5")
            return _status_bytes("VmRSS")
        case ReadPeak():
            return _status_bytes("VmHWM")
        case Stop():
            library.stop()
    return None


def main(arguments: list[str]) -> None:
    """Connects to the conductor, says who it is, and obeys until told to stop."""
    library: Peer
    if arguments[0] == "torch":
        from sennit.testbed.bench.torch_peer import TorchPeer

        rank, world = int(arguments[2]), int(arguments[3])
        library = TorchPeer(rank=rank, world=world, store_path=arguments[4])
    else:
        from sennit.testbed.bench.openmpi_peer import OpenMpiPeer

        library = OpenMpiPeer()
        rank = library.rank
    with Client(arguments[1], family="AF_UNIX") as conductor:
        conductor.send(rank)
        while True:
            command = conductor.recv()
            try:
                answer = _obey(library, command)
            except Exception as error:
                conductor.send(Failure(f"{type(error).__name__}: {error}"))
                raise
            conductor.send(answer)
            if isinstance(command, Stop):
                return


if __name__ == "__main__":
    main(sys.argv[1:])
