# SPDX-License-Identifier: Apache-2.0
"""`sennit bench aggregate`: packets a second that one core sums, in XDP and behind sockets, beside a plain XDP forward.

BPF_PROG_TEST_RUN times XDP without a device. The native aggregator gets its packets over the loopback interface, and
its processor time counts, with that of the kernel below its sockets. All blocks are full: 1,408 bytes.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from sennit.closing import Closing
from sennit.ebpf.compiler import compile_program
from sennit.ebpf.loader import BpfObject
from sennit.offload._native import content_hash
from sennit.offload.framing import LOOPBACK, frame
from sennit.runtime.aggregate.xdp import XdpPrograms
from sennit.runtime.calibrate import machine
from sennit.transport.aggregator import Aggregator

LEAVES: Final = (2, 4, 8, 16)
ARITHMETICS: Final = {"float32": 0, "int32": 1, "bfloat16": 2}
WINDOW: Final = 32
MEMORY_BYTES: Final = 16 << 20
PORT: Final = 4793
BLOCK_BYTES: Final = 1408
# A block on an Ethernet: with the headers of the packet, UDP, IPv6 and Ethernet, its checksum, preamble and gap.
WIRE_BYTES: Final = BLOCK_BYTES + 40 + 8 + 40 + 14 + 4 + 20
KEY: Final = 1
_HEADER: Final = struct.Struct(">HBBIQQIHBB")
_LEAF, _JOIN = 0, 3
# How long the daemon waits for packets that are there already.
_RUN_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians for jobs of one size and arithmetic, in ns of one core for each leaf that arrives."""

    leaves: int
    arithmetic: str
    xdp_ns: float
    forward_ns: float
    native_ns: float

    def as_json(self) -> dict[str, Any]:
        rates = {
            f"{name}_{what}": factor * 1e9 / ns
            for name, ns in (("xdp", self.xdp_ns), ("forward", self.forward_ns), ("native", self.native_ns))
            for what, factor in (("packets_per_s", 1.0), ("gbit_per_s", 8e-9 * WIRE_BYTES))
        }
        return {**asdict(self), **rates}


def run(*, rounds: int, seed: int) -> list[Result]:
    """Measures in turn, so that a disturbance hits all."""
    results = []
    with contextlib.ExitStack() as stack:
        forward = stack.enter_context(BpfObject(compile_program("forward"))).program("forward")
        for leaves in LEAVES:
            for name, arithmetic in ARITHMETICS.items():
                with _Case(leaves, arithmetic, seed) as case:
                    runs = []
                    for number in range(rounds):
                        frames = case.frames(number)
                        passed = statistics.median(forward.test_run(one).duration_ns for one in frames[:64])
                        runs.append((case.xdp_ns(frames), passed, case.native_ns(number)))
                xdp_ns, forward_ns, native_ns = (statistics.median(times) for times in zip(*runs, strict=True))
                results.append(
                    Result(
                        leaves=leaves,
                        arithmetic=name,
                        xdp_ns=xdp_ns,
                        forward_ns=forward_ns,
                        native_ns=native_ns,
                    )
                )
    return results


class _Case(Closing):
    """A job at both aggregators."""

    def __init__(self, leaves: int, arithmetic: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._leaves, self._arithmetic = leaves, arithmetic
        self._content = [random.standard_normal(BLOCK_BYTES // 4).astype(np.float32).tobytes() for _ in range(leaves)]
        self._programs = XdpPrograms(port=PORT, memory_bytes=MEMORY_BYTES)
        self._programs.take_packets_for(LOOPBACK.hardware, ["::1"], is_native=True)
        self._daemon = Aggregator(["::1"], port=0, memory_bytes=MEMORY_BYTES, arena=self._programs.address)
        self._native = Aggregator(["::1"], port=0, memory_bytes=MEMORY_BYTES)
        # Nobody reads the answers. What does not fit into the buffer is dropped behind the aggregator.
        self._rank = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        for aggregator in (self._daemon, self._native):
            self._send(aggregator, [_packet(_JOIN, 0, 0, 0, 0, struct.pack(">HH28x", leaves, WINDOW))])
            aggregator.run(_RUN_S)
        (self._job,), (job,) = self._daemon.jobs(), self._native.jobs()
        if self._job.number != job.number or job.window != WINDOW:
            raise RuntimeError(f"the aggregators gave the job {self._job} and {job}")

    def packets(self, number: int) -> list[bytes]:
        """One window of blocks, a leaf after another of each."""
        return [
            _packet(_LEAF, self._job.number, block, leaf, self._arithmetic, self._content[leaf])
            for block in range(number * WINDOW, (number + 1) * WINDOW)
            for leaf in range(self._leaves)
        ]

    def frames(self, number: int) -> list[bytes]:
        return [frame(packet, PORT) for packet in self.packets(number)]

    def xdp_ns(self, frames: list[bytes]) -> float:
        """The median of leaves that are stored and of those that complete a block, as many as there are of each."""
        before = self._programs.counters()["stored"]
        times = np.array([self._programs.program.test_run(one).duration_ns for one in frames])
        stored = self._programs.counters()["stored"] - before
        if stored != WINDOW * (self._leaves - 1):
            raise RuntimeError(f"the program stored {stored} leaves of {len(frames)}")
        of_a_block = np.median(times.reshape(WINDOW, self._leaves), axis=0)
        return float(of_a_block.mean())

    def native_ns(self, number: int) -> float:
        packets = self.packets(number)
        before = self._native.counters()["completed"]
        spent_ns = 0
        # As many at once as a receive buffer of any system has room for.
        for at in range(0, len(packets), 2 * LEAVES[-1]):
            self._send(self._native, packets[at : at + 2 * LEAVES[-1]])
            begun_ns = time.thread_time_ns()
            self._native.run(_RUN_S)
            spent_ns += time.thread_time_ns() - begun_ns
        completed = self._native.counters()["completed"] - before
        if completed != WINDOW:
            raise RuntimeError(f"the native aggregator completed {completed} blocks of {WINDOW}")
        return spent_ns / len(packets)

    def _send(self, aggregator: Aggregator, packets: list[bytes]) -> None:
        for packet in packets:
            self._rank.sendto(packet, ("::1", aggregator.port))

    def close(self) -> None:
        self._rank.close()
        self._programs.close()


def _packet(kind: int, job: int, block: int, leaf: int, arithmetic: int, stripes: bytes) -> bytes:
    """docs/reference/aggregation.md."""
    head = _HEADER.pack(0x5E18, 1, kind, job, KEY, block, 0, leaf, arithmetic, len(stripes) // 32)
    return head + content_hash(head + stripes).to_bytes(8, "big") + stripes


def render(results: list[Result], console: Console) -> None:
    table = Table(
        "leaves", "arithmetic", "XDP ns a leaf", "forward ns", "sockets ns", "XDP Mpps", "Gbit/s", "sockets Mpps"
    )
    for result in results:
        table.add_row(
            str(result.leaves),
            result.arithmetic,
            f"{result.xdp_ns:,.0f}",
            f"{result.forward_ns:,.0f}",
            f"{result.native_ns:,.0f}",
            f"{1e3 / result.xdp_ns:.3f}",
            f"{8 * WIRE_BYTES / result.xdp_ns:.2f}",
            f"{1e3 / result.native_ns:.3f}",
        )
    console.print(table)


def as_json(results: list[Result]) -> dict[str, Any]:
    return {"machine": machine.describe(), "results": [result.as_json() for result in results]}
