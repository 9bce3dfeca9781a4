# SPDX-License-Identifier: Apache-2.0
"""`sennit bench collectives`: the four collectives of recommendation training, sennit beside its peers.

A round measures every peer once. The order of peers rotates from round to round. A sample is the time of the slowest
rank. Small sizes run many times within one sample.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from sennit.runtime.calibrate import machine
from sennit.testbed.bench.cases import Case, Collective
from sennit.testbed.bench.results import Report, Row
from sennit.testbed.bench.transport.conductor import Workers
from sennit.testbed.bench.transport.library import BETWEEN, LIBRARIES
from sennit.testbed.bench.transport.worker_commands import Allocate, Join, Measure, ReadPeak, ResetPeak, Verify
from sennit.transport.plans.hosts import Hosts
from sennit.transport.sizes import format_size

SAMPLE_S = 0.05  # How long one sample should take. It is long compared with a scheduler's time slice.
MAX_ITERATIONS = 2_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    transport: str = "auto"
    """Value of SENNIT_TRANSPORT in the workers."""

    world: int = 2
    """Ranks, all on this machine."""

    hosts: int = 1
    """Hosts that sennit is told the ranks are spread over. Between them it takes the network, over loopback."""

    against: tuple[str, ...] = ("gloo",)
    """Peers, from `LIBRARIES`."""

    ours: str = "sennit"
    """The subject: sennit through torch, or "sennit-core", the native core alone."""

    collectives: tuple[Collective, ...] = tuple(Collective)

    sizes_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    """See `Case.size_bytes`."""

    rounds: int = 15
    """Samples per case and peer."""

    def __post_init__(self) -> None:
        if self.world < 2:
            raise ValueError(f"world {self.world}: a collective takes at least 2 ranks")
        if self.rounds < 1:
            raise ValueError(f"rounds {self.rounds}: at least 1")
        for peer in (self.ours, *self.against):
            if peer not in LIBRARIES:
                raise ValueError(f"peer {peer!r}: known are {', '.join(LIBRARIES)}")
        if not 1 <= self.hosts <= self.world or (self.hosts > 1 and self.transport != "auto"):
            raise ValueError(f"hosts {self.hosts}: 1 to {self.world}, the ranks; more than one with transport auto")
        coded = [peer for peer in self.against if peer.endswith(BETWEEN)]
        if coded and self.hosts == 1:
            raise ValueError(f"{coded[0]} codes between hosts: 2 or more")
        if "udp-bare" in self.against and self.world != 2:
            raise ValueError(f"udp-bare is an exchange of 2 ranks, not of {self.world}")
        if "new-sizes" in self.against and set(self.collectives) != {Collective.ALLREDUCE}:
            raise ValueError(f"new-sizes with {', '.join(self.collectives)}; allowed: allreduce alone")
        for case in self.cases():
            case.elements(self.world)

    def cases(self) -> list[Case]:
        return [Case(collective, size) for collective in self.collectives for size in self.sizes_bytes]

    def by_rank(self) -> list[dict[str, str]]:
        """The host that each rank is told to be on."""
        if self.hosts == 1:
            return []
        hosts = Hosts.equal(self.world, self.hosts)
        return [{"SENNIT_HOST_ID": f"pretended-{hosts.of_rank(rank)}"} for rank in range(self.world)]

    def environment(self) -> dict[str, str]:
        """All ranks run here, so sennit and gloo use loopback unless the user chose other interfaces."""
        environment = {"SENNIT_TRANSPORT": self.transport}
        if LIBRARIES[self.ours] == "torch":
            # NumPy asks for pages of 2 MiB, and torch does not. All peers have pages of one size: OpenMPI takes 1.2 to
            # 1.4 times as long with small ones.
            environment["NUMPY_MADVISE_HUGEPAGE"] = "0"
        for name in ("SENNIT_INTERFACES", "GLOO_SOCKET_IFNAME"):
            environment[name] = os.environ.get(name, "lo")
        return environment


def run(settings: Settings, progress: Callable[[str, int, int], None], *, has_memory: bool = True) -> Report:
    """Measures all cases, and perhaps the growth of memory. Calls `progress(what, done, total)` before each."""
    report = Report(ours=settings.ours, settings=asdict(settings), machine=machine.describe())
    cases = settings.cases()
    peers = list(dict.fromkeys((settings.ours, *settings.against)))
    with ExitStack() as stack:
        by_library: dict[str, Workers] = {}
        for library in (LIBRARIES[peer] for peer in peers):
            if library not in by_library:
                by_library[library] = stack.enter_context(_workers(settings, library))
        by_peer = {peer: by_library[LIBRARIES[peer]] for peer in peers}
        for peer in peers:
            by_peer[peer].ask(Join(peer))
        for done, case in enumerate(cases):
            progress(f"{case.collective} {format_size(case.size_bytes)}", done, len(cases))
            report.rows.append(_measure_case(case, peers, by_peer, settings.rounds))
    if has_memory:
        progress("memory", len(cases), len(cases))
        report.memory_growth_bytes = memory_growth_bytes(settings)
    return report


def _workers(settings: Settings, library: str) -> Workers:
    return Workers(
        library=library, world=settings.world, environment=settings.environment(), by_rank=settings.by_rank()
    )


def _measure_case(case: Case, peers: list[str], workers: dict[str, Workers], rounds: int) -> Row:
    iterations = {}
    for peer in peers:
        workers[peer].ask(Verify(peer, case))
        iterations[peer] = choose_iterations(partial(_slowest_rank_s, workers[peer], peer, case))
    samples: dict[str, list[float]] = {peer: [] for peer in peers}
    for order in _orders(peers, rounds):
        for peer in order:
            samples[peer].append(_slowest_rank_s(workers[peer], peer, case, iterations[peer]))
    return Row(case, samples)


def _slowest_rank_s(workers: Workers, peer: str, case: Case, iterations: int) -> float:
    return max(workers.ask(Measure(peer, case, iterations)))


def choose_iterations(seconds_per_run: Callable[[int], float]) -> int:
    """How often a sample runs the case, so that it takes about `SAMPLE_S`.

    `seconds_per_run(count)` runs the case that often. A few runs may take far longer than most: the first one fills
    caches, and a rank may lose its core for a time slice. So only a trial of half a sample is believed.
    """
    seconds_per_run(1)
    count = 3
    while True:
        once_s = seconds_per_run(count)
        wanted = max(1, min(MAX_ITERATIONS, round(SAMPLE_S / once_s)))
        if wanted <= count or once_s * count >= SAMPLE_S / 2:
            return wanted
        count = wanted


def _orders(peers: list[str], rounds: int) -> Iterator[list[str]]:
    """Rotates the peers, so that each is first, second, … equally often."""
    for turn in range(rounds):
        first = turn % len(peers)
        yield peers[first:] + peers[:first]


def memory_growth_bytes(settings: Settings) -> int:
    """Returns the peak resident bytes per rank that sennit adds to the tensors, of all collectives at the largest size.

    Counted from before the group is made, in fresh workers. Shared memory counts for each rank that touches it.
    """
    growth = 0
    for collective in settings.collectives:
        case = Case(collective, max(settings.sizes_bytes))
        with _workers(settings, LIBRARIES[settings.ours]) as workers:
            workers.ask(Allocate(case))
            before = workers.ask(ResetPeak())
            workers.ask(Join(settings.ours))
            workers.ask(Measure(settings.ours, case, 3))
            after = workers.ask(ReadPeak())
            growth = max(growth, *(int(high - low) for low, high in zip(before, after, strict=True)))
    return growth
