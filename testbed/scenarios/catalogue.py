# SPDX-License-Identifier: Apache-2.0
"""All scenarios. Each states its goals; docs/how-to/scenarios.md lists them and says how they are measured."""

from __future__ import annotations

from typing import Any, Final

from sennit.testbed.scenarios.model import (
    Goal,
    Hostile,
    Job,
    KillRank,
    Library,
    Operation,
    PowerOff,
    Rack,
    RemoteDisk,
    Scenario,
    SuspendRank,
    SwitchPlane,
    Topology,
    Variant,
    Workload,
)
from sennit.testbed.scenarios.trainings import SHARDINGS, Training, Trainings, dynamic_runs, product
from sennit.testbed.topology import Impairment
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.choice.costs import Collective
from sennit.transport.choice.selection import Selection
from sennit.transport.config import Algorithm
from sennit.transport.plans.hosts import Hosts

MIB: Final = 1 << 20
BOTH: Final = (Library.SENNIT, Library.GLOO)

EXACT: Final = (
    Goal(measure="results", at_least=1, must=True),
    Goal(measure="wrong_results", at_most=0, must=True),
    Goal(measure="failed_ranks", at_most=0, must=True),
)
SAME_BITS: Final = Goal(measure="distinct_digests", at_least=1, at_most=1, must=True)

TRAINED_ALIKE: Final = (
    Goal(measure="trainings", at_least=2, must=True),
    Goal(measure="failed_trainings", at_most=0, must=True),
    SAME_BITS,
    Goal(measure="impairment.dropped", at_least=1, must=True),
)

SHORT_WORKLOAD: Final[dict[str, Any]] = {"size_bytes": 2 * MIB, "repetitions": 2, "rounds": 2}

# Sizes of `same-bits`. All its worlds run this size in one shot, also where a rank gives two nodes.
LEAVES: Final = 8
LEAF_BYTES: Final = 64 << 10

# Packet loss -> (least goodput kept, least ratio to gloo over TCP): docs/how-to/scenarios.md.
LOSS_GOALS: Final = {0.001: (0.97, None), 0.01: (0.92, 3.0), 0.05: (0.75, 5.0)}


def _exact(operation: Operation) -> tuple[Goal, ...]:
    return (*EXACT, SAME_BITS) if operation is Operation.ALLREDUCE else EXACT


def _lossless(operation: Operation, ratio: float) -> Scenario:
    return Scenario(
        name=f"lossless-{operation}",
        title=f"nothing lost, {operation}, batches by segmentation offload, beside gloo over TCP",
        topology=Topology(per_packet=False),
        workload=Workload(operation=operation),
        libraries=BOTH,
        goals=(*_exact(operation), Goal(measure="ratio_to_gloo", at_least=ratio)),
        short={"workload": SHORT_WORKLOAD},
    )


def _loss(operation: Operation, loss_fraction: float) -> Scenario:
    kept, ratio = LOSS_GOALS[loss_fraction]
    return Scenario(
        name=f"loss-{100 * loss_fraction:g}-{operation}",
        title=f"{100 * loss_fraction:g} % of packets lost at random on 4 planes, {operation}, beside gloo over TCP",
        impairment=Impairment(loss_fraction=loss_fraction),
        beside_calm=True,
        workload=Workload(operation=operation, repetitions=3),
        libraries=BOTH,
        goals=(
            *_exact(operation),
            Goal(measure="impairment.dropped", at_least=1, must=True),
            Goal(measure="goodput_kept", at_least=kept),
            *([] if ratio is None else [Goal(measure="ratio_to_gloo", at_least=ratio)]),
        ),
        # The payload has enough packets that some are lost.
        short={"workload": SHORT_WORKLOAD if loss_fraction >= 0.01 else {"size_bytes": 8 * MIB, "repetitions": 4}},
    )


def _running(layout: str, scattered: bool) -> list[Algorithm]:
    """The algorithms that can run on this layout of hosts."""
    hosts = Hosts.of(layout)
    assert hosts is not None
    collective = Collective.REDUCE_SCATTER if scattered else Collective.ALLREDUCE
    leaves = None if scattered else Leaves(len(layout), LEAVES)
    return list(Selection(hosts=hosts).rate(collective, size_bytes=LEAF_BYTES, leaves=leaves))


def _same_bits() -> tuple[Variant, ...]:
    """Every algorithm on every layout of hosts with every loss, and all else that varies."""
    layouts = ("a", "ab", "abc", "abcd", "abcde", "aaaa", "aabb", "aaabb", "aaaabbbb", "aabbccdd", "abcdefgh")
    found = [
        Variant(transport="auto", layout=layout, algorithm=algorithm, loss_fraction=loss, scattered=scattered)
        for layout in layouts
        for scattered in ((False, True) if len(layout) == LEAVES else (False,))
        for algorithm in _running(layout, scattered)
        for loss in (0.0, 0.01, 0.05)
        # A layout of one host has no network.
        if loss == 0.01 or len(set(layout)) > 1
    ]
    return (
        *found,
        Variant(layout="abcd", impairment_seed=2),
        Variant(layout="abcd", paths=1),
        Variant(layout="abcd", paths=16),
        Variant(layout="aaaa", transport="shm"),
    )


def _coded_bits(codec: str, operation: Operation) -> Scenario:
    """An AllReduce with a codec has one algorithm."""
    reduces = operation is Operation.ALLREDUCE
    layouts = ("a", "ab", "abc", "abcd", "abcde", "aaaa", "aabb", "aaabb", "aaaabbbb", "abcdefgh")
    return Scenario(
        name=f"same-bits-{codec}" if reduces else f"same-bits-{codec}-alltoall",
        title=f"{'an AllReduce of 8 leaves' if reduces else 'AlltoAll'} in {codec}, rounded at random by one seed: "
        "hosts, worlds, loss, paths and ports, the bits of the definition",
        topology=Topology(hosts=8),
        impairment=Impairment(loss_fraction=0.01),
        workload=Workload(
            operation=operation,
            size_bytes=LEAF_BYTES,
            repetitions=10,
            rounds=1,
            leaves=LEAVES if reduces else None,
            codec=codec,
        ),
        variants=(
            *(
                Variant(transport="auto", layout=layout, loss_fraction=loss)
                for layout in layouts
                for loss in (0.0, 0.01, 0.05)
                if loss == 0.01 or len(set(layout)) > 1
            ),
            Variant(layout="abcd", impairment_seed=2),
            Variant(layout="abcd", paths=1),
            Variant(layout="aaaa"),
            Variant(layout="aaaaaaaa", transport="shm"),
        ),
        goals=_exact(operation),
        short={
            "workload": {"repetitions": 2},
            "variants": (
                Variant(layout="abcd", loss_fraction=0.05),
                Variant(transport="auto", layout="aab"),
                Variant(layout="aa", transport="shm"),
            ),
        },
    )


def _planes() -> list[Scenario]:
    return [
        Scenario(
            name="plane-off",
            title="one of 4 planes drops everything in the middle of an AllReduce, and comes back",
            workload=Workload(duration_s=3.0, rounds=1, timeline=True, timeout_s=20.0),
            faults=(SwitchPlane(plane=1, up=False, at_s=1.0), SwitchPlane(plane=1, up=True, at_s=2.0)),
            goals=(
                *_exact(Operation.ALLREDUCE),
                Goal(measure="longest_stall_ms", at_most=5.0),
                Goal(measure="longest_stall_ms_before"),
                Goal(measure="longest_unsampled_ms"),
                Goal(measure="goodput_after", at_least=0.70),
                Goal(measure="plane_back_ms", at_most=200.0),
            ),
            short={
                "workload": {"size_bytes": 4 * MIB, "duration_s": 1.2},
                "faults": (SwitchPlane(plane=1, up=False, at_s=0.4), SwitchPlane(plane=1, up=True, at_s=0.8)),
            },
        ),
        Scenario(
            name="planes-dead",
            title="three of 4 planes die for good in the middle of an AllReduce",
            workload=Workload(duration_s=2.0, rounds=1, timeline=True, timeout_s=30.0),
            faults=tuple(SwitchPlane(plane=plane, up=False, at_s=0.6) for plane in (1, 2, 3)),
            goals=_exact(Operation.ALLREDUCE),
            short={
                "workload": {"size_bytes": 4 * MIB, "duration_s": 0.8},
                "faults": tuple(SwitchPlane(plane=plane, up=False, at_s=0.3) for plane in (1, 2, 3)),
            },
        ),
    ]


def _peers() -> list[Scenario]:
    died = (
        Goal(measure="results", at_least=1, must=True),
        Goal(measure="wrong_results", at_most=0, must=True),
        Goal(measure="errors_naming_rank", at_least=1, must=True),
        Goal(measure="recovered_ranks", at_least=3, must=True),
        Goal(measure="recovered_within_s", at_most=2.0),
    )
    short = {"workload": {"size_bytes": 1 * MIB}}
    return [
        Scenario(
            name="peer-killed",
            title="one of 4 ranks is killed in the middle of an AllReduce; the others continue without it",
            topology=Topology(hosts=4),
            workload=Workload(size_bytes=16 * MIB, duration_s=30.0, rounds=1, timeout_s=20.0),
            faults=(KillRank(rank=2, at_s=0.5),),
            recovers=True,
            goals=(*died, Goal(measure="error_within_s", at_most=1.0, must=True)),
            short=short,
        ),
        Scenario(
            name="plane-and-peer",
            title="a plane dies, then one of 4 ranks is killed; the others find out over the planes that live",
            topology=Topology(hosts=4),
            workload=Workload(size_bytes=16 * MIB, duration_s=30.0, rounds=1, timeout_s=20.0),
            faults=(SwitchPlane(plane=0, up=False, at_s=0.3), KillRank(rank=2, at_s=0.6)),
            recovers=True,
            goals=(*died, Goal(measure="error_within_s", at_most=1.0, must=True)),
            short=short,
        ),
        Scenario(
            name="peer-silent",
            title="one of 4 ranks is suspended during an AllReduce; the others give it up after 2 s and continue",
            topology=Topology(hosts=4),
            workload=Workload(size_bytes=16 * MIB, duration_s=30.0, rounds=1, timeout_s=2.0),
            faults=(SuspendRank(rank=2, at_s=0.5),),
            recovers=True,
            # The deadline, plus the time a busy machine needs to report it.
            goals=(*died, Goal(measure="error_within_s", at_most=3.0, must=True)),
            short=short,
        ),
        Scenario(
            name="host-off",
            title="one of 4 hosts loses power between small AllReduces; the others give it up within 10 s and continue",
            topology=Topology(hosts=4),
            workload=Workload(size_bytes=4096, duration_s=30.0, rounds=1, timeout_s=60.0),
            faults=(PowerOff(rank=2, at_s=0.5),),
            recovers=True,
            # The peer timeout, plus the time a busy machine needs to report it.
            goals=(*died, Goal(measure="error_within_s", at_most=11.0, must=True)),
            short={"variants": (Variant(peer_timeout_s=1.0),)},
        ),
    ]


def _others() -> list[Scenario]:
    return [
        Scenario(
            name="incast",
            title="7 ranks send to one at once, through a port of 1 Gbit/s with a queue of 512 KiB",
            topology=Topology(hosts=8, planes=1, rate_bits_per_s=10**9, queue_bytes=512 << 10),
            workload=Workload(operation=Operation.INCAST, size_bytes=1 * MIB, repetitions=30, rounds=2),
            goals=(
                *EXACT,
                Goal(measure="queue_drops", at_most=0),
                Goal(measure="p99_over_p50", at_most=1.5),
            ),
            short={"workload": {"size_bytes": 128 << 10, "repetitions": 5}},
        ),
        Scenario(
            name="disorder",
            title="reordering 64 packets deep, 2 % duplicates, 1 % corrupt packets",
            impairment=Impairment(
                reorder_fraction=0.02,
                reorder_depth=64,
                duplicate_fraction=0.02,
                corrupt_fraction=0.01,
                # Switches may change the fifth byte (congestion marks), so the ICRC leaves it out.
                corrupt_skip_bytes=5,
            ),
            beside_calm=True,
            goals=(
                *_exact(Operation.ALLREDUCE),
                Goal(measure="impairment.corrupted", at_least=1, must=True),
                Goal(measure="corrupt_counted", at_least=1, at_most=1, must=True),
            ),
            short={"workload": SHORT_WORKLOAD},
        ),
        Scenario(
            name="same-bits",
            title="an AllReduce of 8 leaves: algorithms, hosts, worlds, loss, paths and ports, the same bits",
            topology=Topology(hosts=8),
            impairment=Impairment(loss_fraction=0.01),
            workload=Workload(size_bytes=LEAF_BYTES, repetitions=10, rounds=1, leaves=LEAVES),
            variants=_same_bits(),
            goals=_exact(Operation.ALLREDUCE),
            short={
                "workload": {"repetitions": 2},
                "variants": (
                    Variant(transport="auto", layout="aaaabbbb", algorithm="hierarchical"),
                    Variant(layout="abcdefgh", algorithm="halving", loss_fraction=0.05),
                    Variant(transport="auto", layout="aab", algorithm="halving"),
                    Variant(layout="abcde", algorithm="dissemination"),
                    Variant(transport="auto", layout="aabbccdd", algorithm="hierarchical", scattered=True),
                ),
            },
        ),
        Scenario(
            name="hostile",
            title="a stranger sends hostile packets to rank 0 during an AllReduce",
            # They are sent as super-packets. One call per packet would be slower than the ranks that it should disturb.
            topology=Topology(strangers=1, per_packet=False),
            hostile=Hostile(packets_per_s=1_000_000),
            beside_calm=True,
            workload=Workload(size_bytes=16 * MIB, duration_s=2.0),
            goals=(
                *_exact(Operation.ALLREDUCE),
                Goal(measure="hostile_sent", at_least=1, must=True),
                Goal(measure="refused_packets", at_least=1, must=True),
                Goal(measure="hostile_packets_per_s"),
                Goal(measure="goodput_kept"),
            ),
            short={"workload": {**SHORT_WORKLOAD, "rounds": 1, "duration_s": 0.3}},
        ),
    ]


def _jobs() -> list[Scenario]:
    return [
        Scenario(
            name="split-networks",
            title="two hosts with a front-end and a back-end network: torchrun, store, samples and checkpoints on "
            "one, collectives on the other",
            topology=Topology(hosts=3, planes=2),
            job=Job(),
            goals=(
                Goal(measure="front_end.rank_packets", at_most=0, must=True),
                Goal(measure="back_end.other_packets", at_most=0, must=True),
                Goal(measure="front_end.other_packets", at_least=1, must=True),
                Goal(measure="back_end.rank_packets", at_least=1, must=True),
                *(Goal(measure=measure) for measure in ("front_end.bytes", "back_end.bytes", "back_end.link_packets")),
                *(Goal(measure=f"{name}_bytes", at_least=1, must=True) for name in ("payload", "record", "checkpoint")),
            ),
            short={"job": {"samples": 4096, "steps": 12}},
        ),
        Scenario(
            name="remote-disk",
            title="two hosts with data and tables on disks of a third, over NVMe/TCP: one is pulled, the same weights",
            topology=Topology(hosts=3, planes=2),
            job=RemoteDisk(),
            goals=(
                Goal(measure="trainings", at_least=3, must=True),
                SAME_BITS,
                Goal(measure="disk.errors_naming_it", at_least=1, must=True),
                Goal(measure="front_end.rank_packets", at_most=0, must=True),
                Goal(measure="back_end.other_packets", at_most=0, must=True),
                Goal(measure="front_end.other_packets", at_least=1, must=True),
                Goal(measure="back_end.rank_packets", at_least=1, must=True),
                Goal(measure="disk.remote_to_local", at_least=0.6),
            ),
            short={"job": {"samples": 8_000, "steps": 16, "checkpoint_every": 5}},
        ),
        Scenario(
            name="rack",
            title="four training hosts with links of 200 Mbit/s, an aggregator and a storage host: each is killed in "
            "turn, the same weights",
            topology=Topology(hosts=6, planes=1, mtu_bytes=1500, per_packet=False),
            job=Rack(),
            goals=(
                Goal(measure="trainings", at_least=2, must=True),
                SAME_BITS,
                Goal(measure="rack.kills", at_least=3, at_most=3, must=True),
                Goal(measure="rack.summed_before", at_least=1, must=True),
                Goal(measure="rack.summed_after", at_least=1, must=True),
                Goal(measure="rack.errors_naming_rank", at_least=1, must=True),
            ),
            short={
                "topology": {"hosts": 4},
                "job": {
                    "steps": 16,
                    "kill_steps": (2, 6, 11),
                    "checkpoint_every": 4,
                    "samples": 2048,
                    "batch_size": 64,
                    "native": True,
                    "ranks_alone": 1,
                },
            },
        ),
        Scenario(
            name="same-bits-training",
            title="training: placements, worlds, ports, loss, a kill and a join in the middle, the same weights",
            topology=Topology(hosts=9, planes=2),
            job=Trainings(runs=product(SHARDINGS, (1, 2, 3, 4, 8), (0.0, 0.01))),
            goals=TRAINED_ALIKE,
            short={
                "topology": {"hosts": 4},
                "job": {
                    "runs": (
                        Training(ranks=1, sharding="table_wise", transport="shm"),
                        Training(ranks=3, sharding="grid", loss_fraction=0.01, changes=True),
                    )
                },
            },
        ),
        Scenario(
            name="same-bits-dynamic",
            title="training of dynamic tables: every three of ranks, placement, network, home of rows, a kill and a "
            "join, a resumption, the same weights",
            topology=Topology(hosts=9, planes=2),
            job=Trainings(runs=dynamic_runs(strength=3), tables="dynamic"),
            goals=TRAINED_ALIKE,
            short={
                "topology": {"hosts": 4},
                "job": {
                    "runs": (
                        Training(ranks=1, sharding="table_wise", transport="shm"),
                        Training(
                            ranks=3, sharding="grid", loss_fraction=0.01, home="files", changes=True, resumes=True
                        ),
                    )
                },
            },
        ),
    ]


def _all() -> dict[str, Scenario]:
    scenarios = [
        _lossless(Operation.ALLREDUCE, 2.5),
        _lossless(Operation.ALLTOALL, 1.5),
        *(_loss(operation, loss) for operation in (Operation.ALLREDUCE, Operation.ALLTOALL) for loss in LOSS_GOALS),
        *_planes(),
        *_peers(),
        *_others(),
        *_jobs(),
        *(
            _coded_bits(codec, operation)
            for codec in ("fp8", "int8")
            for operation in (Operation.ALLREDUCE, Operation.ALLTOALL)
        ),
    ]
    return {scenario.name: scenario for scenario in scenarios}


SCENARIOS: Final = _all()


def choose(names: list[str]) -> list[Scenario]:
    """Returns the scenarios with these names; "all" gives all of them. Raises ValueError with the known names."""
    if "all" in names:
        return list(SCENARIOS.values())
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise ValueError(f"no scenario {', '.join(unknown)}; there are: all, {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in dict.fromkeys(names)]
