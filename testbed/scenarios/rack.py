# SPDX-License-Identifier: Apache-2.0
"""Plays a training run in a rack whose aggregator, storage and one rank are killed in turn, beside one left alone.

The storage host has the data set and sends its samples on request (`sennit feed`). An aggregator or storage host that
was killed comes back at once, as a service manager would start it again. When a rank is killed, the others say whose
death they saw and end, and a launcher starts all of them again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sennit.testbed.scenarios.cast import Cast, anybody
from sennit.testbed.scenarios.model import Rack
from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.topology import Planes
from sennit.testbed.topology.namespace import enter
from sennit.testbed.topology.traffic import all_interface_bytes
from sennit.transport import counters
from sennit.transport.aggregator import COUNTER_GROUP

PLANE: Final = 0
AGGREGATOR_PORT, INGEST_PORT, STORE_PORT = 4793, 4800, 29400
QUEUE_BYTES: Final = 1 << 20
# Dense layers whose gradients are some dozens of packets.
MODEL: Final = ("--dim=8", "--bottom=64", "--top=128,64", "--slices=8")
SAMPLE_S: Final = 0.05
# When, and by port: bytes from its host, and to it.
Look = tuple[float, dict[str, tuple[int, int]]]
# What happened, to which host ("": to all), and when.
Event = tuple[str, str, float]
TRAINER: Final = "sennit.testbed.scenarios.mortal_trainer"


@dataclass(kw_only=True)
class Seen:
    """What both runs gave."""

    digests: list[str] = field(default_factory=list)
    """SHA-256 of the weights: of the run left alone, and of the other one."""
    measures: dict[str, float] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)
    """Bytes a second of each host's link over the time of the other run, and who was killed when."""


def play(rack: Rack, planes: Planes, folder: Path, say: Callable[[str], None]) -> Seen:
    """Both runs, with their logs below `folder`. Raises RankError if a process fails, or at the deadline."""
    seen = Seen()
    planes.limit_rate(rack.rate_mbit * 10**6, queue_bytes=QUEUE_BYTES, hosts=range(planes.hosts - 2))
    for name in ("alone", "disturbed"):
        say(f"the run {name}")
        place = folder / name
        place.mkdir()
        with Cast(planes, place, timeout_s=rack.timeout_s) as cast, _sampled(planes) as links:
            hosts = _Hosts(rack, planes, place, cast)
            if name == "alone":
                seen.digests.append(_left_alone(hosts))
                continue
            began_s = time.monotonic()
            seen.digests.append(_disturbed(hosts, seen.measures))
            seen.series = rates_of(links.looks, began_s, hosts.names, hosts.events)
    seen.measures |= {
        "trainings": len(seen.digests),
        "distinct_digests": len(set(seen.digests)),
        "rack.kills": sum(name.startswith("killed") for name, _, _ in seen.series["events"]),
    }
    return seen


def _left_alone(hosts: _Hosts) -> str:
    hosts.start_aggregator()
    hosts.start_storage()
    hosts.start_ranks({}, count=hosts.rack.ranks_alone)
    return hosts.ended()


def _disturbed(hosts: _Hosts, measures: dict[str, float]) -> str:
    rack, folder = hosts.rack, hosts.folder
    marks = {who: folder / f"{who}-falls" for who in ("aggregator", "storage")}
    died = folder / "died"
    plan = {
        "MARKS": json.dumps([[step, str(marks[who])] for who, step in zip(marks, rack.kill_steps, strict=False)]),
        "DEATHS": json.dumps([[rack.victim, rack.kill_steps[2], str(died)]]),
    }
    hosts.start_aggregator()
    hosts.start_storage()
    hosts.start_ranks(plan)
    hosts.cast.wait_until(marks["aggregator"].exists, "the aggregator's end does not come")
    # The page is written every half second.
    hosts.cast.wait_until(lambda: hosts.summed() > 0, "the aggregator sums nothing")
    measures["rack.summed_before"] = hosts.summed()
    hosts.kill("aggregator")
    marks["aggregator"].unlink()
    hosts.start_aggregator()
    hosts.cast.wait_until(marks["storage"].exists, "the storage's end does not come")
    hosts.kill("storage")
    marks["storage"].unlink()
    hosts.start_storage()
    hosts.cast.wait_until(died.exists, "the rank's end does not come", may_fail=anybody)
    hosts.note(f"killed rank {rack.victim}", f"rank {rack.victim}")
    survivors = hosts.survivors()
    measures["rack.errors_naming_rank"] = sum(f"rank {rack.victim} " in log for log in survivors) / len(survivors)
    hosts.kill("storage", noted=False)
    hosts.start_storage()
    hosts.start_ranks({}, "--resume")
    hosts.note("all start again", "")
    digest = hosts.ended()
    measures["rack.summed_after"] = hosts.summed()
    return digest


class _Hosts:
    """The processes of one run, each on a host of its own."""

    def __init__(self, rack: Rack, planes: Planes, folder: Path, cast: Cast) -> None:
        self.rack, self.folder, self.cast = rack, folder, cast
        self.events: list[Event] = []
        self._planes = planes
        self._ranks = planes.hosts - 2
        self._addresses = [planes.ipv4_addresses(host)[PLANE] for host in range(planes.hosts)]
        self.names = [*(f"rank {rank}" for rank in range(self._ranks)), "aggregator", "storage"]

    def start_aggregator(self) -> None:
        where = ["--native"] if self.rack.native else self._planes.interfaces(self._ranks)[:1]
        self.cast.fork("aggregator", self._ranks, "sennit", ["aggregate", *where, f"--port={AGGREGATOR_PORT}"], {})
        self.cast.wait_until(lambda: "ready: " in self.cast.said("aggregator"), "no aggregator", may_fail=anybody)

    def start_storage(self) -> None:
        source = ["--data=synthetic", f"--samples={self.rack.samples}", "--row-limit=1000"]
        to = f"--to={self._addresses[0]}:{INGEST_PORT}"
        options = ["feed", *source, to, f"--timeout={self.rack.timeout_s:g}"]
        self.cast.fork("storage", self._ranks + 1, "sennit", options, {})

    def start_ranks(self, plan: dict[str, str], *options: str, count: int | None = None) -> None:
        rack, world = self.rack, self._ranks if count is None else count
        for rank in range(world):
            arguments = [
                *MODEL, f"--ingest=cpu://{self._addresses[rank]}:{INGEST_PORT}", f"--batch-size={rack.batch_size}",
                f"--steps={rack.steps}", "--epochs=1000", f"--checkpoint={self.folder / 'checkpoints'}",
                f"--checkpoint-every={rack.checkpoint_every}", f"--json={self.folder / 'report.json'}",
                f"--timeout={rack.timeout_s:g}", *options,
            ]  # fmt: skip
            variables = self._planes.environment(rank) | plan | {
                "RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_RANK": "0",
                "MASTER_ADDR": self._addresses[0], "MASTER_PORT": f"{STORE_PORT}",
                "SENNIT_AGGREGATOR": f"{self._addresses[self._ranks]}:{AGGREGATOR_PORT}",
                "SENNIT_ALGORITHM": "aggregate",
            }  # fmt: skip
            self.cast.fork(f"rank {rank}", rank, TRAINER, arguments, variables)

    def kill(self, name: str, *, noted: bool = True) -> None:
        self.cast.kill(name)
        if noted:
            self.note(f"killed {name}", name)

    def note(self, what: str, host: str) -> None:
        self.events.append((what, host, time.monotonic()))

    def summed(self) -> int:
        """Blocks that the aggregator has summed, as its page of counters says."""
        process = self.cast.pid("aggregator")
        return sum(
            page.total(COUNTER_GROUP, f"{COUNTER_GROUP}_completed")
            for page in counters.pages()
            if page.process == process
        )

    def survivors(self) -> list[str]:
        """Waits until all ranks have ended, the dead one too. Returns what the others said."""
        self.cast.wait_until(lambda: None not in self._codes_of_ranks(), "ranks do not end", may_fail=anybody)
        for rank in range(self._ranks):
            self.cast.kill(f"rank {rank}")
        return [self.cast.said(f"rank {rank}") for rank in range(self._ranks) if rank != self.rack.victim]

    def ended(self) -> str:
        """Waits until all ranks have ended well. Returns the digest of their weights."""
        self.cast.wait_until(lambda: set(self._codes_of_ranks()) == {0}, "no end")
        report = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        if report["steps"]["last"] != self.rack.steps:
            raise RankError(f"{report['steps']['last']} steps, not {self.rack.steps}")
        return str(report["weights_sha256"])

    def _codes_of_ranks(self) -> list[int | None]:
        return [code for name, code in self.cast.codes().items() if name.startswith("rank")]


def rates_of(looks: Sequence[Look], began_s: float, names: Sequence[str], events: Sequence[Event]) -> dict[str, Any]:
    """Bytes a second that each host has sent and received, between two looks; times since `began_s`."""
    pairs = list(itertools.pairwise(looks))
    links: dict[str, dict[str, list[float]]] = {}
    for host, name in enumerate(names):
        port = f"p{PLANE}h{host}"
        for direction, way in enumerate(("sent", "received")):
            links.setdefault(name, {})[way] = [
                (after[port][direction] - before[port][direction]) / (after_s - before_s)
                for (before_s, before), (after_s, after) in pairs
            ]
    return {
        "times_s": [after_s - began_s for _, (after_s, _) in pairs],
        "links": links,
        "events": [[what, host, at_s - began_s] for what, host, at_s in events],
    }


class _Links:
    """Bytes at the switch's ports, looked at every `SAMPLE_S`."""

    def __init__(self, switch: str) -> None:
        self.looks: list[Look] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(switch,), name="links", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self, switch: str) -> None:
        enter(switch)
        while not self._ends.wait(SAMPLE_S):
            self.looks.append((time.monotonic(), all_interface_bytes()))


@contextlib.contextmanager
def _sampled(planes: Planes) -> Iterator[_Links]:
    links = _Links(planes.switch_name)
    try:
        yield links
    finally:
        links.end()
