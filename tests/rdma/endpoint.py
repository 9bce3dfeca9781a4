# SPDX-License-Identifier: Apache-2.0
"""One end of a queue pair, by pyverbs alone: memory that the peer writes, and messages with an immediate."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyverbs.enums as ibv
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, cqe_status_to_str
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from sennit.testbed.vm import links

PORT: Final = 1
DEPTH: Final = 64
COMPLETION_TIMEOUT_S: Final = 30.0
ACCESS: Final = ibv.IBV_ACCESS_LOCAL_WRITE | ibv.IBV_ACCESS_REMOTE_WRITE
QP_TYPES: Final = {"RC": ibv.IBV_QPT_RC, "UC": ibv.IBV_QPT_UC}
# InfiniBand Architecture Specification 1.4, 9.7.5.2.8 and 11.2.4.2: 4.096 us * 2^14 = 67 ms; 7 means no limit for RNR.
ACK_TIMEOUT: Final = 14
RETRIES: Final = 7


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One work completion."""

    status: str
    received: bool
    """True for a message from the peer. False for a message to it, which has no immediate."""
    immediate: int
    size_bytes: int


def gid_index(context: Any, gid: str) -> int:
    """Returns the index of this GID, written as in sysfs, in a port's table."""
    wanted = socket.inet_pton(socket.AF_INET6, gid)
    for index in range(context.query_port(PORT).gid_tbl_len):
        if socket.inet_pton(socket.AF_INET6, str(context.query_gid(PORT, index))) == wanted:
            return index
    raise LookupError(f"{context.name} has no GID {gid}")


def counter(device: int, name: str) -> int:
    """Returns a counter of the device. rxe counts for each port."""
    return int(Path(f"/sys/class/infiniband/rxe{device}/ports/{PORT}/hw_counters/{name}").read_text())


class Endpoint:
    """A queue pair of a device with `size_bytes` of memory, which the peer may write."""

    def __init__(
        self, device: int, *, qp_type: str, ip_version: int, size_bytes: int, shared_queue: bool = False
    ) -> None:
        self.device = device
        self.gid = links.gid(device, ip_version)
        self.context = Context(name=f"rxe{device}")
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 2 * DEPTH)
        self.memory = MR(self.pd, size_bytes, ACCESS)
        capacity = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
        self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(max_wr=DEPTH))) if shared_queue else None
        settings = QPInitAttr(
            qp_type=QP_TYPES[qp_type], scq=self.cq, rcq=self.cq, srq=self.srq, cap=capacity, sq_sig_all=1
        )
        self.qp = QP(self.pd, settings, self._attributes())  # in the state INIT

    def connect(self, peer: Endpoint, first_psn: int = 0, retries: int = RETRIES) -> None:
        """Connects this end. Both ends must do it."""
        route = GlobalRoute(dgid=GID(peer.gid), sgid_index=gid_index(self.context, self.gid))
        attributes = self._attributes()
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        attributes.dest_qp_num = peer.qp.qp_num
        attributes.path_mtu = self.context.query_port(PORT).active_mtu
        attributes.rq_psn = attributes.sq_psn = first_psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 1
        attributes.timeout = ACK_TIMEOUT
        attributes.retry_cnt = attributes.rnr_retry = retries
        self.qp.to_rtr(attributes)
        self.qp.to_rts(attributes)

    def _attributes(self) -> Any:
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        return attributes

    def expect(self, messages: int = 1, size_bytes: int = 1) -> None:
        """Posts receives. A write with immediate takes one of them. pyverbs wants memory even for zero bytes."""
        for _ in range(messages):
            (self.srq or self.qp).post_recv(RecvWR(num_sge=1, sg=[SGE(self.memory.buf, size_bytes, self.memory.lkey)]))

    def write(self, peer: Endpoint, size_bytes: int, immediate: int) -> None:
        """Writes the first bytes of this memory over the first bytes of the peer's."""
        source = SGE(self.memory.buf, size_bytes, self.memory.lkey)
        request = SendWR(
            opcode=ibv.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=[source], imm_data=socket.htonl(immediate)
        )
        request.set_wr_rdma(peer.memory.rkey, peer.memory.buf)
        self.qp.post_send(request)

    def completions(self, count: int) -> list[Completion]:
        """Returns the next `count` completions of both directions, in order. Fails if they take too long."""
        found: list[Completion] = []

        def poll() -> bool:
            found.extend(self.poll(count - len(found)))
            return len(found) == count

        until(poll, lambda: f"{count} completions on rxe{self.device}, there are {found}")
        return found

    def poll(self, most: int = DEPTH) -> list[Completion]:
        """Returns the completions that have already arrived."""
        number, entries = self.cq.poll(most)
        return [
            Completion(
                status=cqe_status_to_str(entry.status),
                received=bool(entry.opcode & ibv.IBV_WC_RECV),
                immediate=socket.ntohl(entry.imm_data),
                size_bytes=entry.byte_len,
            )
            for entry in entries[:number]
        ]

    def idle(self) -> bool:
        """Returns whether there is no unexpected completion."""
        return not self.poll(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (self.qp, self.srq, self.memory, self.cq, self.pd, self.context):
            if part is not None:
                part.close()


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Waits for a condition. Yields the processor, which on a single one lets the kernel's threads run."""
    deadline_s = time.monotonic() + COMPLETION_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {COMPLETION_TIMEOUT_S:.0f} s for {what()}")
        os.sched_yield()
