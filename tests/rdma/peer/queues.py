# SPDX-License-Identifier: Apache-2.0
"""Queue pairs of the unreliable connected service, one for each path, and their memory, through pyverbs."""

from __future__ import annotations

import enum
import ipaddress
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyverbs.enums as ibv
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from sennit.transport.meeting import devices

BUFFER_BYTES: Final = 4_096
RECEIVES: Final = 256
SENDS: Final = 128
POLL_MAX: Final = 64
MTU_BASE_BYTES: Final = 128
ACCESS: Final = ibv.IBV_ACCESS_LOCAL_WRITE | ibv.IBV_ACCESS_REMOTE_WRITE
# rdma-core adds 0xC000 to the label's low bits to get the source port (ibv_flow_label_to_udp_sport).
SOURCE_PORT_MIN: Final = 0xC000
FLOW_LABEL_MASK: Final = 0x3FFF


class Kind(enum.Enum):
    CONTROL = enum.auto()
    EAGER = enum.auto()
    BULK = enum.auto()
    REFUSED = enum.auto()
    """Refused by the device: an unknown key, or a range that is not open."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The completion of one receive. Bulk payloads are already in their place."""

    kind: Kind
    path: int
    immediate: int
    size_bytes: int
    payload: bytes


class Region:
    """An array that the peer may write under its own key until it is closed."""

    def __init__(self, queues: Queues, array: npt.NDArray[np.uint8]) -> None:
        self._array = array  # keeps the device's memory alive
        self._registration = MR(queues.pd, array.nbytes, ACCESS, address=array.ctypes.data)
        self.address = array.ctypes.data
        self.rkey: int = self._registration.rkey

    def close(self) -> None:
        self._registration.close()


class Queues:
    """All paths share the completion queue, the receive buffers and the send buffers."""

    def __init__(self, address: str, path_count: int) -> None:
        self.address = address
        device, self._port, self._gid_index = _find(address)
        self._context = Context(name=device)
        self.payload_max = MTU_BASE_BYTES << self._context.query_port(self._port).active_mtu
        self.pd = PD(self._context)
        self._cq = CQ(self._context, RECEIVES + SENDS)
        self._srq = SRQ(self.pd, SrqInitAttr(SrqAttr(max_wr=RECEIVES)))
        self._buffers = np.zeros((RECEIVES + SENDS, BUFFER_BYTES), np.uint8)
        self._registration = MR(self.pd, self._buffers.nbytes, ACCESS, address=self._buffers.ctypes.data)
        self._free = list(range(RECEIVES, RECEIVES + SENDS))
        settings = QPInitAttr(
            qp_type=ibv.IBV_QPT_UC, scq=self._cq, rcq=self._cq, srq=self._srq, cap=QPCap(max_send_wr=SENDS)
        )
        self._pairs = [QP(self.pd, settings, self._attributes()) for _ in range(path_count)]
        self._path_of = {pair.qp_num: path for path, pair in enumerate(self._pairs)}
        for buffer in range(RECEIVES):
            self._expect(buffer)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(pair.qp_num for pair in self._pairs)

    @property
    def sends_free(self) -> int:
        return len(self._free)

    def connect(self, address: str, numbers: tuple[int, ...], source_ports: tuple[int, ...], payload_max: int) -> None:
        gid = ipaddress.IPv6Address(address if ":" in address else f"::ffff:{address}").packed.hex(":", 2)
        for pair, number, source_port in zip(self._pairs, numbers, source_ports, strict=True):
            label = source_port & FLOW_LABEL_MASK
            attributes = self._attributes()
            route = GlobalRoute(dgid=GID(gid), sgid_index=self._gid_index, flow_label=label, hop_limit=64)
            attributes.ah_attr = AHAttr(port_num=self._port, is_global=1, gr=route)
            attributes.dest_qp_num = number
            attributes.path_mtu = (payload_max // MTU_BASE_BYTES).bit_length() - 1
            attributes.rq_psn = attributes.sq_psn = 0
            pair.to_rtr(attributes)
            pair.to_rts(attributes)

    def send(self, path: int, payload: bytes) -> None:
        """SEND ONLY."""
        self._post(path, payload, ibv.IBV_WR_SEND)

    def send_with_immediate(self, path: int, payload: bytes, immediate: int) -> None:
        """SEND ONLY with immediate."""
        self._post(path, payload, ibv.IBV_WR_SEND_WITH_IMM, immediate)

    def write_with_immediate(self, path: int, payload: bytes, immediate: int, address: int, rkey: int) -> None:
        """RDMA WRITE ONLY with immediate."""
        self._post(path, payload, ibv.IBV_WR_RDMA_WRITE_WITH_IMM, immediate, (rkey, address))

    def poll(self) -> list[Arrival]:
        """Returns arrivals. Also frees the buffers of sent packets."""
        count, entries = self._cq.poll(POLL_MAX)
        arrivals = []
        for entry in entries[:count]:
            if entry.wr_id < RECEIVES:
                arrivals.append(self._arrival(entry))
                self._expect(entry.wr_id)
            else:
                self._free.append(entry.wr_id)
        return arrivals

    def _post(
        self, path: int, payload: bytes, opcode: int, immediate: int = 0, remote: tuple[int, int] | None = None
    ) -> None:
        buffer = self._free.pop()
        self._buffers[buffer, : len(payload)] = np.frombuffer(payload, np.uint8)
        source = SGE(self._buffers[buffer].ctypes.data, len(payload), self._registration.lkey)
        request = SendWR(
            wr_id=buffer,
            opcode=opcode,
            num_sge=1,
            sg=[source],
            imm_data=socket.htonl(immediate),
            send_flags=ibv.IBV_SEND_SIGNALED,
        )
        if remote is not None:
            request.set_wr_rdma(*remote)
        self._pairs[path].post_send(request)

    def _expect(self, buffer: int) -> None:
        entry = SGE(self._buffers[buffer].ctypes.data, BUFFER_BYTES, self._registration.lkey)
        self._srq.post_recv(RecvWR(wr_id=buffer, num_sge=1, sg=[entry]))

    def _arrival(self, entry: Any) -> Arrival:
        payload = b""
        if entry.status != ibv.IBV_WC_SUCCESS:
            kind = Kind.REFUSED
        elif entry.opcode == ibv.IBV_WC_RECV_RDMA_WITH_IMM:
            kind = Kind.BULK
        else:
            kind = Kind.EAGER if entry.wc_flags & ibv.IBV_WC_WITH_IMM else Kind.CONTROL
            payload = self._buffers[entry.wr_id, : entry.byte_len].tobytes()
        return Arrival(
            kind=kind,
            path=self._path_of[entry.qp_num],
            immediate=socket.ntohl(entry.imm_data),
            size_bytes=entry.byte_len,
            payload=payload,
        )

    def _attributes(self) -> Any:
        attributes = QPAttr(port_num=self._port)
        attributes.qp_access_flags = ACCESS
        return attributes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (*self._pairs, self._srq, self._registration, self._cq, self.pd, self._context):
            part.close()


def _find(address: str) -> tuple[str, int, int]:
    """Returns device, port, and index of the GID with this address."""
    for device in devices.read_devices():
        for port in device.ports:
            for gid in port.gids:
                if str(gid.address) == address:
                    return device.name, port.number, gid.index
    raise LookupError(f"no RDMA device has the address {address}")
