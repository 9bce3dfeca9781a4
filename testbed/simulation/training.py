# SPDX-License-Identifier: Apache-2.0
"""Training steps of many hosts: kernels as this machine was calibrated, exchanges as the simulated fabric carries them.

The planner's rating of a placement gives what each host computes, and the bytes of each exchange. The network's part of
it is left out: an AlltoAll of ids and one of vectors, and the AllReduce of the dense gradients, are run in the
simulator in its place. Gradients of vectors are as many bytes as vectors. The planner's schedule says what of them
hides. A host is one rank. Its work on the network is the NIC's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.planner import dense
from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.problem import Fixed, Problem
from sennit.runtime.planner.schedule import PHASES, Schedule, Time
from sennit.runtime.planner.step_time import Kind, Rating
from sennit.runtime.planner.usage import assumed
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Table
from sennit.testbed.simulation.outcome import Outcome
from sennit.testbed.simulation.scenario import Pattern, Scenario
from sennit.testbed.simulation.suite import Case
from sennit.transport.choice.costs import Costs

HOSTS: Final = (16, 64, 256, 1024)
# The exchange that each of these phases waits for.
EXCHANGES: Final[Mapping[str, str]] = {
    "id exchange": "ids",
    "pooled exchange": "vectors",
    "gradient exchange": "vectors",
    "AllReduce": "gradients",
}
FLOAT_BYTES: Final = 4
RECEIVE_BUDGET_BYTES: Final = 2 << 20
"""What a receiver lets all senders have in flight, as over sockets (`flow/receive_budget.hpp`)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model whose shards can be dealt evenly to 1,024 hosts, and the samples of a host."""

    tables: int = 128
    rows: int = 1_000_000
    dim: int = 128
    column_shards: int = 8
    length: float = 10.0
    """Ids of a bag."""

    dense_count: int = 13
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)
    samples: int = 512
    """Samples of a host in a step: as many as a GPU has in Mudigere et al. (ISCA 2022)."""

    speed: float = 1.0
    """How many times as fast as one core of this machine a host computes."""

    @property
    def shards(self) -> int:
        return self.tables * self.column_shards

    def made(self) -> tuple[Table, ...]:
        return tuple(
            Table(name=f"t{number}", rows=self.rows, dim=self.dim, column_shards=self.column_shards)
            for number in range(self.tables)
        )

    def owners(self, hosts: int) -> list[npt.NDArray[np.int64]]:
        """The owners of each table, [1, column shards]: shards in order, equally many on each host."""
        shard = np.arange(self.shards).reshape(self.tables, 1, self.column_shards)
        return list(shard * hosts // self.shards)


def measure(shape: Shape) -> Fixed:
    """The model on one core of this machine, with the samples of a host as one slice. Takes some seconds."""
    inputs = ModelInputs(
        dense_count=shape.dense_count,
        tables=shape.made(),
        bottom=shape.bottom,
        top=shape.top,
        seed=1,
    )
    return dense.measure("dlrm", inputs, slices=Slices(count=1, rank=0, world_size=1), batch=shape.samples)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of so many hosts."""

    hosts: int
    times: Mapping[str, Time]
    """The time that each phase takes by itself."""

    schedule: Schedule

    @property
    def computed_s(self) -> float:
        return sum(float(time.busy) for time in self.times.values())

    def seconds(self, *, overlapped: bool) -> float:
        schedule = self.schedule if overlapped else dataclasses.replace(self.schedule, ahead=False, tables_beside=False)
        return float(sum(schedule.exposed(self.times).values()))

    def exposed_share(self, *, overlapped: bool) -> float:
        """The share of a step that is no computation."""
        seconds = self.seconds(overlapped=overlapped)
        return max(0.0, 1 - self.computed_s / seconds)


def rating(shape: Shape, hosts: int, constants: Constants, fixed: Fixed) -> Rating:
    """The rating of the model on `hosts` hosts, with a network that takes no time. Only folds of arrived data do."""
    folds = Costs(
        round_s=0.0, message_s=0.0, byte_s=0.0, peer_share=0.0, fold_byte_s=constants.network.network.fold_byte_s
    )
    network = constants.network._replace(shared_memory=folds, network=folds)
    tables = shape.made()
    return Rating(
        Problem(
            tables=tables,
            uses=tuple(assumed(table, shape.length) for table in tables),
            cluster=Cluster(ranks=hosts, local_ranks=1, cores=1),
            constants=dataclasses.replace(constants, network=network),
            batch=shape.samples * hosts,
            slices=hosts,
            fixed=fixed,
        )
    )


def step(shape: Shape, hosts: int, constants: Constants, fixed: Fixed, exchanges_s: Mapping[str, float]) -> Step:
    """`exchanges_s`: simulated, by name ("ids", "vectors", "gradients"); empty for one host."""
    rated = rating(shape, hosts, constants, fixed)
    phases = rated.phases(rated.total(shape.owners(hosts)))
    times = {}
    for phase in PHASES:
        waited = exchanges_s[EXCHANGES[phase]] if phase in EXCHANGES and hosts > 1 else 0.0
        times[phase] = Time(float(phases[phase]) / shape.speed, waited, waited)
    schedule = Schedule(
        ahead=True,
        tables_beside=True,
        looks_ahead=True,
        cores=1.0,
        early=Time(fixed.early_s / shape.speed),
        optimizer=Time(fixed.update_s / shape.speed),
        switches=0.0,
    )
    return Step(hosts=hosts, times=times, schedule=schedule)


def exchange_bytes(shape: Shape, hosts: int, constants: Constants, fixed: Fixed) -> dict[str, int]:
    """Bytes from each host to each other ("ids", "vectors"), and of the dense gradients ("gradients")."""
    rated = rating(shape, hosts, constants, fixed)
    work = rated.total(shape.owners(hosts))
    pair = {name: round(float(work[kind].max()) * shape.samples) for name, kind in
            (("ids", Kind.IDS_SENT), ("vectors", Kind.SUMS_SENT))}  # fmt: skip
    return {**pair, "gradients": fixed.gradient_bytes // FLOAT_BYTES * FLOAT_BYTES}


def cases(shape: Shape, hosts: Sequence[int], constants: Constants, fixed: Fixed, seed: int) -> list[Case]:
    """The simulations that these steps take: three for each number of hosts. The largest come last."""
    found = []
    for count in hosts:
        leaf = 1 << round(np.log2(count) / 2)
        base = Scenario(hosts=count, hosts_per_leaf=leaf, spines=leaf, seed=seed)
        for name, size in exchange_bytes(shape, count, constants, fixed).items():
            scenario = base.with_(size_bytes=size)
            if name == "gradients":
                # Few flows at a time: each needs a window for the whole path. With many, receivers limit them.
                scenario = scenario.with_(
                    pattern=Pattern.ALLREDUCE, window_bytes=128 << 10, receive_budget_bytes=RECEIVE_BUDGET_BYTES
                )
            found.append(Case(group=f"training {count}", way=name, scenario=scenario))
    return found


def steps(
    shape: Shape,
    hosts: Sequence[int],
    constants: Constants,
    fixed: Fixed,
    found: Sequence[Case],
    outcomes: Mapping[str, Outcome],
) -> list[Step]:
    """One host, and each of these numbers whose simulations all came to their end."""
    made = [step(shape, 1, constants, fixed, {})]
    for count in hosts:
        own = [case for case in found if case.scenario.hosts == count]
        ended = {case.way: outcomes[case.name] for case in own if case.name in outcomes}
        if len(ended) == len(own) and all(outcome.is_complete for outcome in ended.values()):
            seconds = {name: outcome.completion_us / 1e6 for name, outcome in ended.items()}
            made.append(step(shape, count, constants, fixed, seconds))
    return made
