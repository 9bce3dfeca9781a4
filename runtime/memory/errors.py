# SPDX-License-Identifier: Apache-2.0
"""Errors of row stores besides `ArgumentError` and `DeviceError`, classed by who must act."""

from __future__ import annotations

from sennit.transport.errors import ArgumentError, DeviceError, SennitError


class ForeignStore(SennitError):
    """The caller: the file is not an embedding store, or holds other tables. The message says what differs."""


class CorruptStore(SennitError):
    """The operator: bytes that were written once are lost. The message has file, offset and table."""


class NoRoom(ArgumentError):
    """The caller: a batch does not fit the cache beside those in use. It can be used as before."""


def from_fault(fault: int, message: str, error_number: int) -> SennitError:
    """The error for a `Fault` of csrc/store_error.hpp, in its order."""
    match fault:
        case 0:
            return ArgumentError(message)
        case 1:
            return ForeignStore(message)
        case 2:
            return CorruptStore(message)
        case 4:
            return NoRoom(message)
    error = DeviceError(message)
    error.errno = error_number
    return error
