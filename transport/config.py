# SPDX-License-Identifier: Apache-2.0
"""The transport's configuration. This is the one file that reads `SENNIT_*` environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sennit.transport.errors import ConfigError

PATHS_MAX: Final = 256
# Longer than any identity we make up ourselves, short enough for an error message.
HOST_ID_MAX_CHARACTERS: Final = 128
# Linux: IFNAMSIZ is 16 with the final zero (uapi/linux/if.h).
INTERFACE_MAX_CHARACTERS: Final = 15


class TransportKind(StrEnum):
    """What carries the bytes between two ranks."""

    AUTO = "auto"
    SHM = "shm"
    UDP = "udp"
    VERBS = "verbs"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Checked on creation; ranks of one group need not have equal ones, except that they must find a common way."""

    transport: TransportKind = TransportKind.AUTO
    """`SENNIT_TRANSPORT`. auto: shared memory inside a host, else udp. shm, udp, verbs: that one or an error."""

    interfaces: tuple[str, ...] = ()
    """`SENNIT_INTERFACES`, names separated by commas: the network interfaces (rails) that udp uses. Empty: those
    of default routes, else any that are up with an address, else loopback (`rails.py`)."""

    paths: int = 8
    """`SENNIT_PATHS`, 1 to 256: UDP source ports (ECMP entropies) for each peer and rail. Eight spread over four
    equal-cost planes with little left idle; more only cost state."""

    host_id: str | None = None
    """`SENNIT_HOST_ID`: stands for this host when ranks look for neighbours. None: the kernel's boot id. Give
    two containers different ones to keep them from trying shared memory; equal ones do not force it."""

    timeout_s: float = 1800.0
    """`SENNIT_TIMEOUT_S`, seconds: the deadline of rendezvous and of every operation that is given no other.
    As long as torch's own default for process groups, which replaces it there."""

    def __post_init__(self) -> None:
        if self.transport not in tuple(TransportKind):
            raise ConfigError(f"transport {self.transport!r}; allowed: {', '.join(TransportKind)}")
        object.__setattr__(self, "transport", TransportKind(self.transport))
        if not 1 <= self.paths <= PATHS_MAX:
            raise ConfigError(f"paths {self.paths}; allowed: 1..{PATHS_MAX}")
        for name in self.interfaces:
            if not 1 <= len(name) <= INTERFACE_MAX_CHARACTERS or "/" in name or any(map(str.isspace, name)):
                raise ConfigError(
                    f"interface {name!r}; allowed: 1..{INTERFACE_MAX_CHARACTERS} characters without space or slash"
                )
        if len(set(self.interfaces)) != len(self.interfaces):
            raise ConfigError(f"interfaces {','.join(self.interfaces)}; allowed: each name once")
        if self.host_id is not None and not 1 <= len(self.host_id) <= HOST_ID_MAX_CHARACTERS:
            raise ConfigError(f"host_id of {len(self.host_id)} characters; allowed: 1..{HOST_ID_MAX_CHARACTERS}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s {self.timeout_s}; allowed: finite and above 0")


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """The configuration that the `SENNIT_*` variables ask for; unset or empty ones keep the default."""
    source = os.environ if environment is None else environment
    given: dict[str, str] = {}
    for name in (
        "SENNIT_TRANSPORT",
        "SENNIT_INTERFACES",
        "SENNIT_PATHS",
        "SENNIT_HOST_ID",
        "SENNIT_TIMEOUT_S",
    ):
        text = source.get(name, "").strip()
        if text:
            given[name] = text
    default = Config()
    return Config(
        transport=_transport(given.get("SENNIT_TRANSPORT")),
        interfaces=_names(given.get("SENNIT_INTERFACES")),
        paths=_integer("SENNIT_PATHS", given.get("SENNIT_PATHS"), default.paths),
        host_id=given.get("SENNIT_HOST_ID"),
        timeout_s=_seconds("SENNIT_TIMEOUT_S", given.get("SENNIT_TIMEOUT_S"), default.timeout_s),
    )


def _transport(text: str | None) -> TransportKind:
    if text is None:
        return TransportKind.AUTO
    try:
        return TransportKind(text.lower())
    except ValueError:
        raise ConfigError(f"SENNIT_TRANSPORT={text}; allowed: {', '.join(TransportKind)}") from None


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _integer(variable: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: a whole number") from None


def _seconds(variable: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: a number of seconds") from None
