# SPDX-License-Identifier: Apache-2.0
"""Where the kernel has UDP packets that no process has counted: in queues, or lost, by the namespace of a process.

A group without an operation looks at its sockets only from time to time, up to 50 ms apart. What has arrived meanwhile
lies in their queues, so equal counters do not show that nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
# Columns of /proc/net/udp (proc(5)): tx_queue:rx_queue, in hexadecimal.
_QUEUES: Final = 4
# Columns of /proc/net/softnet_stat, of each processor: packets in its queues of arrived packets. One column holds
# their sum on all kernels that have the column.
_BACKLOG: Final = 11

WRONG_CHECKSUM: Final = "kernel_checksum"
LOSSES: Final = {
    "InCsumErrors": WRONG_CHECKSUM,
    "RcvbufErrors": "kernel_full_socket",
    "MemErrors": "kernel_no_memory",
    "NoPorts": "kernel_no_socket",
}
"""The kernel's counters of UDP packets that no process gets, and their names here."""


def waiting_bytes(pid: int) -> int:
    """Bytes in the receive queues of all UDP sockets of the process's network namespace."""
    waiting = 0
    for name in ("udp", "udp6"):
        for line in _lines(pid, name)[1:]:
            waiting += int(line.split()[_QUEUES].partition(":")[2], 16)
    return waiting


def backlog_packets() -> int:
    """Packets of all namespaces that the kernel has taken from an interface and not looked at yet."""
    rows = [line.split() for line in (PROC / "net" / "softnet_stat").read_text(encoding="utf-8").splitlines()]
    return sum(int(row[_BACKLOG], 16) for row in rows if len(row) > _BACKLOG)


def losses(pid: int) -> dict[str, int]:
    """UDP packets that the kernel has dropped in the process's network namespace, by reason."""
    found = dict.fromkeys(LOSSES.values(), 0)
    for name, count in _counters(pid):
        if name in LOSSES:
            found[LOSSES[name]] += count
    return found


def _counters(pid: int) -> Iterator[tuple[str, int]]:
    """UDP's counters by name: first those over IPv4, then those over IPv6."""
    names, counts = [line.split()[1:] for line in _lines(pid, "snmp") if line.startswith("Udp:")]
    yield from zip(names, map(int, counts), strict=True)
    for line in _lines(pid, "snmp6"):
        name, count = line.split()
        if name.startswith("Udp6"):
            yield name.removeprefix("Udp6"), int(count)


def _lines(pid: int, name: str) -> list[str]:
    path = PROC / str(pid) / "net" / name
    # A kernel without IPv6 has no file for it.
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
