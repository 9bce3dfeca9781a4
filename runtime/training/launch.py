# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine, and returns their results, or the reason why they failed.

torchrun does the same over several machines. This is for `sennit train --ranks N`: one process starts a run, and one
message explains its failure.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import multiprocessing.connection
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from sennit.runtime.backend.torch_versions import Store, TCPStore
from sennit.runtime.ingest.address import Address
from sennit.transport.errors import AbortedError, ConfigError, PeerError, SennitError, TimeoutError, Unsupported
from sennit.transport.rails import Rail

# The time after a failure in which other ranks may report theirs, and the time for any rank to exit.
GRACE_S = 5.0
# What a rank imports takes a second or more of processor time: one process does it, and the ranks are its forks.
PRELOAD = ["torch._dynamo", "sennit.runtime.training.run"]

RankFunction = Callable[[Any, int, int, Store], Any]


class RankFailure(SennitError):
    """A rank failed. The message is that rank's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    rank: int
    result: Any = None
    error: str | None = None
    consequence: bool = False
    """The rank only reports that another rank is gone."""


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


def run_ranks(
    function: RankFunction,
    argument: Any,
    world_size: int,
    *,
    address: Address,
    store_timeout_s: float,
    on_loss: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Calls `function(argument, rank, world_size, store)` in `world_size` new processes. Returns the results by rank.

    A server process, without threads, has imported what ranks import, and forks them. It ends with this process,
    and so do the ranks, even if this process is killed. A server that this process has already is taken as it is. Every
    rank gets the environment of this call, with one thread for OpenMP, and connects to the store at `address`.

    Raises `RankFailure` with the first cause. With `on_loss`, that function is called for each rank that fails, and the
    call returns the results of the others. It raises only if no rank reaches the end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ends: list[Connection] = []
    processes: list[BaseProcess] = []
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    environment = dict(os.environ)
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(environment, function, argument, rank, world_size, address, store_timeout_s, theirs),
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        outcomes = _collect(ends, processes, are_independent=on_loss is not None)
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        _end(processes)
        for end in ends:
            end.close()
    failed = sorted((item for item in outcomes if item.error is not None), key=lambda item: item.consequence)
    if on_loss is not None and len(failed) < len(outcomes):
        for item in failed:
            on_loss(item.rank, str(item.error))
    elif failed:
        raise RankFailure(f"rank {failed[0].rank}: {failed[0].error}")
    return [item.result for item in sorted(outcomes, key=lambda item: item.rank) if item.error is None]


def _rank_main(
    environment: dict[str, str],
    function: RankFunction,
    argument: Any,
    rank: int,
    world_size: int,
    address: Address,
    timeout_s: float,
    end: Connection,
) -> None:
    # The server that forked this process may be older than the call.
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        store = TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        outcome = _Outcome(rank=rank, result=function(argument, rank, world_size, store))
    except KeyboardInterrupt:
        outcome = _Outcome(rank=rank, error="interrupted", consequence=True)
    except SennitError as error:
        consequence = isinstance(error, (PeerError, AbortedError, TimeoutError))
        outcome = _Outcome(rank=rank, error=str(error), consequence=consequence)
    except Exception as error:
        # Other backends report a lost peer as a plain RuntimeError.
        consequence = isinstance(error, RuntimeError)
        outcome = _Outcome(rank=rank, error=traceback.format_exc().rstrip(), consequence=consequence)
    end.send(outcome)
    end.close()


def _end_with_parent() -> None:
    """Ends this rank as soon as the process that called `run_ranks` is gone, and the store with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _collect(ends: list[Connection], processes: list[BaseProcess], *, are_independent: bool) -> list[_Outcome]:
    """Waits for all outcomes.

    After a failure it waits only `GRACE_S` longer, unless the others go on without that rank.
    """
    outcomes: list[_Outcome] = []
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    deadline: float | None = None
    while waiting:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), remaining)
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                outcome = end.recv()
            except EOFError:
                processes[rank].join(GRACE_S)
                outcome = _Outcome(rank=rank, error=f"process ended with {_exit_text(processes[rank].exitcode)}")
            outcomes.append(outcome)
            if outcome.error is not None and deadline is None and not are_independent:
                deadline = time.monotonic() + GRACE_S
    return outcomes


def _exit_text(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"status {code}"


def _end(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
