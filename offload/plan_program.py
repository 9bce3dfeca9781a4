# SPDX-License-Identifier: Apache-2.0
"""The BPF program of a plan: generated, compiled and loaded, at no interface yet."""

from __future__ import annotations

import errno
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.compiler import CompileError, compile_source
from sennit.ebpf.kernel_features import missing_privileges
from sennit.ebpf.library import BpfError
from sennit.ebpf.loader import BpfObject
from sennit.offload.batches import BatchLayout
from sennit.offload.errors import NotOffloadable, PlanError, TargetUnavailable
from sennit.offload.framing import ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_BYTES, Ends
from sennit.offload.operators import Cross, cpu_ns_per_record
from sennit.offload.plan import Graph
from sennit.offload.xdp_sketch import SlotSketches
from sennit.offload.xdp_source import generate

RING: Final = "ring"
PROGRAM: Final = "feed"
# 26 lists, shortened and hashed, have 29 kB. clang took more than 10 s of a processor for 1.6 MB.
SOURCE_MAX_BYTES: Final = 1 << 18


class PlanProgram(Closing):
    """A loaded program. It takes no packet before `receive_at` has said for which addresses."""

    def __init__(
        self,
        layout: BatchLayout,
        *,
        session: int,
        udp_port: int,
        sketches: SlotSketches | None,
        fragments: bool = False,
        repeatable: bool = False,
        arena_address: int | None = None,
    ) -> None:
        """`arena_address`: another process maps the arena, there.

        Raises PlanError, NotOffloadable, TargetUnavailable or BpfError.
        """
        self.source = generate(layout, sketches=sketches, fragments=fragments, repeatable=repeatable)
        if len(self.source.text) > SOURCE_MAX_BYTES:
            raise PlanError(f"a program of {len(self.source.text)} bytes in C; allowed: {SOURCE_MAX_BYTES}")
        try:
            self.object = BpfObject(
                compile_source(PROGRAM, self.source.text),
                read_only={"settings": (session, udp_port, 0), **self.source.tables},
                arenas={RING: layout.ring_bytes + (sketches.size_bytes if sketches else 0)},
                arena_addresses={} if arena_address is None else {RING: arena_address},
                xdp_fragments=fragments,
            )
        except CompileError as error:
            raise TargetUnavailable(f"xdp: {error}; the target cpu needs no compiler") from error
        except BpfError as error:
            raise _explained(error, layout) from error

    def receive_at(self, destination: Ends) -> None:
        """Takes packets for these addresses only."""
        address = destination.address
        kind = ETHERTYPE_IPV4 if len(address) == IPV4_BYTES else ETHERTYPE_IPV6
        self.object.write_variable("own", destination.hardware + kind.to_bytes(2, "big") + address.ljust(16, b"\0"))

    def close(self) -> None:
        self.object.close()


def _work(graph: Graph, column: str) -> tuple[bool, float]:
    """Nested loops first: the verifier spends most time on them."""
    operator = graph.columns[column]
    return isinstance(operator, Cross), cpu_ns_per_record(operator, graph.types[column])


def _explained(error: BpfError, layout: BatchLayout) -> Exception:
    """What the user can do about it, if known."""
    lacking = missing_privileges()
    if error.errno in (errno.EPERM, errno.EACCES) and lacking:
        return TargetUnavailable(f"xdp: this process lacks {', '.join(lacking)}; the target cpu needs none")
    if error.errno in (errno.E2BIG, errno.ENOMEM):
        graph = layout.plan.graph
        longest = max(graph.order, key=lambda name: _work(graph, name), default=None)
        if longest is not None:
            operator = graph.columns[longest]
            reason = "the kernel's verifier gave up on the program, and this column is the most work in it"
            cost = cpu_ns_per_record(operator, graph.types[longest])
            return NotOffloadable(longest, type(operator).__name__, reason, cost)
    return error
