# SPDX-License-Identifier: Apache-2.0
"""Plays one scenario: topology, ranks, impairments and faults in turn. Returns observations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sennit.doctor import capabilities
from sennit.testbed.scenarios import kernel_packets, rack, remote_disk, split_networks, training_runs
from sennit.testbed.scenarios.counters import difference, total
from sennit.testbed.scenarios.model import (
    NO_IMPAIRMENT,
    KillRank,
    Library,
    PowerOff,
    Rack,
    RemoteDisk,
    Scenario,
    SuspendRank,
    SwitchPlane,
    Variant,
)
from sennit.testbed.scenarios.ranks import Answer, Event, RankError, Ranks
from sennit.testbed.scenarios.trainings import Trainings
from sennit.testbed.topology import Direction, Impairer, Planes

# A busy machine generates a payload, or checks a result, within this time.
PREPARE_TIMEOUT_S: Final = 60.0
COUNTERS_TIMEOUT_S: Final = 10.0
HOSTILE_TIMEOUT_S: Final = 10.0
SETTLE_TIMEOUT_S: Final = 10.0
# Nothing comes to rest after a fault: ranks ask those that are silent, and try planes that are off.
FAULT_SETTLE_TIMEOUT_S: Final = 1.0
RECONFIGURE_TIMEOUT_S: Final = 20.0
# Bytes of each packet in the capture: enough to see the protocol, few enough to open.
CAPTURE_SIZE_BYTES: Final = 256 << 10
# dumpcap writes twice a second. Packets after the last write before its end are lost.
CAPTURE_TIMEOUT_S: Final = 3.0
CAPTURE_LOOK_S: Final = 0.02
CAPTURE_HEADER_BYTES: Final = 24

# Counters of the impairment, of the limited queues, of each rank, and of the ranks' kernels.
_Counters = tuple[dict[str, int], dict[str, int], list[dict[str, int]], dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One library's repetitions under one condition."""

    library: Library
    disturbed: bool
    variant: Variant
    round: int
    answers: list[Answer]
    """Answers by rank; empty for a rank that a fault silenced."""
    events: list[tuple[str, float]]
    """Faults with their monotonic time."""
    impairment_counters: dict[str, int]
    """What the impairment did during the run, summed over hosts and planes."""
    queue_counters: dict[str, int]
    """What the queues of the limited ports did during the run; empty without a limit."""
    rank_counters: list[dict[str, int]]
    """What each rank of sennit counted during the run."""
    kernel_losses: dict[str, int] = field(default_factory=dict)
    """UDP packets that the ranks' kernels dropped during the run (`kernel_packets.LOSSES`), summed over hosts."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How the survivors of a death continued."""

    reconfigured: list[Answer]
    """For each survivor: when it began and finished to reconfigure, its new rank and world size."""
    answers: list[Answer]
    """Results of the collective that followed."""


@dataclass(kw_only=True)
class Observations:
    """All observations of one case."""

    scenario: Scenario
    seed: int
    runs: list[Run] = field(default_factory=list)
    recovery: Recovery | None = None
    hostile_sent: dict[str, int] = field(default_factory=dict)
    """Junk packets by kind."""
    hostile_s: float = 0.0
    """Seconds that sending them took."""
    networks: Mapping[str, float] = field(default_factory=dict)
    """What a job's networks carried (`split_networks.py`, `remote_disk.py`)."""
    trainings: list[training_runs.Ended] = field(default_factory=list)
    rack: rack.Seen | None = None
    descriptions: list[str] = field(default_factory=list)
    """Each rank's description of itself at the end."""
    log_tails: dict[str, str] = field(default_factory=dict)


def play(
    scenario: Scenario, *, impairer: Impairer, seed: int, folder: Path, say: Callable[[str], None]
) -> Observations:
    """Runs the scenario with its logs below `folder`, which is empty. Calls `say` with progress messages."""
    seen = Observations(scenario=scenario, seed=seed)
    topology = scenario.topology
    say("topology")
    with Planes(
        hosts=topology.hosts + topology.strangers,
        planes=topology.planes,
        mtu=topology.mtu_bytes,
        per_packet=topology.per_packet,
        impairer=impairer,
    ) as planes:
        if isinstance(scenario.job, Trainings):
            seen.trainings = training_runs.play(scenario.job, planes, folder, seed=seed, say=say)
            return seen
        if isinstance(scenario.job, Rack):
            seen.rack = rack.play(scenario.job, planes, folder, say)
            return seen
        if isinstance(scenario.job, RemoteDisk):
            seen.networks = remote_disk.play(scenario.job, planes, folder, say)
            return seen
        if scenario.job is not None:
            say("training")
            seen.networks = split_networks.play(scenario.job, planes, folder)
            return seen
        if topology.rate_bits_per_s is not None:
            planes.limit_rate(
                topology.rate_bits_per_s, queue_bytes=topology.queue_bytes, hosts=[0], direction=Direction.RECEIVE
            )
        for index, variant in enumerate(scenario.variants):
            place = folder / f"variant{index}" if len(scenario.variants) > 1 else folder
            place.mkdir(exist_ok=True)
            # Peers that do not vary run once.
            libraries = scenario.libraries if index == 0 else (Library.SENNIT,)
            _Stage(scenario, seen, planes, variant, libraries, place, say).play(capture=index == 0)
    return seen


class _Stage:
    """Plays one variant of a scenario on planes that are up."""

    def __init__(
        self,
        scenario: Scenario,
        seen: Observations,
        planes: Planes,
        variant: Variant,
        libraries: Sequence[Library],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._scenario = scenario
        self._seen = seen
        self._planes = planes
        self._variant = variant
        self._libraries = libraries
        self._folder = folder
        self._say = say

    def play(self, *, capture: bool) -> None:
        with contextlib.ExitStack() as stack:
            crews: dict[Library, Ranks] = {}
            for library in self._libraries:
                self._say(f"{library}: starting ranks")
                crews[library] = stack.enter_context(
                    Ranks(
                        self._planes,
                        library=library,
                        world=len(self._variant.layout) or self._scenario.topology.hosts,
                        variant=self._variant,
                        timeout_s=self._scenario.workload.timeout_s,
                        folder=self._folder,
                    )
                )
            try:
                self._rehearse(crews, capture)
                self._rounds(crews)
                if self._scenario.recovers:
                    self._recover(crews[Library.SENNIT])
                victims = self._scenario.victims()
                for crew in crews.values():
                    answers = crew.ask({"do": "counters"}, timeout_s=COUNTERS_TIMEOUT_S, silent=victims)
                    self._seen.descriptions += [answer["describe"] for answer in answers if answer]
                if not victims:
                    for crew in crews.values():
                        crew.stop()
            finally:
                for crew in crews.values():
                    self._seen.log_tails |= {
                        f"{self._folder.name}/{name}": tail for name, tail in crew.log_tails().items() if tail
                    }

    def _rehearse(self, crews: dict[Library, Ranks], capture: bool) -> None:
        """One small repetition of each library, with the impairment, into the capture; then the real payload once."""
        workload = self._scenario.workload
        capture = capture and capabilities.missing("dumpcap") is None
        with self._impaired(self._variant.impairment_seed) if capture else contextlib.nullcontext():
            for library, crew in crews.items():
                path = self._folder / f"{library}.pcap"
                self._say(f"{library}: capture")
                self._prepare(crew, min(CAPTURE_SIZE_BYTES, workload.size_bytes))
                with self._planes.capture(0, 0, path) if capture else contextlib.nullcontext():
                    self._repeat(crew, repetitions=1)
                    if capture:
                        _wait_for_packets(path)
        for library, crew in crews.items():
            self._say(f"{library}: warm-up")
            self._prepare(crew, workload.size_bytes)
            self._repeat(crew, repetitions=1)

    def _rounds(self, crews: dict[Library, Ranks]) -> None:
        workload = self._scenario.workload
        conditions = [False, True] if self._scenario.beside_calm else [True]
        for round_ in range(workload.rounds):
            for disturbed in conditions:
                seed = self._variant.impairment_seed + round_
                with self._disturbance(seed) if disturbed else contextlib.nullcontext():
                    for library, crew in crews.items():
                        condition = "disturbed" if disturbed else "calm"
                        self._say(f"{library}: {condition}, round {round_ + 1} of {workload.rounds}")
                        self._measure(crew, round_, disturbed)

    def _measure(self, crew: Ranks, round_: int, disturbed: bool) -> None:
        workload = self._scenario.workload
        before, queued_before, counted_before, lost_before = self._settled_counters(crew)
        answers = self._repeat(
            crew,
            repetitions=workload.repetitions,
            duration_s=workload.duration_s,
            timeline=workload.timeline,
            events=self._events(crew) if disturbed else (),
        )
        after, queued_after, counted_after, lost_after = self._settled_counters(crew)
        self._seen.runs.append(
            Run(
                library=crew.library,
                disturbed=disturbed,
                variant=self._variant,
                round=round_,
                answers=answers,
                events=list(crew.happened),
                impairment_counters=difference(after, before),
                queue_counters=difference(queued_after, queued_before),
                rank_counters=[difference(*counters) for counters in zip(counted_after, counted_before, strict=True)],
                kernel_losses=difference(lost_after, lost_before),
            )
        )

    def _recover(self, crew: Ranks) -> None:
        """The survivors make a new group, and each checks one result of it."""
        workload, victims = self._scenario.workload, self._scenario.victims()
        self._say(f"{crew.library}: reconfigure")
        command: dict[str, Any] = {"do": "reconfigure", "timeout_s": RECONFIGURE_TIMEOUT_S}
        reconfigured = crew.ask(command, timeout_s=2 * RECONFIGURE_TIMEOUT_S, silent=victims)
        self._prepare(crew, workload.size_bytes)
        answers = self._repeat(crew, repetitions=1)
        self._seen.recovery = Recovery(
            reconfigured=[answer for answer in reconfigured if answer], answers=[answer for answer in answers if answer]
        )

    def _repeat(
        self,
        crew: Ranks,
        *,
        repetitions: int,
        duration_s: float = 0.0,
        timeline: bool = False,
        events: Sequence[Event] = (),
    ) -> list[Answer]:
        # Every repetition may use its whole deadline, and is checked.
        limit_s = repetitions * self._scenario.workload.timeout_s + duration_s + PREPARE_TIMEOUT_S
        command = {"do": "run", "repetitions": repetitions, "duration_s": duration_s, "timeline": timeline}
        silent = self._scenario.victims() if events or crew.happened else ()
        return crew.ask(command, timeout_s=limit_s, events=events, silent=silent)

    def _prepare(self, crew: Ranks, size_bytes: int) -> None:
        workload = self._scenario.workload
        command = {"do": "prepare", "operation": workload.operation, "size_bytes": size_bytes, "seed": self._seen.seed}
        if workload.leaves is not None:
            command |= {"leaves": workload.leaves, "scattered": self._variant.scattered}
        if workload.codec is not None:
            command |= {"codec": workload.codec}
        silent = self._silent(crew)
        crew.ask(command, timeout_s=PREPARE_TIMEOUT_S, silent=silent)

    def _events(self, crew: Ranks) -> list[Event]:
        events: list[Event] = []
        for fault in self._scenario.faults:
            match fault:
                case SwitchPlane(plane=plane, up=up, at_s=at_s):
                    name = f"plane {plane} {'up' if up else 'down'}"
                    events.append(Event(at_s, name, functools.partial(self._planes.switch, plane, up=up)))
                case KillRank(rank=rank, at_s=at_s):
                    events.append(Event(at_s, f"rank {rank} killed", functools.partial(crew.kill, rank)))
                case SuspendRank(rank=rank, at_s=at_s):
                    events.append(Event(at_s, f"rank {rank} silent", functools.partial(crew.suspend, rank)))
                case PowerOff(rank=rank, at_s=at_s):
                    events.append(Event(at_s, f"host {rank} off", functools.partial(self._power_off, crew, rank)))
        return events

    def _power_off(self, crew: Ranks, rank: int) -> None:
        self._planes.unplug(rank)
        crew.suspend(rank)

    @contextlib.contextmanager
    def _disturbance(self, seed: int) -> Iterator[None]:
        """Applies the impairment and runs the hostile sender while the block runs."""
        hostile = self._scenario.hostile
        with (
            self._impaired(seed),
            contextlib.nullcontext() if hostile is None else self._hostile_sender(hostile.packets_per_s, seed),
        ):
            yield

    @contextlib.contextmanager
    def _impaired(self, seed: int) -> Iterator[None]:
        impairment = self._scenario.impairment
        if self._variant.loss_fraction is not None:
            impairment = dataclasses.replace(impairment, loss_fraction=self._variant.loss_fraction)
        if impairment != NO_IMPAIRMENT:
            self._planes.impair(dataclasses.replace(impairment, seed=seed))
        try:
            yield
        finally:
            if impairment != NO_IMPAIRMENT:
                self._planes.impair(NO_IMPAIRMENT)

    @contextlib.contextmanager
    def _hostile_sender(self, packets_per_s: int, seed: int) -> Iterator[None]:
        stranger = self._scenario.topology.hosts
        command = [sys.executable, "-m", "sennit.testbed.scenarios.hostile"]
        ends = [",".join(map(str, self._planes.addresses(host))) for host in (stranger, 0)]
        with (self._folder / "hostile.log").open("ab") as log:
            process = self._planes.popen(
                stranger,
                [*command, *ends, str(packets_per_s), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], HOSTILE_TIMEOUT_S)[0] or not process.stdout.readline():
                raise RankError(f"the hostile sender did not begin; see {log.name}")
            yield
            # Closing its stdin tells it to stop.
            output, _ = process.communicate(timeout=HOSTILE_TIMEOUT_S)
            if process.returncode:
                raise RankError(f"the hostile sender ended with status {process.returncode}; see {log.name}")
        finally:
            process.kill()
            process.wait()
        said = json.loads(output)
        self._seen.hostile_s += said["seconds"]
        for kind, count in said["sent"].items():
            self._seen.hostile_sent[kind] = self._seen.hostile_sent.get(kind, 0) + count

    def _settled_counters(self, crew: Ranks) -> _Counters:
        """Returns what the impairment, the limited queues, the ranks and their kernels have counted, once nothing is in
        flight.

        The last acknowledgements are still in flight when a collective is done. Without the wait, one end would have
        counted a packet that the other end has not.
        """
        timeout_s = FAULT_SETTLE_TIMEOUT_S if crew.happened else SETTLE_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        now = self._counters(crew)
        while time.monotonic() < deadline_s:
            previous = now
            # Between the two looks, so that what was read last is counted at the second.
            is_empty = not crew.unread_bytes(self._silent(crew)) and not kernel_packets.backlog_packets()
            now = self._counters(crew)
            if is_empty and now == previous:
                break
        return now

    def _counters(self, crew: Ranks) -> _Counters:
        lost = crew.lost_by_kernel(self._silent(crew))
        return self._impairment_counters(), self._queue_counters(), self._rank_counters(crew), lost

    def _silent(self, crew: Ranks) -> Collection[int]:
        return self._scenario.victims() if crew.happened else ()

    def _queue_counters(self) -> dict[str, int]:
        topology = self._scenario.topology
        if topology.rate_bits_per_s is None:
            return {}
        return total(
            dataclasses.asdict(self._planes.queue_counters(0, plane, Direction.RECEIVE))
            for plane in range(topology.planes)
        )

    def _impairment_counters(self) -> dict[str, int]:
        topology = self._scenario.topology
        read = self._planes.counters if self._planes.impairer is Impairer.BPF else self._planes.netem_counters
        return total(
            dataclasses.asdict(read(host, plane)) for host in range(topology.hosts) for plane in range(topology.planes)
        )

    def _rank_counters(self, crew: Ranks) -> list[dict[str, int]]:
        answers = crew.ask({"do": "counters"}, timeout_s=COUNTERS_TIMEOUT_S, silent=self._silent(crew))
        return [answer.get("counters", {}) for answer in answers]


def _wait_for_packets(capture: Path) -> None:
    """Waits until the file has packets. A capture is for people to look at, so an empty one is no failure."""
    deadline_s = time.monotonic() + CAPTURE_TIMEOUT_S
    while capture.stat().st_size <= CAPTURE_HEADER_BYTES and time.monotonic() < deadline_s:
        time.sleep(CAPTURE_LOOK_S)
