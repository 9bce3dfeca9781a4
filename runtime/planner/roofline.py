# SPDX-License-Identifier: Apache-2.0
"""The least time of each phase of a step: by bandwidth, by latency, by arithmetic (docs/reference/roofline.md).

A bound counts only what no implementation can leave out: every distinct row comes from its tier once, every sum
crosses a link once, and all ranks have equal work. So a step is never faster, and how much slower it is says what is
left to gain (Williams, Waterman and Patterson, "Roofline", 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.planner.usage import Use
from sennit.transport.errors import ConfigError

FLOAT_BYTES: Final = 4
LENGTH_BYTES: Final = 4
PHASES: Final = (
    "id exchange", "lookup", "pooled exchange", "dense", "gradient exchange", "update", "replicas", "AllReduce",
)  # fmt: skip
ARITHMETIC, LATENCY, NEAR, FAR = "arithmetic", "latency", "link in a host", "link between hosts"
# Passes over dense weights that no step can do without: read twice, gradients written and read, weights written.
DENSE_PASSES: Final = 5
SPREADS: Final = ("table", "row", "replicated")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Equal embedding tables."""

    name: str
    count: int = 1
    """Tables, of one feature each."""
    rows: int
    dim: int
    length: float
    """Ids of a sample in each table: the mean length of a bag."""
    row_bytes: float
    """Weights of a row."""
    state_bytes: float
    """Optimizer states of a row."""
    spread: str = "table"
    """table: each on one rank, or by columns. row: its rows over all ranks. replicated: each rank has all of it."""
    use: Use

    @property
    def size_bytes(self) -> float:
        return self.count * self.rows * (self.row_bytes + self.state_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A step of a model."""

    name: str
    tables: Sequence[Tables]
    batch: int
    """Samples of all ranks."""
    dense_flops: float
    """Floating-point operations of a forward and backward pass for one sample. A multiply-add counts as two."""
    dense_numbers: float
    """Trained weights that every rank has."""
    dense_state_bytes: float = FLOAT_BYTES
    """Bytes of optimizer states for each of these weights."""
    exchange_bytes: float = FLOAT_BYTES
    """Bytes that a number of a pooled vector, or of its gradient, has on a link."""
    gradient_bytes: float = FLOAT_BYTES
    """Bytes that a dense gradient has on a link."""

    @property
    def id_bytes(self) -> int:
        return 8 if any(table.rows > 1 << 31 for table in self.tables) else 4

    @property
    def parameters(self) -> float:
        return self.dense_numbers + sum(one.count * one.rows * one.dim for one in self.tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """A kind of memory of a device."""

    name: str
    size_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a device can send, one way."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Hosts with equally many devices. A rank has a device."""

    name: str
    hosts: int
    devices: int
    """Devices of a host."""
    flops_per_s: float
    """Floating-point operations a second of a device."""
    tiers: Sequence[Tier]
    """The fastest first. Batches and dense weights are in it."""
    near: Link
    """The link to devices of the host."""
    far: Link
    """The link to devices of other hosts."""
    cache_bytes: float = 0.0
    """Cache of a device: what it read or wrote last comes from there, at no cost."""
    turns: float = 1.0
    """Ranks that share one core, on average. A phase's bound takes a core for each rank; a step's bound does not."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.devices


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds that each resource needs at least in a phase."""

    name: str
    needs: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max(self.needs.values(), default=0.0)

    @property
    def binding(self) -> str:
        """The resource that takes longest; empty if the phase needs none."""
        return max(self.needs, key=lambda name: self.needs[name]) if self.seconds else ""

    @property
    def margin(self) -> float:
        """How many times longer it takes than the next one; inf if there is no other."""
        times = sorted(self.needs.values())
        return times[-1] / times[-2] if len(times) > 1 and times[-2] else math.inf

    def kind(self, name: str) -> str:
        return name if name in (ARITHMETIC, LATENCY) else "bandwidth"

    def by_kind(self) -> dict[str, float]:
        """Seconds by bandwidth, latency and arithmetic."""
        found = dict.fromkeys(("bandwidth", LATENCY, ARITHMETIC), 0.0)
        for name, seconds in self.needs.items():
            found[self.kind(name)] = max(found[self.kind(name)], seconds)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The least time of a step."""

    phases: Sequence[Phase]
    serial_s: float
    """Seconds of a step in which phases follow one another."""
    overlapped_s: float
    """Seconds of a step in which everything overlaps that may: those of the busiest resource."""
    overlapped_binding: str
    memory: Mapping[str, Mapping[str, float]]
    """Bytes of a rank by tier and by what they are for."""
    batch: int
    row_shares: Sequence[float] = ()
    """Each tier's share of the distinct rows of a step."""

    def samples_per_s(self, seconds: float) -> float:
        return self.batch / seconds if seconds else math.inf


def bounds_of(work: Workload, machines: Machines) -> Bounds:
    """Raises `ConfigError` that names table, tier and missing bytes if the model does not fit."""
    rows, memory = _filled(work, machines)
    phases = [phase for phase in _phases(work, machines, rows) if phase.seconds]
    totals: dict[str, float] = {}
    for phase in phases:
        for name, seconds in phase.needs.items():
            if name != LATENCY:
                totals[name] = totals.get(name, 0.0) + seconds * (machines.turns if name not in (NEAR, FAR) else 1.0)
    latencies = {phase.name: phase.needs.get(LATENCY, 0.0) for phase in phases}
    # Sums come before gradients. Ids may go ahead, and dense gradients beside those of tables.
    chain = latencies.get("pooled exchange", 0.0) + latencies.get("gradient exchange", 0.0)
    totals[LATENCY] = max(chain, *latencies.values(), 0.0)
    busiest = max(totals, key=lambda name: totals[name])
    serial = max(sum(phase.seconds for phase in phases), totals[busiest])
    touched = rows.sum()
    return Bounds(
        phases=phases,
        serial_s=serial,
        overlapped_s=totals[busiest],
        overlapped_binding=busiest,
        memory=memory,
        batch=work.batch,
        row_shares=tuple(rows.sum(1) / touched) if touched else (),
    )


def _filled(work: Workload, machines: Machines) -> tuple[npt.NDArray[np.float64], dict[str, dict[str, float]]]:
    """Rows by use to tiers, the most used to the fastest. Distinct rows of a step [tiers, tables], and bytes of a rank.

    No other choice takes fewer rows from the slower tiers.
    """
    ranks, tables = machines.ranks, work.tables
    share = work.batch / ranks
    numbers = sum(one.count * one.dim for one in tables)
    # Ids, and sums and their gradients.
    batch_bytes = share * (
        sum(one.count * (one.length * work.id_bytes + LENGTH_BYTES) for one in tables) + 2 * numbers * FLOAT_BYTES
    )
    memory: dict[str, dict[str, float]] = {tier.name: {} for tier in machines.tiers}
    first = machines.tiers[0]
    own = {
        "dense": work.dense_numbers * (2 * FLOAT_BYTES + work.dense_state_bytes),
        "batch": batch_bytes,
        "replicas": sum(one.size_bytes for one in tables if one.spread == "replicated"),
    }
    memory[first.name].update({name: size for name, size in own.items() if size})
    free = [tier.size_bytes for tier in machines.tiers]
    free[0] -= sum(own.values())
    if free[0] < 0:
        largest = max(own, key=lambda name: own[name])
        raise ConfigError(
            f"{work.name} does not fit on {machines.name}: tier {first.name} of each device lacks {-free[0]:,.0f} "
            f"bytes for what every rank has, most of it {largest}; allowed: {first.size_bytes:,.0f}"
        )
    found = np.zeros((len(machines.tiers), len(tables)))
    classes = []
    for number, one in enumerate(tables):
        ids = work.batch * one.length
        touched = one.use.rows * -np.expm1(-ids * one.use.mass / np.maximum(one.use.rows, 1e-300))
        if one.spread == "replicated":
            found[0, number] = one.count * touched.sum()
            continue
        size = one.row_bytes + one.state_bytes
        counted = one.use.rows.sum()
        bytes_of = one.count * one.use.rows * size / ranks
        heat = touched / np.maximum(one.use.rows * size, 1e-300)
        classes += [
            (float(hot), number, float(taken), one.count * float(seen))
            for hot, taken, seen in zip(heat, bytes_of, touched, strict=True)
        ]
        # Rows that a sample of the data did not name.
        if one.rows > counted:
            classes.append((0.0, number, one.count * (one.rows - counted) * size / ranks, 0.0))
    tier, missing, unlucky = 0, 0.0, -1
    for _, number, taken, seen in sorted(classes, key=lambda one: (-one[0], one[1])):
        left = taken
        while left > 0 and tier < len(free):
            part = min(left, free[tier])
            if part > 0:
                free[tier] -= part
                found[tier, number] += seen * part / taken
                place = memory[machines.tiers[tier].name]
                place["tables"] = place.get("tables", 0.0) + part
                left -= part
            if left > 0:
                tier += 1
        if left > taken * 1e-12:
            missing += left * ranks
            unlucky = number if unlucky < 0 else unlucky
    if unlucky >= 0:
        raise ConfigError(
            f"{work.name} does not fit on {machines.name}: table {tables[unlucky].name} has no place in tier "
            f"{machines.tiers[-1].name}, the last one; {missing:,.0f} bytes are missing on all devices together"
        )
    return found, memory


def _phases(work: Workload, machines: Machines, rows: npt.NDArray[np.float64]) -> list[Phase]:
    ranks, hosts, devices = machines.ranks, machines.hosts, machines.devices
    batch, tiers = work.batch, machines.tiers
    spread = [one for one in work.tables if one.spread != "replicated"]
    copies = [(number, one) for number, one in enumerate(work.tables) if one.spread == "replicated"]
    far_share, near_share = (ranks - devices) / ranks, (devices - 1) / ranks
    is_alone = ranks == 1
    latency = 0.0 if is_alone else (machines.far if hosts > 1 else machines.near).latency_s

    def links(near_bytes: float, far_bytes: float) -> dict[str, float]:
        needs = {} if is_alone else {LATENCY: latency}
        if near_bytes:
            needs[NEAR] = near_bytes / machines.near.bytes_per_s
        if far_bytes:
            needs[FAR] = far_bytes / machines.far.bytes_per_s
        return needs

    def memory(by_tier: Sequence[float], first_bytes: float) -> dict[str, float]:
        """Bytes of rows by tier, and of what lies in the first tier, without those that the cache may still hold."""
        first = max(0.0, by_tier[0] + first_bytes - machines.cache_bytes)
        sizes = [first, *by_tier[1:]]
        return {tier.name: size / tier.bytes_per_s for tier, size in zip(tiers, sizes, strict=True) if size}

    id_bytes = sum(one.count * (one.length * work.id_bytes + LENGTH_BYTES) for one in spread) * batch / ranks
    # Sums of tables that lie whole, or by columns: each is made on one rank.
    whole = sum(one.count * one.dim for one in spread if one.spread == "table") * batch * work.exchange_bytes
    near, far = whole / ranks * near_share, whole / ranks * far_share
    for one in spread:
        if one.spread == "row":
            # A host adds up the sums of its ranks before they leave it. Ranks without an id of a bag send nothing.
            size = batch * one.count * one.dim * work.exchange_bytes
            near += size * _touched(one.length, ranks) * near_share
            far += size * _touched(one.length, hosts) * (hosts - 1) / hosts / devices
    exchanged = links(near, far) if spread else {}
    seen = rows.sum(0)
    weights = [float((rows[tier] * [one.row_bytes for one in work.tables]).sum()) / ranks for tier in range(len(tiers))]
    states = [
        float((rows[tier] * [one.state_bytes for one in work.tables]).sum()) / ranks for tier in range(len(tiers))
    ]
    changed = [2 * (weight + state) for weight, state in zip(weights, states, strict=True)]
    for number, one in copies:
        # A rank reads the rows of its own samples, and changes those of all.
        weights[0] += one.row_bytes * (one.count * _distinct(one, batch / ranks) - float(seen[number]) / ranks)
        changed[0] += 2 * (one.row_bytes + one.state_bytes) * float(seen[number]) * (1 - 1 / ranks)
    sums = batch / ranks * sum(one.count * one.dim for one in work.tables) * work.exchange_bytes
    adds = batch / ranks * sum(one.count * one.dim * one.length for one in work.tables) / machines.flops_per_s
    dense_bytes = work.dense_numbers * FLOAT_BYTES * DENSE_PASSES
    flops = batch / ranks * work.dense_flops / machines.flops_per_s
    return [
        Phase("id exchange", links(id_bytes * near_share, id_bytes * far_share) if spread else {}),
        Phase("lookup", memory(weights, sums) | {ARITHMETIC: adds}),
        Phase("pooled exchange", exchanged),
        Phase("dense", memory([0.0] * len(tiers), dense_bytes) | {ARITHMETIC: flops}),
        Phase("gradient exchange", exchanged),
        Phase("update", memory(changed, sums) | {ARITHMETIC: adds}),
        Phase("replicas", links(*_gathered([one for _, one in copies], work, machines)) if copies else {}),
        Phase("AllReduce", links(*_reduced(work, machines)) if work.dense_numbers else {}),
    ]


def _distinct(one: Tables, samples: float) -> float:
    """Rows of one table that the ids of `samples` samples name."""
    ids = samples * one.length
    return float((one.use.rows * -np.expm1(-ids * one.use.mass / np.maximum(one.use.rows, 1e-300))).sum())


def _touched(length: float, parts: int) -> float:
    """The share of `parts` equal parts of a table in which a bag has an id."""
    return 1 - (1 - 1 / parts) ** length if parts > 1 else 1.0


def _reduced(work: Workload, machines: Machines) -> tuple[float, float]:
    """Bytes that a rank sends in an AllReduce, near and far. Ranks of a host add up first.

    No algorithm sends less (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """
    size, hosts, devices = work.dense_numbers * work.gradient_bytes, machines.hosts, machines.devices
    return 2 * size * (devices - 1) / devices, 2 * size * (hosts - 1) / hosts / devices


def _gathered(copies: Sequence[Tables], work: Workload, machines: Machines) -> tuple[float, float]:
    """Bytes of gradients of replicated tables that a rank takes, near and far: of rows that others used, each once."""
    hosts, devices = machines.hosts, machines.devices
    others = (hosts - 1) / hosts if hosts > 1 else (devices - 1) / devices
    size = sum(one.count * _distinct(one, work.batch * others) * one.dim * work.exchange_bytes for one in copies)
    return (size * (devices - 1) / devices, size / devices) if hosts > 1 else (size, 0.0)
