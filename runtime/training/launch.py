# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine, and returns their results, or the reason why they failed.

torchrun does the same over several machines. This is for `sennit train --ranks N`: one process starts a run, and one
message explains its failure.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import ipaddress
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Self

from sennit.command_line import OutputLost, stdout_console, watch_output
from sennit.runtime.backend.torch_versions import Store, TCPStore
from sennit.runtime.ingest.address import Address
from sennit.transport.errors import AbortedError, ConfigError, PeerError, SennitError, TimeoutError, Unsupported
from sennit.transport.meeting.rails import Rail

# The time after a failure in which other ranks may report theirs, and the time for any rank to exit.
GRACE_S = 5.0
# The time in which others may fail of the same, before a rank's failure is told while they go on.
ALONE_S = 1.0
# Imports take a second or more of processor time. So one process imports, and the ranks are its forks. pyarrow imports
# pandas, where it is installed, as soon as an array is made or read.
PRELOAD = ["torch._dynamo", "sennit.runtime.training.run", "pyarrow.compute", "pandas"]
# What starts no threads there. pyarrow's jemalloc would start one when it is imported.
SINGLE = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

RankFunction = Callable[[Any, int, int, Store], Any]


class RankFailure(SennitError):
    """A rank failed. The message is that rank's."""


@dataclass(frozen=True, slots=True)
class _Job:
    environment: dict[str, str]
    function: RankFunction
    argument: Any
    address: Address
    store_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    rank: int
    result: Any = None
    error: str | None = None
    consequence: bool = False
    """The rank only reports that another rank is gone."""

    unwritten: OutputLost | None = None
    """The rank cannot write its output."""


def serve_store(port: int, *, timeout_s: float) -> tuple[Store, Address]:
    """Serves a store in this process, which outlives all ranks because it is none. Port 0 takes a free port.

    The store listens on every address of this machine. The address returned is for ranks of this machine. Raises
    Unsupported without an interface for it: torch would try for minutes.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            probe.sendto(b"", probe.getsockname())
    except OSError as error:
        where = f"cannot send to 127.0.0.1: {error.strerror}, where ranks of this machine meet"
        raise Unsupported("loopback-ipv4", f"{where}; ip link set lo up") from error
    try:
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise ConfigError(
            f"port {port} cannot be had: {str(error).splitlines()[0]}; choose another --port, or 0 for any"
        ) from error
    return store, Address(host="127.0.0.1", port=store.port)


def join_address(store: Address, rails: Sequence[Rail]) -> Address | None:
    """The address at which ranks of other machines reach the store of this process; None if only this machine can.

    The store listens on every address of this machine. The first address of the transport that answers is taken,
    because newcomers must reach the transport, too.
    """
    for rail in rails:
        address = Address(host=rail.address, port=store.port)
        if not ipaddress.ip_address(rail.address).is_loopback and address.answers():
            return address
    return None


def run_ranks(function: RankFunction, argument: Any, world_size: int, *, timeout_s: float) -> list[Any]:
    """Calls `function(argument, rank, world_size, store)` in `world_size` new processes, as `Ranks.run` does.

    This process serves the store, whose operations end after `timeout_s`. Returns the results by rank. Raises
    `RankFailure`.
    """
    _store, address = serve_store(0, timeout_s=timeout_s)
    with Ranks(world_size) as ranks:
        return ranks.run(function, argument, address=address, store_timeout_s=timeout_s)


class Ranks:
    """Processes of this machine that wait for the function to call. They end with `run`, or with the `with` block.

    They are forks of one process that has imported what ranks import: of this one if `forked`, else of a server. A
    process with other threads must not be forked, because a fork could wait for their locks for ever: its ranks come
    from the server in any case. A server that this process has already is taken as it is. Ranks end with this process,
    even if it is killed.
    """

    def __init__(self, count: int, *, forked: bool = False) -> None:
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        self._has_begun = False
        # Nothing is ever sent. Only this process keeps the end that would send, so its close is this process's end.
        alive, self._life = multiprocessing.Pipe(duplex=False)
        before = dict(os.environ)
        os.environ.update(SINGLE)
        try:
            context = _context(forked)
            for rank in range(count):
                ours, theirs = multiprocessing.Pipe()
                process = context.Process(target=_rank_main, args=(rank, count, theirs, alive, self._life))
                process.start()
                theirs.close()
                self._ends.append(ours)
                self._processes.append(process)
        except BaseException:
            self._end()
            raise
        finally:
            alive.close()
            for name in SINGLE:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(
        self,
        function: RankFunction,
        argument: Any,
        *,
        address: Address,
        store_timeout_s: float,
        on_loss: Callable[[int, str], None] | None = None,
    ) -> list[Any]:
        """Calls `function(argument, rank, world_size, store)` on every rank, once. Returns the results by rank.

        Every rank gets the environment of this call, with one thread for OpenMP, and connects to the store at
        `address`.

        Raises `RankFailure` with the first cause. With `on_loss`, that function is called for each rank that fails,
        as soon as others go on without it, and the call returns the results of the others. It raises only if no rank
        reaches the end. If a rank cannot write its output, nobody can, and the call raises that rank's error. A
        KeyboardInterrupt is one of all ranks.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._has_begun = True
        for end in self._ends:
            # `_collect` tells which ranks have ended.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                end.send(_Job(environment, function, argument, address, store_timeout_s))
        try:
            outcomes = _collect(self._ends, self._processes, on_loss)
        except KeyboardInterrupt:
            # A terminal interrupts them, too, and the first one counts. `kill -INT` does not.
            for process in self._processes:
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGINT)
            raise
        finally:
            self._end()
        for item in outcomes:
            if item.unwritten is not None:
                raise item.unwritten
        failed = sorted((item for item in outcomes if item.error is not None), key=lambda item: item.consequence)
        if failed and (on_loss is None or len(failed) == len(outcomes)):
            raise RankFailure(f"rank {failed[0].rank}: {failed[0].error}")
        return [item.result for item in sorted(outcomes, key=lambda item: item.rank) if item.error is None]

    def _end(self) -> None:
        """Ends the ranks: at once those that still wait for their function."""
        deadline = time.monotonic() + (GRACE_S if self._has_begun else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        for end in (*self._ends, self._life):
            end.close()
        if self._has_begun and any((process.exitcode or 0) < 0 for process in self._processes):
            _leave_line()


def _leave_line() -> None:
    """Ends the line of a progress bar whose rank was killed, and shows the cursor that it had hidden."""
    console = stdout_console()
    if console.is_terminal:
        console.show_cursor(True)
        console.print()


def _context(forked: bool) -> ForkContext | ForkServerContext:
    if forked and _is_alone():
        for name in PRELOAD:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        # An import may have started threads.
        if _is_alone():
            return multiprocessing.get_context("fork")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def _is_alone() -> bool:
    """Whether this process has one thread."""
    return len(os.listdir("/proc/self/task")) == 1


def _rank_main(rank: int, world_size: int, end: Connection, alive: Connection, life: Connection) -> None:
    life.close()
    # What was imported stays: the collector need not look at its million objects.
    gc.freeze()
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    # A fork's own processes would be forks, too, but it has threads soon.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        try:
            job = end.recv()
        except EOFError:
            os._exit(1)  # the process that made it is gone
        # The process that forked this one may be older than the call.
        os.environ.clear()
        os.environ.update(job.environment)
        watch_output()
        signal.signal(signal.SIGINT, _interrupt_once)
        timeout = timedelta(seconds=job.store_timeout_s)
        store = TCPStore(job.address.host, job.address.port, is_master=False, timeout=timeout)
        outcome = _Outcome(rank=rank, result=job.function(job.argument, rank, world_size, store))
    except KeyboardInterrupt:
        outcome = _Outcome(rank=rank, error="interrupted", consequence=True)
    except OutputLost as error:
        outcome = _Outcome(rank=rank, error=str(error), unwritten=error)
    except SennitError as error:
        consequence = isinstance(error, (PeerError, AbortedError, TimeoutError))
        outcome = _Outcome(rank=rank, error=str(error), consequence=consequence)
    except Exception as error:
        # Other backends report a lost peer as a plain RuntimeError.
        consequence = isinstance(error, RuntimeError)
        outcome = _Outcome(rank=rank, error=traceback.format_exc().rstrip(), consequence=consequence)
    end.send(outcome)
    end.close()


def _interrupt_once(number: int, frame: object) -> NoReturn:
    """A second interrupt would only disturb the rank while it leaves."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with(alive: Connection) -> None:
    """Ends this rank as soon as the process that made it is gone, and the store with it."""
    alive.poll(None)
    # At once, unless somebody here has more to do at a SIGTERM, as a timeline has.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def _collect(
    ends: list[Connection], processes: list[BaseProcess], on_loss: Callable[[int, str], None] | None
) -> list[_Outcome]:
    """Waits for all outcomes.

    After a failure it waits only `GRACE_S` longer, unless the others go on without that rank. Then `on_loss` hears of
    it, unless all fail at about the same time.
    """
    outcomes: list[_Outcome] = []
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    untold: list[_Outcome] = []
    ends_at: float | None = None
    tells_at = 0.0
    while waiting:
        limit = ends_at if ends_at is not None else tells_at if untold else None
        ready = multiprocessing.connection.wait(
            list(waiting), None if limit is None else max(0.0, limit - time.monotonic())
        )
        if not ready and ends_at is not None:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                outcome = end.recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join(GRACE_S)
                outcome = _Outcome(rank=rank, error=f"process ended with {_exit_text(processes[rank].exitcode)}")
            outcomes.append(outcome)
            if outcome.error is None:
                continue
            if on_loss is not None and outcome.unwritten is None:
                untold.append(outcome)
                tells_at = time.monotonic() + ALONE_S
            elif ends_at is None:
                ends_at = time.monotonic() + GRACE_S
        others_go_on = any(item.error is None for item in outcomes) or (not ready and bool(waiting))
        if on_loss is not None and others_go_on:
            for item in untold:
                on_loss(item.rank, str(item.error))
            untold.clear()
    return outcomes


def _exit_text(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"status {code}"
