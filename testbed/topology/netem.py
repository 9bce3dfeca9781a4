# SPDX-License-Identifier: Apache-2.0
"""The settings of a host's netem queue for tc (tc-netem(8)), and the queue's counters."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sennit.testbed.topology.impairment import Impairment
from sennit.testbed.topology.rate_limit import ETHERNET_HEADER_BYTES

COMMAND_TIMEOUT_S: Final = 20.0
NO_IMPAIRMENT: Final = Impairment()
# Packets that a queue without a rate may hold. netem's own default of 1,000 would lose packets that are only delayed.
LIMIT_PACKETS: Final = 100_000
# netem reorders by sending some packets at once while others are delayed. Without a delay nothing is reordered.
REORDER_DELAY_US: Final = 1_000
# Delayed packets no longer count for their sender's socket buffer.
ORPHAN_DELAY_US: Final = 1


@dataclass(frozen=True, kw_only=True)
class NetemCounters:
    """What a host's netem queue has done since it was made.

    It does not count what it duplicates, corrupts, reorders and marks.
    """

    packets: int
    """Packets that left it: a super-packet counts as its packets, a duplicate twice."""

    bytes: int

    dropped: int
    """Dropped by chance or for lack of room."""

    waiting: int
    """Packets in the queue now."""


@dataclass(frozen=True, kw_only=True)
class NetemQueue:
    """The settings of one queue: of one host on one plane."""

    mtu_bytes: int
    impairment: Impairment = NO_IMPAIRMENT
    delay_us: int = 0
    is_orphaning: bool = False
    bits_per_s: int | None = None
    queue_bytes: int = 0
    """Packets that wait for the rate, in full frames."""

    def words(self, *, seed: int | None) -> list[str]:
        """The arguments after `netem`. With `seed` None, this tc does not support seeds."""
        asked = self.impairment
        delay_us = self.delay_us
        if asked.reorder_fraction:
            delay_us = max(delay_us, REORDER_DELAY_US)
        elif self.is_orphaning:
            delay_us = max(delay_us, ORPHAN_DELAY_US)
        limit = LIMIT_PACKETS
        if self.bits_per_s is not None:
            frame_bytes = self.mtu_bytes + ETHERNET_HEADER_BYTES
            under_way_bytes = self.bits_per_s * delay_us // 8_000_000
            limit = -(-(self.queue_bytes + under_way_bytes) // frame_bytes)
        words = ["limit", f"{limit}"]
        if delay_us:
            words += ["delay", f"{delay_us}us"]
        if asked.ecn_fraction:
            words += ["loss", "random", _percent(asked.ecn_fraction), "ecn"]
        elif asked.loss_fraction:
            words += ["loss", "random", _percent(asked.loss_fraction)]
        if asked.corrupt_fraction:
            words += ["corrupt", _percent(asked.corrupt_fraction)]
        if asked.duplicate_fraction:
            words += ["duplicate", _percent(asked.duplicate_fraction)]
        if asked.reorder_fraction:
            words += ["reorder", _percent(asked.reorder_fraction)]
        if self.bits_per_s is not None:
            words += ["rate", f"{self.bits_per_s}bit"]
        return words if seed is None else [*words, "seed", f"{seed}"]

    def with_(self, **changes: Any) -> NetemQueue:
        return replace(self, **changes)


def why_not(impairment: Impairment) -> str | None:
    """Returns what netem cannot do of this impairment; None if it can do all."""
    if impairment.ecn_fraction and impairment.loss_fraction:
        return "netem marks packets instead of dropping them, and so does one or the other"
    if impairment.corrupt_skip_bytes:
        return "netem changes any byte of a frame, its headers included: it has no corrupt_skip_bytes"
    return None


def batch_line(interface: str, words: Sequence[str]) -> str:
    """A line for `tc -batch`: creates the queue, or changes it and keeps its counters."""
    return " ".join(["qdisc", "replace", "dev", interface, "root", "handle", "1:", "netem", *words])


def run_batch(program: str, netns: str, lines: Sequence[str]) -> None:
    """Runs tc or bridge, both of iproute2, with one command per line."""
    done = subprocess.run(
        [program, "-n", netns, "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} in {netns}: {done.stderr.strip()}; told: {'; '.join(lines)}")


def read_counters(netns: str, interface: str) -> NetemCounters:
    """All zero if the interface has no netem."""
    done = subprocess.run(
        ["tc", "-n", netns, "-s", "-j", "qdisc", "show", "dev", interface],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=True,
    )
    return parse_counters(done.stdout)


def parse_counters(shown: str) -> NetemCounters:
    """Reads the output of `tc -s -j qdisc show`."""
    for queue in json.loads(shown):
        if queue["kind"] == "netem":
            return NetemCounters(
                packets=queue["packets"], bytes=queue["bytes"], dropped=queue["drops"], waiting=queue["qlen"]
            )
    return NetemCounters(packets=0, bytes=0, dropped=0, waiting=0)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.10g}%"
