# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one machine, and brings back what they return or the reason why they failed.

torchrun does the same over several machines; this is for `sennit train --ranks N`, where one process should
be enough to start a run and one message enough to understand its failure.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from sennit.transport.errors import AbortedError, ConfigError, PeerError, SennitError, TimeoutError
from sennit.transport.rails import Rail

# When one rank fails, how long the others may take to say why they did, and any rank to leave at the end.
GRACE_S = 5.0
CONNECT_S = 5.0

RankFunction = Callable[[Any, int, int, Store], Any]


class RankFailure(SennitError):
    """A rank failed; the message is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    rank: int
    result: Any = None
    error: str | None = None
    consequence: bool = False
    """The rank only reports that another one is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Of a run's store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
            raise ConfigError(f"address {text!r}; allowed: HOST:PORT, port 1 to 65535")
        return cls(host=host.strip("[]"), port=int(port))

    def answers(self) -> bool:
        """Whether something listens there."""
        try:
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except OSError:
            return False
        return True

    def check(self) -> None:
        """The store's own client would try for as long as a collective may take."""
        try:
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except OSError as error:
            raise ConfigError(f"no run at {self}: {error.strerror or error}") from error


def serve_store(port: int, *, timeout_s: float) -> tuple[Store, Address]:
    """A store in this process, which is no rank and so outlives any of them; port 0: a free one.

    It listens on every address of this machine; the one that comes back is for ranks of this machine.
    """
    try:
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise ConfigError(f"port {port} cannot be had: {str(error).splitlines()[0]}") from error
    return store, Address(host="127.0.0.1", port=store.port)


def join_address(store: Address, rails: Sequence[Rail]) -> Address | None:
    """Where ranks of other machines reach a store that is served here; None where nothing but this machine does.

    The store listens on every address of this machine. The first of the transport's that answers is taken, since
    newcomers must reach the transport too.
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
    """Calls `function(argument, rank, world_size, store)` in `world_size` new processes; results by rank.

    They reach the store by its `address`. Raises `RankFailure` with the first cause. With `on_loss` a rank's failure is
    told to it instead, and is one of the run only if no rank comes to the end; the results are then those of the ranks
    that did.
    """
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    processes: list[BaseProcess] = []
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(function, argument, rank, world_size, address, store_timeout_s, theirs)
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
    function: RankFunction,
    argument: Any,
    rank: int,
    world_size: int,
    address: Address,
    timeout_s: float,
    end: Connection,
) -> None:
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


def _collect(ends: list[Connection], processes: list[BaseProcess], *, are_independent: bool) -> list[_Outcome]:
    """Waits for all outcomes; after a failure only `GRACE_S` longer, unless the others go on without that rank."""
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
