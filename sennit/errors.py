# SPDX-License-Identifier: Apache-2.0
"""The roots of all errors, classed by who must act.

    SennitError
      ConfigError      the caller: a SENNIT_* variable, an option or a configuration field is out of range
      ArgumentError    the caller: sizes, dtype, operation or buffers of one call; nothing was sent
      MismatchError    the caller: ranks disagree about the operation that they run together
      FormatError      the author: bytes or text from outside are not what they should be
      PeerError        the operator: a rank died, aborted, or never arrived
      TimeoutError     the operator: a deadline passed; the message names the ranks still awaited
      AbortedError     nobody: this rank called abort or shutdown
      DeviceError      the operator: a socket, device or shared-memory error, with its errno
      Unsupported      nobody can, here: the message names the missing capability

Every other error of sennit derives from one of these. Packages define theirs in their own `errors` modules.
"""

from __future__ import annotations

import builtins
import os
from typing import Self


class SennitError(RuntimeError):
    """The root: catches whatever sennit raises."""


class ConfigError(SennitError, ValueError):
    """A configuration value is wrong; the message carries the value and what is allowed."""


class ArgumentError(SennitError, ValueError):
    """An argument of one call is wrong; nothing was sent."""


class MismatchError(SennitError):
    """A peer runs another operation, size, dtype or split; the message has both sides."""


class FormatError(SennitError, ValueError):
    """A file, message or packet from outside is malformed; the message says what and where."""


class PeerError(SennitError):
    """A peer died, aborted, reported a failure or never arrived.

    `rank` is that peer, or None if the error is about several (the message names them).
    """

    def __init__(self, reason: str, rank: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rank = rank


class TimeoutError(SennitError, builtins.TimeoutError):
    """A deadline passed. Also the builtin `TimeoutError`, so that generic handlers see it."""


class AbortedError(SennitError):
    """The communicator was aborted or shut down on this rank."""


class DeviceError(SennitError, OSError):
    """The operating system refused something. `errno` says what (None if it gave no number)."""

    def __init__(self, reason: str, errno: int | None = None) -> None:
        text = reason if errno is None else f"{reason}: {os.strerror(errno)}"
        super().__init__(text)
        self.errno = errno

    @classmethod
    def told(cls, text: str, errno: int | None) -> Self:
        """An error whose text has `errno` in words already."""
        error = cls(text)
        error.errno = errno
        return error


class Unsupported(SennitError, NotImplementedError):
    """This machine or build cannot do it; `capability` names what is missing."""

    def __init__(self, capability: str, reason: str) -> None:
        super().__init__(f"{capability}: {reason}")
        self.capability = capability
