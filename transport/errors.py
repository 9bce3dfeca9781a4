# SPDX-License-Identifier: Apache-2.0
"""The errors that the transport raises. The native core's `sennit_status` maps to them one to one."""

from __future__ import annotations

from typing import Final

from sennit.errors import (
    AbortedError,
    ArgumentError,
    ConfigError,
    DeviceError,
    MismatchError,
    PeerError,
    SennitError,
    TimeoutError,
    Unsupported,
)

__all__ = [
    "AbortedError",
    "ArgumentError",
    "ConfigError",
    "DeviceError",
    "MismatchError",
    "PeerError",
    "SennitError",
    "TimeoutError",
    "Unsupported",
    "from_status",
]

# The statuses of `sennit_status` in core.h, in their order.
_BY_STATUS: Final[dict[int, type[SennitError]]] = {
    2: TimeoutError,
    3: AbortedError,
    4: PeerError,
    5: MismatchError,
    6: ArgumentError,
    7: DeviceError,
}


def from_status(status: int, message: str, error_number: int = 0) -> SennitError:
    """Returns the error for a failed `sennit_status`, with the core's message. `error_number`: errno, which the message
    has in words; 0: none.
    """
    kind = _BY_STATUS.get(status, SennitError)
    return kind.told(message, error_number or None) if issubclass(kind, DeviceError) else kind(message)
