# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: ranks that share nothing but a key-value store agree how each pair of them will talk.

    round "hello"   version, world, host identity, cores, a nonce
    "run"           rank 0 lists the records it read; the keys of all that follows hold the run's number
    round "offer"   how to open this rank's shared-memory segment, or why it has none and what helps
    round "opened"  whose offers this rank could not open, and why: two ranks use shared memory when both opened the
                    other's
    round "udp"     addresses and paths, of sockets or of RDMA devices, and what peers must have in common with the
                    latter; only where some pair has no shared memory
    swap "pairs"    with it: keys and queue pairs, which only the peer they are for reads
    record "trial" what a rank found when it tried the paths; read only by ranks whose own trial does not end
                   (`network_trial.py`)

A store may outlive a run and hold its records: torchrun restarts ranks over the same one. So a record counts only in
the run whose list has its writer's nonce (`Exchanges.meet`).

A rank reads O(world) bytes in all, over a tree of ranks (`exchanges.py`). Records are JSON. A rank that cannot go on
says so in its next record, so that nobody waits for it in vain.
"""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from sennit.transport import descriptors
from sennit.transport.config import Config, TransportKind
from sennit.transport.errors import ConfigError, DeviceError, Unsupported
from sennit.transport.light_tuple import LightTuple
from sennit.transport.meeting.exchanges import Exchanges
from sennit.transport.meeting.host import host_identity, machine_identity
from sennit.transport.meeting.rank_records import Record
from sennit.transport.meeting.store import Store

if TYPE_CHECKING:
    from sennit.transport.choice.calibration import Calibration
    from sennit.transport.meeting.endpoint import Endpoint, Route
    from sennit.transport.meeting.rails import Rail
    from sennit.transport.plans.hosts import Hosts

# `Calibration().label()`. A group without a calibration file does not load the cost model.
BUILT_IN_LABEL: Final = "6d2124d9 defaults"

AnyEndpoint = TypeVar("AnyEndpoint", bound="Endpoint")


class Connection(LightTuple, Generic[AnyEndpoint]):
    """A connected endpoint, and how it reaches each rank: "self", "shm", "udp" or "verbs"."""

    endpoint: AnyEndpoint
    routes: tuple[str, ...]
    ranks_here: int
    """Ranks of the group on this machine, this one included."""
    ranks_on_cores: int
    """Those of them that may run on a core of this rank, this one included. A rank that is bound to cores of its own
    shares them with none."""
    neighbours: tuple[frozenset[int], ...]
    """For each rank, the other ranks that it shares memory with."""
    host_names: tuple[str, ...]
    """The name of each rank's host (`host.host_identity`), whatever way its ranks reach each other."""
    measured: Calibration | None
    """The constants of the cost model from a file, the same on all ranks. None: the built-in ones."""
    has_aggregator: bool = False
    notes: tuple[str, ...] = ()
    """Notes for `describe()` on how the ranks reach each other."""

    @property
    def hosts(self) -> Hosts:
        """Which ranks reach each other through shared memory. If the ranks of a host do not follow one another, or not
        all pairs have shared memory, each rank stands alone.
        """
        from sennit.transport.plans.hosts import Hosts

        world = len(self.neighbours)
        together = [frozenset({rank, *near}) for rank, near in enumerate(self.neighbours)]
        return Hosts.of(together) or Hosts.equal(world, world)

    @property
    def calibration(self) -> Calibration:
        """The constants of the cost model."""
        from sennit.transport.choice.calibration import Calibration

        return Calibration() if self.measured is None else self.measured


def _tell(notes: Iterable[str]) -> None:
    """Python says each of them once."""
    for text in notes:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


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
    keeps_greeting: bool = False,
) -> Connection[AnyEndpoint]:
    """Makes an endpoint, agrees on its route to every rank, and connects it.

    `make_endpoint` gets the number of ranks that may run on a core of this one, this one included. `rails` is called
    for local addresses only if some pair needs udp. `name` keeps groups that share a store apart. `watch` is called
    while this rank waits, and may raise an error to end the wait. Records in the store go when all have read them; with
    `keeps_greeting` those of the first round stay, so that a process that comes too late hears that its rank is taken.
    """
    measured: Calibration | None = None
    if world == 1:
        measured = _read_calibration(config)
        _tell(() if measured is None else measured.notes)
        alone = make_endpoint(1)
        alone.connect([("self", b"")])
        return Connection(
            endpoint=alone,
            routes=("self",),
            ranks_here=1,
            ranks_on_cores=1,
            neighbours=(frozenset(),),
            host_names=(host_identity(config.host_id),),
            measured=measured,
        )
    if store is None:
        raise ConfigError(f"world of {world} ranks without a store; allowed: world 1, or a store that all ranks share")
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    exchanges = Exchanges(store, name=name, rank=rank, world=world, timeout_s=limit_s, watch=watch)

    def greet() -> Record:
        nonlocal measured
        # Read here, so that the others learn of a file that is wrong.
        measured = _read_calibration(config)
        return _hello(config, BUILT_IN_LABEL if measured is None else measured.label())

    endpoint: AnyEndpoint | None = None
    on_this_machine: list[Record] = []
    ranks_on_cores = 0

    def offer(hello: Sequence[Record]) -> Record:
        nonlocal endpoint, on_this_machine, ranks_on_cores
        _refuse_other_algorithms(hello)
        own = hello[rank]
        on_this_machine = [record for record in hello if record["machine"] == own["machine"]]
        ranks_on_cores = sum(int(record["cores"], 16) & int(own["cores"], 16) != 0 for record in on_this_machine)
        endpoint = make_endpoint(ranks_on_cores)
        on_this_host = [peer for peer, record in enumerate(hello) if record["host"] == own["host"]]
        return _offer(endpoint, config, on_this_host, world)

    hello, offers = exchanges.meet(greet, offer)
    assert endpoint is not None
    if rank == 0 and measured is not None:
        _tell(measured.notes)
    segments = {
        peer: base64.b64decode(record["segment"])
        for peer, record in enumerate(offers)
        if peer != rank and record["segment"] and offers[rank]["segment"] and hello[peer]["host"] == hello[rank]["host"]
    }
    opened = exchanges.exchange("opened", lambda: _opened(endpoint, config, segments, world))
    neighbours = _neighbours(hello, offers, opened)
    by_shm = [peer in neighbours[rank] for peer in range(world)]
    needs_udp = [len(near) < world - 1 for near in neighbours]
    blobs: list[bytes] = [b""] * world
    chosen: list[Rail] = []
    if any(needs_udp):

        def open_udp() -> Record:
            _refuse_strangers(config, hello, offers, opened, by_shm, rank)
            if not needs_udp[rank]:
                return {"blob": "", "devices": []}
            try:
                # Later they would need a descriptor where the others would not hear that there is none.
                from sennit.transport.meeting import network_trial, numa  # noqa: F401

                chosen[:] = rails()
                blob = _open_network(endpoint, config, chosen)
            except OSError as error:
                given_up = offers[rank]["why_not"] or "; ".join(each["why"] for each in opened[rank]["closed"].values())
                if config.transport is not TransportKind.AUTO or not given_up:
                    raise
                text = f"{error} (shared memory was given up before: {given_up})"
                raise DeviceError.told(text, error.errno) from error
            return {"blob": _text(blob), "devices": _devices(config, chosen)}

        opened_networks = exchanges.exchange("udp", open_udp)

        def pair_up() -> dict[int, bytes]:
            elsewhere = [peer for peer in range(world) if peer != rank and not by_shm[peer]]
            for peer in elsewhere:
                _check_devices(opened_networks[rank]["devices"], opened_networks[peer]["devices"], peer)
                blobs[peer] = base64.b64decode(opened_networks[peer]["blob"])
            return {peer: endpoint.offer_for(peer) for peer in elsewhere}

        for peer, for_us in enumerate(exchanges.swap("pairs", pair_up)):
            blobs[peer] += for_us
    network = "verbs" if config.transport is TransportKind.VERBS else "udp"
    routes: list[Route] = [("shm", b"") if by_shm[peer] else (network, blobs[peer]) for peer in range(world)]
    routes[rank] = ("self", b"")
    to_tell = _slower_neighbours(config, hello, offers, opened, by_shm, rank)
    notes = list(to_tell)
    if needs_udp[rank]:
        from sennit.transport.meeting.network_trial import try_network

        for verdict in try_network(
            endpoint, routes, exchanges, rank=rank, deadline_s=exchanges.deadline_s, watch=watch
        ):
            to_tell += verdict.warnings
            notes += [*verdict.warnings, *verdict.notes]
        notes += _unpaired_rails(endpoint, routes, chosen, rank)
        notes += _without_ipv6(chosen, rank)
    if chosen:
        from sennit.transport.meeting.numa import describe_distance

        if far := describe_distance(f"rank {rank}", [rail.interface for rail in chosen]):
            notes.append(far)
    has_aggregator = any(record["aggregation_key"] for record in hello)
    if has_aggregator:
        from sennit.transport.meeting import aggregation

        why_not = aggregation.join(endpoint, exchanges, config, hello)
        has_aggregator = not why_not
        to_tell += why_not
        notes += why_not
    try:
        _tell(to_tell)  # raises where warnings are errors
        endpoint.connect(routes)
    except Exception as error:
        told = descriptors.explained(error, world=world)
        # The others may be connected already.
        endpoint.abort(f"rank {rank} could not join {name}: {type(told).__name__}: {told}")
        raise told from error
    exchanges.finish(keeps_greeting=keeps_greeting)
    return Connection(
        endpoint=endpoint,
        routes=tuple(kind for kind, _ in routes),
        ranks_here=len(on_this_machine),
        ranks_on_cores=ranks_on_cores,
        neighbours=tuple(map(frozenset, neighbours)),
        host_names=tuple(record["host"] for record in hello),
        measured=measured,
        has_aggregator=has_aggregator,
        notes=tuple(notes),
    )


def _read_calibration(config: Config) -> Calibration | None:
    if config.calibration is None:
        return None
    from sennit.transport.choice.calibration import read_calibration

    return read_calibration(config.calibration)


def _open_network(endpoint: Endpoint, config: Config, rails: Sequence[Rail]) -> bytes:
    if config.transport is TransportKind.VERBS:
        return endpoint.verbs_open(
            [rail.address for rail in rails],
            path_count=config.paths,
            path_policy=config.path_policy,
            congestion=config.congestion,
            window_bytes=config.window_bytes,
            service=config.verbs_service,
        )
    return endpoint.udp_open(
        [(rail.address, rail.other_family_address) for rail in rails],
        path_count=config.paths,
        path_policy=config.path_policy,
        congestion=config.congestion,
        window_bytes=config.window_bytes,
        ports=config.ports or (0, 0),
    )


def _devices(config: Config, rails: Sequence[Rail]) -> list[Record]:
    if config.transport is not TransportKind.VERBS:
        return []
    from sennit.transport.meeting.rdma_rails import RdmaRail

    return [rail.as_record() for rail in rails if isinstance(rail, RdmaRail)]


def _check_devices(ours: Sequence[Record], theirs: Sequence[Record], peer: int) -> None:
    if ours:
        from sennit.transport.meeting.rdma_rails import check_pair

        check_pair(ours, theirs, peer)


def _hello(config: Config, calibration: str) -> Record:
    return {
        "host": host_identity(config.host_id),
        "machine": machine_identity(),
        # A bit for each core that this process may run on.
        "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
        "algorithm": str(config.algorithm or "auto"),
        "calibration": calibration,
        # Rank 0 gives the key.
        "aggregation_key": os.urandom(8).hex() if config.aggregator else "",
    }


def _offer(endpoint: Endpoint, config: Config, on_this_host: list[int], world: int) -> Record:
    if config.transport in (TransportKind.UDP, TransportKind.VERBS):
        return {"segment": "", "why_not": f"its SENNIT_TRANSPORT is {config.transport}", "help": "", "is_meant": True}
    try:
        segment = endpoint.shm_offer(on_this_host)
    except OSError as error:
        if config.transport is TransportKind.SHM:
            raise
        why_not = f"it has no shared memory: {error}"
        return {"segment": "", "why_not": why_not, "help": _help(error, world), "is_meant": False}
    return {"segment": _text(segment), "why_not": "", "help": "", "is_meant": True}


def _opened(endpoint: Endpoint, config: Config, segments: Mapping[int, bytes], world: int) -> Record:
    """Returns the ranks of this host whose segments this rank could not open, and why. A rank without a segment tries
    none.
    """
    closed: dict[str, dict[str, str]] = {}
    for peer, segment in segments.items():
        try:
            if why := endpoint.shm_accept(peer, segment):
                closed[str(peer)] = {"why": why, "help": ""}
        except OSError as error:
            if config.transport is TransportKind.SHM:
                raise
            closed[str(peer)] = {"why": str(error), "help": f". {_help(error, world)}"}
    return {"closed": closed}


def _help(error: OSError, world: int) -> str:
    return descriptors.advice(error, world=world) or "Give containers a larger /dev/shm (docker run --shm-size=1g)"


def _why_closed(opened: Sequence[Record], rank: int, peer: int) -> str:
    """Why two ranks of a host share no memory though both have some."""
    return "; ".join(
        f"rank {who} cannot open the shared memory of rank {whom}: {reason['why']}{reason['help']}"
        for who, whom in ((rank, peer), (peer, rank))
        if (reason := opened[who]["closed"].get(str(whom)))
    )


def _neighbours(hello: Sequence[Record], offers: Sequence[Record], opened: Sequence[Record]) -> list[set[int]]:
    """Returns, for each rank, the other ranks that it shares memory with."""
    at_host: dict[str, set[int]] = {}
    for rank, (record, offer) in enumerate(zip(hello, offers, strict=True)):
        if offer["segment"]:
            at_host.setdefault(record["host"], set()).add(rank)
    near = [
        at_host[record["host"]] - {rank} if offer["segment"] else set()
        for rank, (record, offer) in enumerate(zip(hello, offers, strict=True))
    ]
    for rank, record in enumerate(opened):
        for peer in map(int, record["closed"]):
            near[rank].discard(peer)
            near[peer].discard(rank)
    return near


def _refuse_other_algorithms(hello: Sequence[Record]) -> None:
    """Raises ConfigError, on every rank, if one would run other plans than rank 0."""
    for peer, record in enumerate(hello):
        if record["algorithm"] != hello[0]["algorithm"]:
            raise ConfigError(
                f"rank 0 has SENNIT_ALGORITHM={hello[0]['algorithm']}, rank {peer} has {record['algorithm']}; "
                "allowed: the same on all ranks"
            )
        ours, theirs = hello[0]["calibration"], record["calibration"]
        # The files may have other names.
        if ours.partition(" ")[0] != theirs.partition(" ")[0]:
            raise ConfigError(
                f"rank 0 has SENNIT_CALIBRATION {ours}, rank {peer} has {theirs} (digest and file); "
                "allowed: the same constants on all ranks"
            )


def _refuse_strangers(
    config: Config,
    hello: Sequence[Record],
    offers: Sequence[Record],
    opened: Sequence[Record],
    by_shm: Sequence[bool],
    rank: int,
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
            reason = _why_closed(opened, rank, peer)
        raise Unsupported("shared memory", f"SENNIT_TRANSPORT=shm, but rank {peer} is out of reach: {reason}")


def _slower_neighbours(
    config: Config,
    hello: Sequence[Record],
    offers: Sequence[Record],
    opened: Sequence[Record],
    by_shm: Sequence[bool],
    rank: int,
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
        why = "; ".join(f"rank {who}: {offer['why_not']}. {offer['help']}" for who, offer in refusing)
        peers_of.setdefault(why or _why_closed(opened, rank, peer), []).append(peer)
    return [
        f"SENNIT_TRANSPORT=auto takes udp, not shared memory, between rank {rank} and "
        f"{'rank' if len(peers) == 1 else 'ranks'} {', '.join(map(str, peers))} of the same host: {why}. Or set "
        "SENNIT_TRANSPORT=udp"
        for why, peers in peers_of.items()
    ]


def _unpaired_rails(endpoint: Endpoint, routes: Sequence[Route], rails: Sequence[Rail], rank: int) -> list[str]:
    """Names our interfaces for which some peer has no counterpart."""
    peers_of: dict[Rail, list[int]] = {}
    for peer, (kind, _) in enumerate(routes):
        used = {path[0] for path in endpoint.tried_paths(peer)} if kind not in ("self", "shm") else set()
        for rail in rails:
            if used and used.isdisjoint((rail.address, rail.other_family_address)):
                peers_of.setdefault(rail, []).append(peer)
    return [
        f"{rail.interface} ({rail.address}) of rank {rank} stays out of use with "
        f"{'rank' if len(peers) == 1 else 'ranks'} {', '.join(map(str, peers))}: fewer interfaces with an address of "
        "its family there"
        for rail, peers in peers_of.items()
    ]


def _without_ipv6(rails: Sequence[Rail], rank: int) -> list[str]:
    """Names our interfaces that have IPv4 alone. It carries the same, so this is no warning."""
    names = [f"{rail.interface} ({rail.address})" for rail in rails if ":" not in rail.address]
    return [f"rank {rank} uses IPv4, because there is no IPv6 address on {', '.join(names)}"] if names else []


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
