# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: ranks that share nothing but a key-value store agree how each pair of them will talk.

    round "hello"   version, world, host identity, a nonce
    "run"           rank 0 lists the nonces it read; the keys of all that follows hold the run's number
    round "offer"   this rank's shared-memory segment, or why there is none
    round "opened"  whose offers this rank could open: two ranks use shared memory when both opened the other's
    round "udp"     addresses, keys, paths, of sockets or of RDMA devices, and what peers must have in common with the
                    latter; only where some pair has no shared memory
    record "trial" what a rank found when it tried the paths; read only by ranks whose own trial does not end
                   (`network_trial.py`)

A store may outlive a run and hold its records: torchrun restarts ranks over the same one. So a record counts only in
the run whose list has its writer's nonce (`_Exchanges.settle`).

Records are JSON. A rank that cannot go on says so in its next record, so that nobody waits for it in vain.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from sennit.transport.config import Config, TransportKind
from sennit.transport.errors import ConfigError, MismatchError, PeerError, SennitError, TimeoutError, Unsupported
from sennit.transport.host import host_identity, machine_identity
from sennit.transport.network_trial import TriedEndpoint, try_network
from sennit.transport.rails import Rail
from sennit.transport.rdma_rails import RdmaRail, check_pair
from sennit.transport.store import CheckedStore, Store
from sennit.transport.version import Versions

# Stores count in milliseconds or use another clock. A store that gives up this little early has timed out, not failed.
STORE_CLOCK_SLACK_S: Final = 0.05
# The first pause between two looks at the store. The pause then grows up to WATCH_POLL_S.
POLL_FIRST_S: Final = 0.0005
# How often old records are read again, and for how long a record that fits no run may belong to an earlier run.
REREAD_S: Final = 0.1
OLD_RECORD_S: Final = 10.0
WATCH_POLL_S: Final = 0.01

Record: TypeAlias = dict[str, Any]
Route: TypeAlias = tuple[str, bytes]


class Endpoint(TriedEndpoint, Protocol):
    """The native communicator's part in rendezvous (`_core.Communicator`)."""

    def shm_offer(self) -> bytes: ...

    def shm_accept(self, rank: int, offer: bytes, /) -> bool: ...

    def udp_open(
        self,
        rails: list[tuple[str, int]],
        /,
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        ports: tuple[int, int],
    ) -> bytes: ...

    def verbs_open(
        self,
        addresses: list[str],
        /,
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        service: str,
    ) -> bytes: ...

    def connect(self, routes: Sequence[Route], /) -> None: ...


AnyEndpoint = TypeVar("AnyEndpoint", bound=Endpoint)


@dataclass(frozen=True, kw_only=True)
class Connection(Generic[AnyEndpoint]):
    """A connected endpoint, and how it reaches each rank: "self", "shm", "udp" or "verbs"."""

    endpoint: AnyEndpoint
    routes: tuple[str, ...]
    ranks_here: int
    """Ranks of the group that share this machine's cores, this one included."""
    notes: tuple[str, ...] = ()
    """Notes for `describe()` on how the ranks reach each other."""


class _Exchanges:
    """Exchanges one record of every rank at a time. One deadline holds for all exchanges."""

    def __init__(
        self, store: Store, *, name: str, rank: int, world: int, timeout_s: float, watch: Callable[[], None] | None
    ) -> None:
        self._store = CheckedStore(store, purpose=f"rendezvous of {name}")
        self._name = name
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._watch = watch
        self._versions = Versions.ours()
        self._nonce = secrets.token_hex(8)
        self._run = ""
        self._reread_s = 0.0
        self._deadline_s = time.monotonic() + timeout_s

    def exchange(self, round_name: str, make: Callable[[], Record]) -> list[Record]:
        """Publishes the record that `make` returns, and waits for everybody's. If `make` raises, the others get the
        reason.

        Every record must have the fields of `make`'s record, with the same types.
        """
        key = self._key(round_name, self._rank)
        try:
            record = make()
        except Exception as error:
            self._publish(key, {"failed": f"{type(error).__name__}: {error}"})
            raise
        self._publish(key, record)
        return [self._collect(round_name, peer, record) for peer in range(self._world)]

    def meet(self, make: Callable[[], Record]) -> list[Record]:
        """Runs the first round. Refuses a record of another world, unless an earlier run left it."""
        hello = self.exchange("hello", make)
        wait_until_s = min(time.monotonic() + OLD_RECORD_S, self._deadline_s)
        while strange := [peer for peer, record in enumerate(hello) if record["world"] != self._world]:
            if time.monotonic() >= wait_until_s:
                raise MismatchError(
                    f"rank {strange[0]} is in a world of {hello[strange[0]]['world']} ranks, rank {self._rank} in one "
                    f"of {self._world}"
                )
            if self._watch is not None:
                self._watch()
            time.sleep(REREAD_S)
            hello = [self._collect("hello", peer, record) for peer, record in enumerate(hello)]
        return hello

    def settle(self, hello: list[Record]) -> list[Record]:
        """Makes sure that all ranks are in one run.

        Returns `hello` without the records that an earlier run left in the store.
        """
        while True:
            if self._rank == 0:
                self._run = secrets.token_hex(8)
                nonces = [record["nonce"] for record in hello]
                self._publish(self._run_key(), {"run": self._run, "nonces": nonces})
            else:
                self._poll("run", self._is_listed)
            self._publish(self._key("here", self._rank), {})
            everybody = [self._key("here", peer) for peer in range(self._world)]
            # A rank that is not here yet may have left an old record. So rank 0 reads again, and lists again.
            self._poll("here", partial(self._are_here_or_gone_on, everybody, hello))
            if self._store.check(everybody):
                return [self._collect_of_run(peer, hello[peer]) for peer in range(self._world)]
            hello = [self._collect("hello", peer, record) for peer, record in enumerate(hello)]

    def own_nonce(self) -> str:
        """Returns the number that tells this process from an earlier one of the same rank."""
        return self._nonce

    @property
    def deadline_s(self) -> float:
        """The deadline on the clock `time.monotonic`."""
        return self._deadline_s

    def leave(self, record: Record, /) -> None:
        """Publishes this rank's record of the network trial. A later record replaces it."""
        self._publish(self._key("trial", self._rank), record)

    def look(self, peer: int, /) -> Record | None:
        """Returns the peer's record of the network trial, if it has left one."""
        key = self._key("trial", peer)
        if not self._store.check([key]):
            return None
        return self._decode(self._store.get(key), peer, {"messages": {}, "errors": {}})

    def _is_listed(self) -> bool:
        """Checks whether the newest run lists this process. If so, this process takes part in that run."""
        listed = self._read_run()
        if listed is None or listed["nonces"][self._rank : self._rank + 1] != [self._nonce]:
            return False
        self._run = str(listed["run"])
        return True

    def _are_here_or_gone_on(self, keys: list[str], hello: Sequence[Record]) -> bool:
        if self._store.check(keys):
            return True
        if time.monotonic() < self._reread_s:
            return False
        self._reread_s = time.monotonic() + REREAD_S
        return self._has_moved_on(hello)

    def _has_moved_on(self, hello: Sequence[Record]) -> bool:
        if self._rank != 0:
            listed = self._read_run()
            return listed is not None and listed["run"] != self._run
        return any(
            self._collect("hello", peer, record)["nonce"] != record["nonce"] for peer, record in enumerate(hello)
        )

    def _read_run(self) -> Record | None:
        if not self._store.check([self._run_key()]):
            return None
        return self._decode(self._store.get(self._run_key()), 0, {"run": "", "nonces": []})

    def _collect_of_run(self, peer: int, hello: Record) -> Record:
        listed = self._read_run()
        if listed is None or listed["run"] != self._run:
            raise PeerError(f"rendezvous of {self._name}: rank 0 was started again", rank=0)
        if hello["nonce"] == listed["nonces"][peer]:
            return hello
        return self._collect("hello", peer, hello)

    def _poll(self, what: str, is_done: Callable[[], bool]) -> None:
        pause_s = POLL_FIRST_S
        while not is_done():
            if self._watch is not None:
                self._watch()
            if time.monotonic() >= self._deadline_s:
                who = "rank 0" if what == "run" else self._missing(what, 0)
                raise TimeoutError(
                    f"rendezvous of {self._name}, {what}: no word from {who} of {self._world} after "
                    f"{self._timeout_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, WATCH_POLL_S)

    def _publish(self, key: str, record: Record) -> None:
        self._store.set(key, json.dumps({**self._versions.as_record(), **record}))

    def _collect(self, round_name: str, peer: int, like: Record) -> Record:
        key = self._key(round_name, peer)
        left_s = max(self._deadline_s - time.monotonic(), 0.001)
        try:
            if self._watch is not None:
                self._wait_watching(key, self._watch)
                left_s = STORE_CLOCK_SLACK_S
            self._store.wait([key], timedelta(seconds=left_s))
            data = self._store.get(key)
        except SennitError:
            raise
        except Exception as error:
            if time.monotonic() < self._deadline_s - STORE_CLOCK_SLACK_S:
                raise PeerError(f"rendezvous of {self._name}: the store failed: {error}") from error
            raise TimeoutError(
                f"rendezvous of {self._name}, round {round_name}: no word from {self._missing(round_name, peer)} "
                f"of {self._world} after {self._timeout_s:g} s"
            ) from error
        return self._decode(data, peer, like)

    def _wait_watching(self, key: str, watch: Callable[[], None]) -> None:
        while not self._store.check([key]) and time.monotonic() < self._deadline_s:
            watch()
            time.sleep(WATCH_POLL_S)

    def _decode(self, data: bytes, peer: int, like: Record) -> Record:
        try:
            record = json.loads(data)
            mismatch = self._versions.mismatch(record)
        except (ValueError, TypeError, KeyError) as error:
            raise MismatchError(f"rank {peer} published a record that sennit did not write: {data[:80]!r}") from error
        if mismatch is not None:
            raise MismatchError(f"rank {peer} {mismatch}")
        if "failed" in record:
            raise PeerError(f"rank {peer} could not join {self._name}: {record['failed']}", rank=peer)
        fields: Record = record
        strange = [name for name, value in like.items() if type(fields.get(name)) is not type(value)]
        if strange:
            raise MismatchError(
                f"rank {peer} published a record that sennit did not write: no valid {', '.join(strange)}"
            )
        return fields

    def _missing(self, round_name: str, first: int) -> str:
        missing = [peer for peer in range(first, self._world) if not self._is_there(self._key(round_name, peer))]
        ranks = ", ".join(map(str, missing or [first]))
        return f"rank {ranks}" if len(missing) < 2 else f"ranks {ranks}"

    def _is_there(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except SennitError:
            # The store is gone as well, so no rank is there.
            return False

    def _run_key(self) -> str:
        return f"sennit/{self._name}/run"

    def _key(self, round_name: str, rank: int) -> str:
        run = "" if round_name == "hello" else f"{self._run}/"
        return f"sennit/{self._name}/{run}{round_name}/{rank}"


def connect(
    make_endpoint: Callable[[int], AnyEndpoint],
    *,
    config: Config,
    store: Store | None,
    rank: int,
    world: int,
    rails: Callable[[], Sequence[Rail]],
    name: str = "world",
    timeout_s: float | None = None,
    watch: Callable[[], None] | None = None,
) -> Connection[AnyEndpoint]:
    """Makes an endpoint, agrees on its route to every rank, and connects it.

    `make_endpoint` gets the number of ranks that share this machine's cores, this one included. `rails` is called for
    local addresses only if some pair needs udp. `name` keeps groups that share a store apart. `watch` is called while
    this rank waits, and may raise an error to end the wait.
    """
    if world == 1:
        alone = make_endpoint(1)
        alone.connect([("self", b"")])
        return Connection(endpoint=alone, routes=("self",), ranks_here=1)
    if store is None:
        raise ConfigError(f"world of {world} ranks without a store; allowed: world 1, or a store that all ranks share")
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    exchanges = _Exchanges(store, name=name, rank=rank, world=world, timeout_s=limit_s, watch=watch)
    hello = exchanges.settle(exchanges.meet(lambda: _hello(config, world, exchanges.own_nonce())))
    endpoint: AnyEndpoint | None = None

    ranks_here = sum(record["machine"] == hello[rank]["machine"] for record in hello)

    def offer() -> Record:
        nonlocal endpoint
        endpoint = make_endpoint(ranks_here)
        return _offer(endpoint, config)

    offers = exchanges.exchange("offer", offer)
    assert endpoint is not None
    opened = exchanges.exchange("opened", lambda: _opened(endpoint, hello, offers, rank))
    by_shm = [[j in opened[i]["ranks"] and i in opened[j]["ranks"] for j in range(world)] for i in range(world)]
    needs_udp = [any(not by_shm[i][j] for j in range(world) if j != i) for i in range(world)]
    blobs: list[bytes] = [b""] * world
    chosen: list[Rail] = []
    if any(needs_udp):

        def open_udp() -> Record:
            _refuse_strangers(config, hello, offers, by_shm[rank], rank)
            if not needs_udp[rank]:
                return {"blob": "", "devices": []}
            chosen[:] = rails()
            blob = _open_network(endpoint, config, [rail.address for rail in chosen])
            return {"blob": _text(blob), "devices": [rail.as_record() for rail in chosen if isinstance(rail, RdmaRail)]}

        opened_networks = exchanges.exchange("udp", open_udp)
        for peer, record in enumerate(opened_networks):
            if not by_shm[rank][peer]:
                check_pair(opened_networks[rank]["devices"], record["devices"], peer)
        blobs = [base64.b64decode(record["blob"]) for record in opened_networks]
    network = "verbs" if config.transport is TransportKind.VERBS else "udp"
    routes: list[Route] = [("shm", b"") if by_shm[rank][peer] else (network, blobs[peer]) for peer in range(world)]
    routes[rank] = ("self", b"")
    notes = _slower_neighbours(config, hello, offers, by_shm[rank], rank)
    for text in notes:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if any(kind == "udp" for kind, _ in routes):
        for verdict in try_network(
            endpoint, routes, exchanges, rank=rank, deadline_s=exchanges.deadline_s, watch=watch
        ):
            for text in verdict.warnings:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            notes += [*verdict.warnings, *verdict.notes]
        notes += _unpaired_rails(endpoint, routes, chosen, rank)
    endpoint.connect(routes)
    return Connection(
        endpoint=endpoint, routes=tuple(kind for kind, _ in routes), ranks_here=ranks_here, notes=tuple(notes)
    )


def _open_network(endpoint: Endpoint, config: Config, addresses: list[str]) -> bytes:
    if config.transport is TransportKind.VERBS:
        return endpoint.verbs_open(
            addresses,
            path_count=config.paths,
            path_policy=config.path_policy,
            congestion=config.congestion,
            window_bytes=config.window_bytes,
            service=config.verbs_service,
        )
    return endpoint.udp_open(
        [(address, 0) for address in addresses],
        path_count=config.paths,
        path_policy=config.path_policy,
        congestion=config.congestion,
        window_bytes=config.window_bytes,
        ports=config.ports or (0, 0),
    )


def _hello(config: Config, world: int, nonce: str) -> Record:
    return {"nonce": nonce, "world": world, "host": host_identity(config.host_id), "machine": machine_identity()}


def _offer(endpoint: Endpoint, config: Config) -> Record:
    if config.transport in (TransportKind.UDP, TransportKind.VERBS):
        return {"shm": "", "why_not": f"its SENNIT_TRANSPORT is {config.transport}", "is_meant": True}
    try:
        return {"shm": _text(endpoint.shm_offer()), "why_not": "", "is_meant": True}
    except OSError as error:
        if config.transport is TransportKind.SHM:
            raise
        return {"shm": "", "why_not": f"it has no shared memory: {error}", "is_meant": False}


def _opened(endpoint: Endpoint, hello: Sequence[Record], offers: Sequence[Record], rank: int) -> Record:
    """Returns the peers whose segments this rank could open. None if this rank has no segment."""
    opened: list[int] = []
    for peer, record in enumerate(offers):
        near = peer != rank and hello[peer]["host"] == hello[rank]["host"]
        both = bool(record["shm"] and offers[rank]["shm"])
        if near and both and endpoint.shm_accept(peer, base64.b64decode(record["shm"])):
            opened.append(peer)
    return {"ranks": opened}


def _refuse_strangers(
    config: Config, hello: Sequence[Record], offers: Sequence[Record], by_shm: Sequence[bool], rank: int
) -> None:
    """Raises Unsupported, with the reason, if SENNIT_TRANSPORT=shm and shared memory does not reach a peer."""
    if config.transport is not TransportKind.SHM:
        return
    for peer, record in enumerate(hello):
        if peer == rank or by_shm[peer]:
            continue
        if offers[peer]["why_not"]:
            reason = offers[peer]["why_not"]
        elif record["host"] != hello[rank]["host"]:
            reason = f"it is on another host ({record['host']}; here {hello[rank]['host']})"
        else:
            reason = "one of both could not open the other's segment (containers with a /dev/shm of their own?)"
        raise Unsupported("shared memory", f"SENNIT_TRANSPORT=shm, but rank {peer} is out of reach: {reason}")


def _slower_neighbours(
    config: Config, hello: Sequence[Record], offers: Sequence[Record], by_shm: Sequence[bool], rank: int
) -> list[str]:
    """Explains why `auto` reaches ranks on this host by udp although nobody asked for it, and what to do."""
    if config.transport is not TransportKind.AUTO:
        return []
    peers_of: dict[str, list[int]] = {}
    for peer, record in enumerate(hello):
        if peer == rank or by_shm[peer] or record["host"] != hello[rank]["host"]:
            continue
        refusing = [(who, offers[who]) for who in (rank, peer) if offers[who]["why_not"]]
        if any(offer["is_meant"] for _, offer in refusing):
            continue
        why = "; ".join(f"rank {who}: {offer['why_not']}" for who, offer in refusing)
        peers_of.setdefault(
            why or "one rank cannot open the other's segment: containers with a /dev/shm of their own?", []
        ).append(peer)
    return [
        f"SENNIT_TRANSPORT=auto takes udp, not shared memory, between rank {rank} and "
        f"{'rank' if len(peers) == 1 else 'ranks'} {', '.join(map(str, peers))} of the same host: {why}. Give the "
        "containers a larger or a common /dev/shm (docker run --shm-size=1g, --ipc=host), or set SENNIT_TRANSPORT=udp"
        for why, peers in peers_of.items()
    ]


def _unpaired_rails(endpoint: Endpoint, routes: Sequence[Route], rails: Sequence[Rail], rank: int) -> list[str]:
    """Names our interfaces for which some peer has no counterpart."""
    peers_of: dict[Rail, list[int]] = {}
    for peer, (kind, _) in enumerate(routes):
        used = {path[0] for path in endpoint.tried_paths(peer)} if kind == "udp" else set()
        for rail in rails:
            if used and rail.address not in used:
                peers_of.setdefault(rail, []).append(peer)
    return [
        f"{rail.interface} ({rail.address}) of rank {rank} stays out of use with "
        f"{'rank' if len(peers) == 1 else 'ranks'} {', '.join(map(str, peers))}: fewer interfaces with an address of "
        "its family there"
        for rail, peers in peers_of.items()
    ]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
