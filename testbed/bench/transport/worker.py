# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the benchmark: obeys the conductor's commands, one at a time.

`python -m sennit.testbed.bench.transport.worker LIBRARY SOCKET [RANK WORLD STORE]`. Between commands a worker sleeps
in a socket read, even if its library would busy-wait.
"""

import sys
from multiprocessing.connection import Client

from sennit.testbed.bench.peak_memory import peak_bytes, reset_peak
from sennit.testbed.bench.transport.library import Library, make_library
from sennit.testbed.bench.transport.worker_commands import (
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


def _measure(library: Library, command: Measure) -> float:
    library.run(command.peer, command.case, 1)  # untimed: aligns the ranks
    return library.run(command.peer, command.case, command.iterations)


def _obey(library: Library, command: Command) -> float | int | None:
    match command:
        case Join(peer):
            library.join(peer)
        case Verify(peer, case):
            library.verify(peer, case)
        case Measure():
            return _measure(library, command)
        case Allocate(case):
            library.allocate(case)
        case ResetPeak():
            return reset_peak()
        case ReadPeak():
            return peak_bytes()
        case Stop():
            library.stop()
    return None


def main(arguments: list[str]) -> None:
    """Connects to the conductor, introduces itself, and obeys until the conductor says stop."""
    library = make_library(arguments[0], arguments[2:])
    with Client(arguments[1], family="AF_UNIX") as conductor:
        conductor.send(library.rank)
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
