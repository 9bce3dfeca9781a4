# SPDX-License-Identifier: Apache-2.0
"""Who may have which programs: the agent's file, in TOML. docs/how-to/unprivileged.md shows one."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tomllib
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sennit.errors import ConfigError
from sennit.known_names import hint

FILE: Final = Path("/etc/sennit/agent.toml")
FILE_MAX_BYTES: Final = 1 << 20
# (uid_t)-1 means "no change" to the kernel.
ID_MAX: Final = (1 << 32) - 2
# linux/if.h, IFNAMSIZ, without the final zero.
INTERFACE_MAX_BYTES: Final = 15
LEASES_MAX: Final = 64
MEMORY_MAX_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """One `[[allow]]` of the file."""

    users: frozenset[int]
    groups: frozenset[int]
    """Whoever is one of these users, or in one of these groups."""

    interfaces: frozenset[str]
    ports: range
    """UDP ports at each of these interfaces."""

    leases: int
    """How many programs a user may have at once, at whatever interface."""

    memory_mib: int
    """How much memory a user may share with them together."""

    def covers(self, interface: str, port: int) -> bool:
        return interface in self.interfaces and port in self.ports


@dataclass(frozen=True, slots=True)
class Permissions:
    """All grants, in the order of the file."""

    grants: tuple[Grant, ...]

    def of(self, user: int, groups: Set[int]) -> tuple[Grant, ...]:
        return tuple(grant for grant in self.grants if user in grant.users or groups & grant.groups)

    def ports_at(self, interface: str) -> range:
        """From the first port that somebody may have there to the last one."""
        found = [grant.ports for grant in self.grants if interface in grant.interfaces]
        return range(min(ports[0] for ports in found), max(ports[-1] for ports in found) + 1)


def read_permissions(path: Path) -> Permissions:
    """Raises ConfigError. The file must belong to root or to this user, and nobody else may write to it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_MAX_BYTES:
                raise ConfigError(f"{path}; allowed: a file of at most {FILE_MAX_BYTES} bytes")
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"{path}: others may change it; allowed: of root or this user, and mode 0644 or less")
            content = file.read(FILE_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        return permissions_of(tomllib.loads(content.decode()))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or no TOML
        raise ConfigError(f"{path}: {error}") from None


def permissions_of(content: dict[str, Any]) -> Permissions:
    _known(content, ("allow",), "the file")
    tables = content.get("allow")
    if not isinstance(tables, list) or not tables:
        raise ConfigError("no [[allow]]; allowed: at least one")
    return Permissions(tuple(_grant(table, f"allow {number}") for number, table in enumerate(tables, 1)))


def _grant(table: Any, where: str) -> Grant:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}; allowed: a table")
    _known(table, ("users", "groups", "interfaces", "ports", "leases", "memory_mib"), where)
    found = Grant(
        users=_ids(table, "users", lambda name: pwd.getpwnam(name).pw_uid, where),
        groups=_ids(table, "groups", lambda name: grp.getgrnam(name).gr_gid, where),
        interfaces=frozenset(_interfaces(table.get("interfaces"), where)),
        ports=_ports(table.get("ports"), where),
        leases=_number(table.get("leases", 8), f"{where}: leases", LEASES_MAX),
        memory_mib=_number(table.get("memory_mib", 1024), f"{where}: memory_mib", MEMORY_MAX_MIB),
    )
    if not found.users and not found.groups:
        raise ConfigError(f"{where}: neither users nor groups; allowed: some of either")
    return found


def _known(table: dict[str, Any], keys: Iterable[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where}: {key!r}; allowed: {', '.join(keys)}{hint(key, keys)}")


def _ids(table: dict[str, Any], key: str, look_up: Callable[[str], int], where: str) -> frozenset[int]:
    names = table.get(key, [])
    if not isinstance(names, list):
        raise ConfigError(f"{where}: {key} {names!r}; allowed: a list of names and numbers")
    found = set()
    for name in names:
        if isinstance(name, str):
            try:
                found.add(look_up(name))
            except (KeyError, ValueError):
                raise ConfigError(f"{where}: {key} {name!r}; allowed: those that this machine knows") from None
        else:
            found.add(_number(name, f"{where}: {key}", ID_MAX, 0))
    return frozenset(found)


def _interfaces(names: Any, where: str) -> list[str]:
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{where}: interfaces {names!r}; allowed: a list of names")
    for name in names:
        if not isinstance(name, str) or not 1 <= len(name.encode()) <= INTERFACE_MAX_BYTES:
            raise ConfigError(f"{where}: interface {name!r}; allowed: names of 1 to {INTERFACE_MAX_BYTES} bytes")
    return names


def _ports(value: Any, where: str) -> range:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{where}: ports {value!r}; allowed: [first, last]")
    first, last = (_number(port, f"{where}: ports", 65_535) for port in value)
    if first > last:
        raise ConfigError(f"{where}: ports [{first}, {last}]; allowed: [first, last], the first one not above the last")
    return range(first, last + 1)


def _number(value: Any, what: str, most: int, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{what} {value!r}; allowed: {least} to {most}")
    return value
