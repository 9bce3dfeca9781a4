# SPDX-License-Identifier: Apache-2.0
"""The conductor's end of one library's ranks: starts them in their namespaces, asks, waits, ends them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sennit.errors import SennitError
from sennit.testbed.scenarios import kernel_packets
from sennit.testbed.scenarios.counters import total
from sennit.testbed.scenarios.model import Library, Variant
from sennit.testbed.topology import Planes

Answer = dict[str, Any]

# The deadline of a start. Importing torch on a busy machine takes the longest.
JOIN_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 15.0
LOG_TAIL_LINES: Final = 30
READ_BYTES: Final = 1 << 20


class RankError(SennitError):
    """A rank ended, failed or stayed silent unexpectedly. The message has its last words."""


@dataclass(frozen=True)
class Event:
    """An action of the conductor while it waits."""

    at_s: float
    """Seconds after the question was asked."""
    name: str
    do: Callable[[], None]


class Ranks:
    """One process per host. The context manager leaves nothing of them behind."""

    def __init__(
        self,
        planes: Planes,
        *,
        library: Library,
        world: int,
        variant: Variant,
        timeout_s: float,
        folder: Path,
    ) -> None:
        self.library = library
        self.happened: list[tuple[str, float]] = []
        """Name and monotonic time of every event so far."""
        self._pids: list[int] = []
        self._logs = [folder / f"{library}-rank{rank}.log" for rank in range(world)]
        self._processes: list[subprocess.Popen[bytes]] = []
        store = folder / f"{library}-store"
        try:
            for rank, log in enumerate(self._logs):
                interfaces = ",".join(planes.interfaces(rank))
                command = [sys.executable, "-m", "sennit.testbed.scenarios.rank", library, str(rank), str(world)]
                with log.open("ab") as stderr:
                    process = planes.popen(
                        rank,
                        [*command, str(store), str(timeout_s), interfaces],
                        env=_environment(interfaces, variant, timeout_s, rank),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        # A terminal's interrupt is for the conductor, which then ends the ranks in order.
                        start_new_session=True,
                    )
                self._processes.append(process)
            self._pids = [answer["pid"] for answer in self.ask({"do": "join"}, timeout_s=JOIN_TIMEOUT_S)]
        except BaseException:
            self._end()
            raise

    def ask(
        self,
        command: dict[str, Any],
        *,
        timeout_s: float,
        events: Sequence[Event] = (),
        silent: Collection[int] = (),
    ) -> list[Answer]:
        """Every rank's answer, in rank order; an empty one for `silent` ranks, which nobody waits for.

        Fires all `events` meanwhile, even if the answers come sooner.
        """
        line = json.dumps(command).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            if process.poll() is None:
                with contextlib.suppress(BrokenPipeError):  # it has died since: found out below
                    process.stdin.write(line)
                    process.stdin.flush()
            elif rank not in silent:
                raise self._error(rank, f"had ended with status {process.returncode} before {command['do']}")
        asked_s = time.monotonic()
        waiting = sorted(events, key=lambda event: event.at_s)
        answers: dict[int, Answer] = {rank: {} for rank in silent}
        partial: dict[int, bytes] = {rank: b"" for rank in range(len(self._processes)) if rank not in answers}
        with selectors.DefaultSelector() as selector:
            for rank in partial:
                selector.register(_stdout(self._processes[rank]), selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes) or waiting:
                now_s = time.monotonic() - asked_s
                while waiting and waiting[0].at_s <= now_s:
                    event = waiting.pop(0)
                    self.happened.append((event.name, time.monotonic()))
                    event.do()
                if now_s > timeout_s:
                    missing = sorted(rank for rank in partial if rank not in answers)
                    raise self._error(missing[0], f"gave no answer to {command['do']} in {timeout_s:g} s")
                pause_s = min([timeout_s - now_s, *(event.at_s - now_s for event in waiting[:1])])
                for key, _ in selector.select(max(pause_s, 0.0)):
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        raise self._error(key.data, f"ended at {command['do']}")
                    partial[key.data] += data
                    if data.endswith(b"\n"):
                        answers[key.data] = self._answer(key.data, partial[key.data])
                        selector.unregister(key.fd)
        return [answers[rank] for rank in range(len(self._processes))]

    def kill(self, rank: int) -> None:
        os.kill(self._pids[rank], signal.SIGKILL)

    def suspend(self, rank: int) -> None:
        os.kill(self._pids[rank], signal.SIGSTOP)

    def unread_bytes(self, silent: Collection[int] = ()) -> int:
        """Bytes that have arrived for ranks that are not `silent`, and that these have not read."""
        return sum(kernel_packets.waiting_bytes(pid) for rank, pid in enumerate(self._pids) if rank not in silent)

    def lost_by_kernel(self, silent: Collection[int] = ()) -> dict[str, int]:
        """What the kernels of ranks that are not `silent` have dropped (`kernel_packets.losses`)."""
        return total(kernel_packets.losses(pid) for rank, pid in enumerate(self._pids) if rank not in silent)

    def stop(self, silent: Collection[int] = ()) -> None:
        """Ends all ranks that are not `silent` in order."""
        self.ask({"do": "stop"}, timeout_s=STOP_TIMEOUT_S, silent=silent)

    def log_tails(self) -> dict[str, str]:
        return {log.name: _tail(log) for log in self._logs}

    def _answer(self, rank: int, line: bytes) -> Answer:
        answer: Answer = json.loads(line)
        if "failure" in answer:
            raise self._error(rank, answer["failure"])
        return answer

    def _error(self, rank: int, what: str) -> RankError:
        tail = _tail(self._logs[rank])
        return RankError(f"{self.library} rank {rank} {what}" + (f"\n{tail}" if tail else ""))

    def _end(self) -> None:
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for process in self._processes:
            process.kill()  # this kills a suspended process too
            process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


def _environment(interfaces: str, variant: Variant, timeout_s: float, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        **({"SENNIT_HOST_ID": variant.layout[rank]} if variant.layout else {}),
        "SENNIT_ALGORITHM": variant.algorithm,
        "SENNIT_TRANSPORT": variant.transport,
        "SENNIT_PATHS": str(variant.paths),
        "SENNIT_INTERFACES": interfaces,
        "SENNIT_TIMEOUT_S": str(timeout_s),
        "SENNIT_PEER_TIMEOUT_S": str(variant.peer_timeout_s),
        "GLOO_SOCKET_IFNAME": interfaces,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _stdout(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return process.stdout.fileno()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
