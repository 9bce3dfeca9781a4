# SPDX-License-Identifier: Apache-2.0
"""How the kernel alone handles loss, in a benchmark worker: reliable queue pairs of soft-RoCE, which go back N.

Nothing of sennit is in it. An operation is one RDMA write with immediate of a peer's part each way. It ends when
the rank's write is acknowledged and the peer's has arrived. Two ranks, with pyverbs, on the two devices of a link.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pyverbs.enums as ibv
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel, cqe_status_to_str
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from sennit.testbed.bench.cases import ELEMENT_BYTES, IN_FLIGHT_MAX, Case, Collective
from sennit.testbed.bench.transport.library import mean_seconds_in_flight
from sennit.testbed.vm import links
from sennit.transport.meeting.store import FileStore

PORT: Final = 1
# The peer may have posted a full set of further operations when this one waits for the first.
DEPTH: Final = 2 * IN_FLIGHT_MAX
# InfiniBand Architecture Specification 1.4, 9.7.5.2.8 and 11.2.4.2: 4.096 us * 2^14 = 67 ms; 7 means no limit for RNR.
ACK_TIMEOUT: Final = 14
RETRIES: Final = 7
TIMEOUT_S: Final = 60.0
ACCESS: Final = ibv.IBV_ACCESS_LOCAL_WRITE | ibv.IBV_ACCESS_REMOTE_WRITE


class KernelRcLibrary:
    """One of the two ends."""

    def __init__(self, rank: str, world: str, store_path: str) -> None:
        if int(world) != 2:
            raise ValueError(f"kernel-rc: {world} ranks; allowed: 2")
        self.rank = int(rank)
        self._store = FileStore(store_path)
        self._context = Context(name=f"rxe{rank}")
        self._domain = PD(self._context)
        self._channel = CompChannel(self._context)
        self._completions = CQ(self._context, 2 * DEPTH, channel=self._channel)
        capacity = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
        settings = QPInitAttr(
            qp_type=ibv.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=capacity, sq_sig_all=1
        )
        self._queue_pair = QP(self._domain, settings, self._attributes())  # in the state INIT
        self._memory: Any = None
        self._part_bytes = 0
        self._remote: dict[str, int] = {}
        # Completions over all operations; a reliable queue pair completes in order.
        self._waited = 0
        self._sent = 0
        self._received = 0
        signal.signal(signal.SIGALRM, _give_up)

    def join(self, peer: str) -> None:
        theirs = self._exchange("queue pair", {"number": self._queue_pair.qp_num})
        gid = socket.inet_pton(socket.AF_INET6, links.gid(self.rank, 6))
        table = range(self._context.query_port(PORT).gid_tbl_len)
        index = next(i for i in table if _packed(self._context.query_gid(PORT, i)) == gid)
        attributes = self._attributes()
        route = GlobalRoute(dgid=GID(links.gid(1 - self.rank, 6)), sgid_index=index)
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        attributes.dest_qp_num = theirs["number"]
        attributes.path_mtu = self._context.query_port(PORT).active_mtu
        attributes.rq_psn = attributes.sq_psn = 0
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 1
        attributes.timeout = ACK_TIMEOUT
        attributes.retry_cnt = attributes.rnr_retry = RETRIES
        self._queue_pair.to_rtr(attributes)
        self._queue_pair.to_rts(attributes)

    def allocate(self, case: Case) -> None:
        """Allocates the buffers: sent bytes, then received bytes. The peer must do the same at the same time."""
        part_bytes = case.elements(2)[0] // 2 * ELEMENT_BYTES
        if part_bytes == self._part_bytes:
            return
        if self._part_bytes or case.collective is not Collective.ALLTOALL:
            raise ValueError(f"kernel-rc runs only alltoall of one size, not {case}")
        self._part_bytes = part_bytes
        self._memory = MR(self._domain, 2 * self._part_bytes, ACCESS)
        self._remote = self._exchange("memory", {"address": self._memory.buf, "key": self._memory.rkey})
        for _ in range(DEPTH):
            self._post_receive()
        self._exchange("receives", {})

    def run(self, peer: str, case: Case, iterations: int) -> float:
        self.allocate(case)
        return mean_seconds_in_flight(self._start, case.in_flight, iterations)

    def verify(self, peer: str, case: Case) -> None:
        self.allocate(case)
        self._memory.write(bytes([self.rank + 1]) * self._part_bytes, self._part_bytes)
        self._start()()
        if self._memory.read(self._part_bytes, self._part_bytes) != bytes([2 - self.rank]) * self._part_bytes:
            raise RuntimeError(f"{peer} {case.size_bytes} bytes: what came is not what the peer sent")

    def stop(self) -> None:
        for part in (self._queue_pair, self._memory, self._completions, self._channel, self._domain, self._context):
            if part is not None:
                part.close()

    def _attributes(self) -> Any:
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        return attributes

    def _exchange(self, what: str, mine: dict[str, int]) -> dict[str, int]:
        self._store.set(f"{what} {self.rank}", json.dumps(mine))
        theirs = f"{what} {1 - self.rank}"
        self._store.wait([theirs], timedelta(seconds=TIMEOUT_S))
        answer: dict[str, int] = json.loads(self._store.get(theirs))
        return answer

    def _post_receive(self) -> None:
        # (pyverbs wants memory even for a lone immediate.)
        self._queue_pair.post_recv(RecvWR(num_sge=1, sg=[SGE(self._memory.buf, 1, self._memory.lkey)]))

    def _start(self) -> Callable[[], None]:
        source = SGE(self._memory.buf, self._part_bytes, self._memory.lkey)
        request = SendWR(opcode=ibv.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=[source], imm_data=0)
        request.set_wr_rdma(self._remote["key"], self._remote["address"] + self._part_bytes)
        self._queue_pair.post_send(request)
        return self._wait

    def _wait(self) -> None:
        """Waits for the oldest operation not waited for yet."""
        self._waited += 1
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        while min(self._sent, self._received) < self._waited:
            if self._take_completions():
                continue
            # New completions raise an event. Look once more for those that came before.
            self._completions.req_notify()
            if not self._take_completions():
                self._channel.get_cq_event(self._completions)
                self._completions.ack_events(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._post_receive()

    def _take_completions(self) -> bool:
        count, found = self._completions.poll(2 * DEPTH)
        for completion in found[:count]:
            if completion.status != ibv.IBV_WC_SUCCESS:
                raise RuntimeError(f"kernel-rc rank {self.rank}: {cqe_status_to_str(completion.status)}")
            if completion.opcode & ibv.IBV_WC_RECV:
                self._received += 1
            else:
                self._sent += 1
        return bool(count)


def _packed(gid: Any) -> bytes:
    return socket.inet_pton(socket.AF_INET6, str(gid))


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"kernel-rc: an operation took more than {TIMEOUT_S:g} s")
