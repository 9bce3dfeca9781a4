# SPDX-License-Identifier: Apache-2.0
"""An unreliable connected queue pair of rdma_rxe whose peer is a socket. The device writes arrivals to this memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final, Self

from sennit.testbed.vm import links
from sennit.transport.oracle.roce import ROCE_UDP_PORT

from .packets import PAYLOAD_BYTES, Aim, Datagram
from .sockets import Sockets

NEAR: Final = 0
FAR: Final = 1
GUARD_BYTES: Final = 4_096
GUARD: Final = b"\xa5"
MEMORY_BYTES: Final = 4 * PAYLOAD_BYTES + 2 * GUARD_BYTES
RECEIVES: Final = 48


class RxeTarget:
    """A queue pair of rxe1 with its own or shared receives. Its peer's address is that of rxe0."""

    GUARD: Final = GUARD

    def __init__(self, endpoint: ModuleType, sockets: Sockets, ip_version: int, *, shared_queue: bool) -> None:
        self._module = endpoint
        self._sockets = sockets
        sockets.aim(ROCE_UDP_PORT)
        ends = [
            endpoint.Endpoint(
                device, qp_type="UC", ip_version=ip_version, size_bytes=MEMORY_BYTES, shared_queue=shared_queue
            )
            for device in (NEAR, FAR)
        ]
        self._near, self._far = ends
        self._far.connect(self._near)
        self._far.expect(RECEIVES)
        self.ip_version = ip_version
        self.shared_queue = shared_queue
        self._ended: Aim | None = None
        (first,) = self.open([b"before all cases"], 0)
        self.send(first.datagram())
        self.completions(first.immediate)
        self.close([first])

    def open(self, payloads: Sequence[bytes], psn: int) -> list[Aim]:
        """Registers memory for these packets under a new key. Returns the correct place of each packet."""
        far = self._far
        far.memory.write(GUARD * MEMORY_BYTES, MEMORY_BYTES)
        size_bytes = sum(map(len, payloads))
        address = far.memory.buf + GUARD_BYTES
        self._region = self._module.MR(far.pd, size_bytes, self._module.ACCESS, address=address)
        self._size_bytes = size_bytes
        aims = [
            Aim(
                qpn=far.qp.qp_num,
                psn=psn + index,
                address=address + index * PAYLOAD_BYTES,
                rkey=self._region.rkey,
                immediate=1 << 20 | index,
                payload=payload,
                region_bytes=size_bytes - index * PAYLOAD_BYTES,
                ended=self._ended,
            )
            for index, payload in enumerate(payloads)
        ]
        self._received_before = self._received()
        self._bad_keys_before = self._bad_keys()
        return aims

    def send(self, datagram: Datagram) -> None:
        self._sockets.send(datagram)

    def completions(self, last: int) -> list[tuple[str, int, int]]:
        """Returns status, immediate and size of each completion up to immediate `last`. Each took a receive."""
        found: list[tuple[str, int, int]] = []
        while not found or found[-1][:2] != ("success", last):
            (done,) = self._far.completions(1)
            is_good = done.status == "success"
            found.append((done.status, done.immediate, done.size_bytes) if is_good else (done.status, 0, 0))
        self._far.expect(len(found))
        return found

    def assert_nothing_completed(self) -> None:
        assert self._far.idle()

    def memory(self) -> bytes:
        """Returns the bytes of the message. Fails if any byte around them has changed."""
        whole = self._far.memory.read(MEMORY_BYTES, 0)
        end = GUARD_BYTES + self._size_bytes
        assert whole[:GUARD_BYTES] == GUARD * GUARD_BYTES
        assert whole[end:] == GUARD * (MEMORY_BYTES - end)
        return bytes(whole[GUARD_BYTES:end])

    def close(self, aims: Sequence[Aim]) -> dict[str, int]:
        """Withdraws the key. Returns what the device has counted since `open`."""
        self.assert_nothing_completed()
        self._region.close()
        self._ended = aims[0]
        # The kernel renews the counters some milliseconds after a read.
        self._module.until(lambda: self._received() != self._received_before, lambda: "the packets to be counted")
        counted = {"rcvd_pkts": self._received() - self._received_before}
        if self._bad_keys() != self._bad_keys_before:
            counted["bad_pkey_cntr"] = self._bad_keys() - self._bad_keys_before
        return counted

    def _received(self) -> int:
        return int(self._module.counter(FAR, "rcvd_pkts"))

    def _bad_keys(self) -> int:
        return int(self._far.context.query_port(self._module.PORT).bad_pkey_cntr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for end in (self._near, self._far):
            end.__exit__(None, None, None)


def addresses(ip_version: int) -> tuple[str, str]:
    """Returns the addresses of the peer and of the queue pair."""
    return links.address(NEAR, ip_version), links.address(FAR, ip_version)
