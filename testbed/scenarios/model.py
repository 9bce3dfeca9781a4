# SPDX-License-Identifier: Apache-2.0
"""A scenario as data: where it runs, what goes wrong, what is run, and what must come out.

Frozen dataclasses instead of a file format: the catalogue generates families (loss × collective), mypy and
`__post_init__` check every field before anything is set up, and `as_json` writes the scenario beside its results.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from sennit.testbed.scenarios.trainings import Trainings
from sennit.testbed.topology import Impairer, Impairment
from sennit.testbed.topology.fabric import HOSTS_MAX, PLANES_MAX
from sennit.testbed.topology.netem import why_not
from sennit.testbed.topology.planes import MTU_MAX_BYTES, MTU_MIN_BYTES
from sennit.testbed.topology.switch import NEEDS as TOPOLOGY_NEEDS
from sennit.transport.codecs import COLLECTIVE_CODECS

NO_IMPAIRMENT: Final = Impairment()
NOT_COUNTED_BY_NETEM: Final = frozenset(
    {"corrupt_counted", *(f"impairment.{name}" for name in ("corrupted", "duplicated", "marked", "held", "released"))}
)
ELEMENT_BYTES: Final = 4  # float32, whose sum depends on the order of its operands


class Operation(StrEnum):
    """The collectives that a workload can repeat."""

    ALLREDUCE = "allreduce"
    ALLTOALL = "alltoall"
    INCAST = "incast"
    """A gather at rank 0: all ranks send to it at once."""


class Library(StrEnum):
    """The library that runs the collective."""

    SENNIT = "sennit"
    """The native core through `sennit.transport.communicator`, without torch."""
    GLOO = "gloo"
    """torch's gloo over TCP with every plane's interface: it uses them in turn, one per operation."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts with one rank each and one interface in every plane. Each plane has its own switch."""

    hosts: int = 2
    """Number of ranks."""
    planes: int = 4
    """Disjoint networks between the hosts. The ranks use them as rails."""
    mtu_bytes: int = 9000
    per_packet: bool = True
    """No segmentation offload (`gso_max_segs 1`), so one loss is one packet. False is faster, but a loss would take a
    batch of up to 64 KiB; only for scenarios without random loss.
    """
    rate_bits_per_s: int | None = None
    """Rate of the switch port towards host 0. None: as fast as the machine."""
    queue_bytes: int = 0
    """Bytes of that port's queue. It takes a rate."""
    strangers: int = 0
    """Additional hosts without a rank, for hostile senders."""

    def __post_init__(self) -> None:
        hosts_max = HOSTS_MAX - self.strangers
        _require(self.strangers >= 0, f"strangers {self.strangers}; allowed: 0 or more")
        _require(2 <= self.hosts <= hosts_max, f"hosts {self.hosts}; allowed: 2..{hosts_max}")
        _require(1 <= self.planes <= PLANES_MAX, f"planes {self.planes}; allowed: 1..{PLANES_MAX}")
        _require(
            MTU_MIN_BYTES <= self.mtu_bytes <= MTU_MAX_BYTES,
            f"mtu_bytes {self.mtu_bytes}; allowed: {MTU_MIN_BYTES}..{MTU_MAX_BYTES}",
        )
        _require(
            (self.rate_bits_per_s is None) == (self.queue_bytes == 0),
            f"rate {self.rate_bits_per_s} with a queue of {self.queue_bytes} bytes; allowed: both or neither",
        )


@dataclass(frozen=True, kw_only=True)
class SwitchPlane:
    """A plane goes down: it drops every packet while its links stay up, like a router that forwards into nothing."""

    plane: int
    up: bool
    at_s: float
    """Seconds after the start of the run, as for every fault."""


@dataclass(frozen=True, kw_only=True)
class KillRank:
    """The process ends without a word (SIGKILL)."""

    rank: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class SuspendRank:
    """The process is silent, but its sockets stay open (SIGSTOP)."""

    rank: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class PowerOff:
    """The rank's host is gone at once: its process stands still (SIGSTOP), and its links go down on every plane."""

    rank: int
    at_s: float


Fault: TypeAlias = SwitchPlane | KillRank | SuspendRank | PowerOff


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A collective, repeated. Every result of every rank is compared byte for byte."""

    operation: Operation = Operation.ALLREDUCE
    size_bytes: int = 64 << 20
    """Bytes of one rank's input."""
    repetitions: int = 5
    """The least repetitions in a run."""
    duration_s: float = 0.0
    """How long a run lasts; AllReduce only, whose payload carries rank 0's signal to stop."""
    rounds: int = 3
    """How often every library and condition has its turn: A, B, A, B, …"""
    timeout_s: float = 60.0
    """Deadline of one operation."""
    leaves: int | None = None
    """AllReduce over a tree of that many leaves (docs/reference/plans.md), whatever the world. None: one a rank."""
    codec: str | None = None
    """Numbers travel coded, rounded at random by seed: a name of `COLLECTIVE_CODECS`. AllReduce of leaves, AlltoAll."""
    timeline: bool = False
    """Samples progress and planes every millisecond, for stalls and plots. Costs some speed."""

    def __post_init__(self) -> None:
        _require(self.size_bytes >= 4096, f"size_bytes {self.size_bytes}; allowed: 4096 or more")
        _require(self.repetitions >= 1, f"repetitions {self.repetitions}; allowed: 1 or more")
        _require(self.rounds >= 1, f"rounds {self.rounds}; allowed: 1 or more")
        _require(self.timeout_s > 0, f"timeout_s {self.timeout_s}; allowed: above 0")
        _require(
            self.duration_s == 0 or self.operation is Operation.ALLREDUCE,
            f"duration_s {self.duration_s} with {self.operation}; allowed: with allreduce",
        )
        _require(
            self.leaves is None or (self.operation is Operation.ALLREDUCE and self.duration_s == 0),
            f"leaves {self.leaves}; allowed: with allreduce and no duration",
        )
        _require(
            self.codec is None or self.codec in COLLECTIVE_CODECS,
            f"codec {self.codec!r}; allowed: {', '.join(COLLECTIVE_CODECS)}",
        )
        _require(
            self.codec is None or self.leaves is not None or self.operation is Operation.ALLTOALL,
            f"codec {self.codec} with {self.operation}; allowed: with leaves or alltoall",
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run by torchrun, fed over the network, in place of a collective (`split_networks.py`).

    The last host has a feeder, the others a rank each. Plane 0 is the front-end network, plane 1 the back-end network.
    """

    samples: int = 60_000
    """Samples of the synthetic data set."""
    steps: int = 200
    batch_size: int = 256
    timeout_s: float = 240.0
    """Deadline of the whole run."""

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("steps", self.steps), ("batch_size", self.batch_size)):
            _require(value >= 1, f"{name} {value}; allowed: 1 or more")
        _require(self.timeout_s > 0, f"timeout_s {self.timeout_s}; allowed: above 0")


@dataclass(frozen=True, kw_only=True)
class Rack:
    """A training run with an aggregator and a storage host, in place of a collective (`rack.py`).

    The last host has the storage, the one before it the aggregator, the others a rank each. All three are killed in
    turn, in a second run that must end with the weights of the first.
    """

    steps: int = 400
    kill_steps: tuple[int, int, int] = (80, 180, 290)
    """The steps at which the aggregator, the storage and a rank are killed."""
    victim: int = 1
    """The rank that is killed. Rank 0 has the store in which ranks meet."""
    checkpoint_every: int = 50
    samples: int = 20_000
    """Samples of the synthetic data set."""
    batch_size: int = 256
    rate_mbit: int = 200
    """Rate of a training host's link, for what it sends."""
    native: bool = False
    """The aggregator uses sockets alone, and no XDP."""
    ranks_alone: int | None = None
    """Ranks of the run that is left alone, whose number changes no bit. None: all."""
    timeout_s: float = 180.0
    """Deadline of a run."""

    def __post_init__(self) -> None:
        steps = (0, *self.kill_steps, self.steps)
        _require(
            list(steps) == sorted(set(steps)) and self.checkpoint_every < self.kill_steps[2],
            f"kill_steps {self.kill_steps} of {self.steps} steps, a checkpoint every {self.checkpoint_every}; "
            "allowed: ascending, within the run, and a checkpoint before the last",
        )
        for name, value in (("samples", self.samples), ("batch_size", self.batch_size), ("rate", self.rate_mbit)):
            _require(value >= 1, f"{name} {value}; allowed: 1 or more")
        _require(self.timeout_s > 0, f"timeout_s {self.timeout_s}; allowed: above 0")


@dataclass(frozen=True, kw_only=True)
class RemoteDisk:
    """Training runs with data set and table files on another host's disks, in place of a collective (`remote_disk.py`).

    The last host has the disks, the others a rank each. Plane 0 is the front-end network, plane 1 the back-end network.
    """

    samples: int = 100_000
    """Rows of the data set."""
    steps: int = 200
    batch_size: int = 512
    checkpoint_every: int = 50
    timeout_s: float = 240.0
    """Deadline of a run."""

    def __post_init__(self) -> None:
        _require(
            0 < self.checkpoint_every < self.steps,
            f"a checkpoint every {self.checkpoint_every} of {self.steps} steps; allowed: one before the end",
        )
        for name, value in (("samples", self.samples), ("batch_size", self.batch_size)):
            _require(value >= 1, f"{name} {value}; allowed: 1 or more")
        _require(self.timeout_s > 0, f"timeout_s {self.timeout_s}; allowed: above 0")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration of sennit for the workload. All variants must give the same bits."""

    transport: str = "udp"
    paths: int = 8
    impairment_seed: int = 1
    peer_timeout_s: float = 10.0
    loss_fraction: float | None = None
    """The share of lost packets; None: the scenario's."""
    algorithm: str = "auto"
    scattered: bool = False
    """Every rank gives one leaf, and the AllReduce is a ReduceScatter and an AllGather."""
    layout: str = ""
    """A letter for each rank: ranks with the same letter pretend to share a host. As many ranks take part. By default
    one for each host of the topology."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on one measure.

    Without bounds the measure is shown for comparison. `measures.py` has names and meanings.
    """

    measure: str
    at_least: float = -math.inf
    at_most: float = math.inf
    must: bool = False
    """For correctness and bounded time: if missed, the case fails. Other goals concern speed. They are reported as met
    or short, and fail a case only with `--strict`.
    """

    def met_by(self, value: float | None) -> bool:
        return value is not None and self.at_least <= value <= self.at_most

    def text(self) -> str:
        if self.at_least == self.at_most:
            return f"= {self.at_least:g}"
        bounds = [f"≥ {self.at_least:g}"] if self.at_least > -math.inf else []
        bounds += [f"≤ {self.at_most:g}"] if self.at_most < math.inf else []
        return " and ".join(bounds) or "to compare with"


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """A stranger's packets at rank 0's ports while the workload runs (`hostile.py`)."""

    packets_per_s: int
    """The upper limit. A sender with too little processor time sends fewer packets, and the case says how many."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case of the testbed."""

    name: str
    title: str
    """What the scenario shows, in one line."""
    topology: Topology = dataclasses.field(default_factory=Topology)
    impairment: Impairment = NO_IMPAIRMENT
    """What impairs the packets that every host sends on every plane."""
    beside_calm: bool = False
    """Every round also runs without impairment and hostile packets, for `goodput_kept`."""
    faults: tuple[Fault, ...] = ()
    recovers: bool = False
    """After a rank's death the survivors reconfigure and run the collective once more among themselves."""
    hostile: Hostile | None = None
    workload: Workload = dataclasses.field(default_factory=Workload)
    job: Job | Rack | RemoteDisk | Trainings | None = None
    """A training job, or training runs, in place of the workload."""
    libraries: tuple[Library, ...] = (Library.SENNIT,)
    variants: tuple[Variant, ...] = (Variant(),)
    goals: tuple[Goal, ...] = ()
    short: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of topology, workload or scenario that the short form replaces: {"workload": {"size_bytes": …}}."""

    def __post_init__(self) -> None:
        last = self.topology.hosts - 1
        if isinstance(self.job, Trainings):
            needed = self.job.hosts
            _require(
                needed <= last + 1, f"{self.name}: hosts {last + 1}; allowed: {needed} or more, one for a newcomer"
            )
        _require(
            not isinstance(self.job, Job | RemoteDisk) or (self.topology.hosts >= 3 and self.topology.planes == 2),
            f"{self.name}: a job on {self.topology.hosts} hosts, {self.topology.planes} planes; allowed: 3 or more, 2",
        )
        if isinstance(self.job, Rack):
            _require(
                self.job.victim < last - 1,
                f"{self.name}: {last + 1} hosts, of which rank {self.job.victim} is killed; allowed: an aggregator, "
                "storage, and more ranks than that",
            )
        _require(
            not self.faults or self.workload.rounds == 1,
            f"{self.name}: {self.workload.rounds} rounds with faults; allowed: 1",
        )
        for fault in self.faults:
            if isinstance(fault, SwitchPlane):
                top = self.topology.planes - 1
                _require(0 <= fault.plane <= top, f"{self.name}: fault of plane {fault.plane}; allowed: 0..{top}")
            else:
                _require(0 < fault.rank <= last, f"{self.name}: fault at rank {fault.rank}; allowed: 1..{last}")
        _require(
            not self.recovers or bool(self.victims()),
            f"{self.name}: nothing to recover from; allowed: with a dead rank",
        )
        _require(
            Library.GLOO not in self.libraries or self.topology.hosts == 2,
            f"{self.name}: gloo with {self.topology.hosts} hosts; allowed: 2, where a sum has one order",
        )
        exchanges = self.workload.operation is Operation.ALLTOALL and self.workload.codec is not None
        ranks_max = min(self.topology.hosts, self.topology.hosts if exchanges else self.workload.leaves or 0)
        for variant in self.variants:
            _require(
                len(variant.layout) <= ranks_max,
                f"{self.name}: layout {variant.layout}; allowed: up to {ranks_max} ranks, as hosts and leaves",
            )
            _require(
                not variant.scattered or len(variant.layout) == self.workload.leaves,
                f"{self.name}: scattered over {len(variant.layout)} ranks; allowed: as many as leaves",
            )
        _require(
            (self.workload.leaves or self.workload.codec) is None or Library.GLOO not in self.libraries,
            f"{self.name}: gloo knows neither leaves nor codecs",
        )
        _require(
            self.hostile is None or self.topology.strangers > 0, f"{self.name}: hostile packets need a stranger's host"
        )

    def victims(self) -> frozenset[int]:
        """Ranks that do not live to answer."""
        return frozenset(fault.rank for fault in self.faults if not isinstance(fault, SwitchPlane))

    def shortened(self) -> Scenario:
        """The form that takes seconds: less data and fewer rounds, but the same faults and goals."""
        changes: dict[str, Any] = {}
        for name, value in self.short.items():
            part = getattr(self, name)
            changes[name] = dataclasses.replace(part, **value) if isinstance(value, dict) else value
        return dataclasses.replace(self, **changes)

    def needs(self, impairer: Impairer) -> tuple[str, ...]:
        """Capabilities (`sennit/doctor/capabilities.py`) without which the case is unsupported."""
        torch = ("torch",) if self.job or Library.GLOO in self.libraries else ()
        disks = ("nvme-tcp",) if isinstance(self.job, RemoteDisk) else ()
        return (*TOPOLOGY_NEEDS[impairer], "core", *torch, *disks)

    def why_not_by(self, impairer: Impairer) -> str | None:
        """What this kind of impairment cannot do for the scenario, on any machine."""
        if impairer is not Impairer.NETEM:
            return None
        uncounted = [goal.measure for goal in self.goals if goal.measure in NOT_COUNTED_BY_NETEM]
        if uncounted:
            return f"netem does not count what {', '.join(uncounted)} is made of"
        return why_not(self.impairment)

    def as_json(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        plain["faults"] = [
            {"kind": type(fault).__name__, **values} for fault, values in zip(self.faults, plain["faults"], strict=True)
        ]
        plain["goals"] = [goal_as_json(goal) for goal in self.goals]
        plain.pop("short")
        result: dict[str, Any] = json.loads(json.dumps(plain))
        return result


def goal_as_json(goal: Goal) -> dict[str, Any]:
    """Missing bounds are null, because JSON has no infinity."""
    return {
        "measure": goal.measure,
        "at_least": goal.at_least if math.isfinite(goal.at_least) else None,
        "at_most": goal.at_most if math.isfinite(goal.at_most) else None,
        "must": goal.must,
    }


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
