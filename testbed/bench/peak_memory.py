# SPDX-License-Identifier: Apache-2.0
"""The memory of this process: what is resident now, and the most since `reset_peak` (Linux, proc(5)).

`getrusage` has a peak, too. But nothing resets it, and it counts what the process was before it ran its program.
"""

from __future__ import annotations

from pathlib import Path

from sennit.errors import DeviceError


def reset_peak() -> int:
    """Lets the peak begin anew. Returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise DeviceError(f"/proc/self/status has no {name}")
