# SPDX-License-Identifier: Apache-2.0
"""Where a model is to run: this machine, or a described cluster (TOML).

ranks = 128
local_ranks = 8        # on each host; default: all
cores = 64             # of a host, for its ranks; default: one a rank
memory = "64GiB"       # of a rank, for tables with their optimizer states
file = "1TiB"          # of a rank: tables lie in files, with `memory` as their cache
gbit = 100             # what a rank can send to other hosts; default: as calibrated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.runtime.model.toml_file import Check, integer, number, read_toml, section, size
from sennit.runtime.sharded.tables import Home, Homes
from sennit.transport.errors import ConfigError

MAX_RANKS: Final = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts with equally many ranks."""

    ranks: int
    local_ranks: int
    cores: int
    """Cores of a host. The ranks of a host share them."""
    limits: Sequence[int] | None = None
    """Bytes that each rank has for tables: of memory, or of files if tables are in files. None: no limit."""
    cache_bytes: int | None = None
    """Tables are in files, and a rank has this much memory as their cache. None: tables are in memory."""
    beside: Sequence[int] | None = None
    """If tables are in files: bytes of memory of each rank for tables that are not. None: no limit."""
    gbit: float | None = None
    has_no_shared_memory: bool = False
    """Ranks of a host use the network with each other."""
    source: str = "this machine"

    @property
    def hosts(self) -> int:
        return self.ranks // self.local_ranks

    @property
    def tier(self) -> str:
        """The tier of tables that name no home."""
        return "memory" if self.cache_bytes is None else "file"

    @property
    def limited_tier(self) -> str:
        """The words " in tier ..." for errors if only one tier has limits. Otherwise quoted limits name their tiers."""
        limited = self.limits_by_home
        return f" in tier {'file' if Home.FILE in limited else 'memory'}" if len(limited) == 1 else ""

    @property
    def homes(self) -> Homes:
        return Homes(has_store=self.cache_bytes is not None)

    @property
    def limits_by_home(self) -> dict[Home, Sequence[int]]:
        """The limits by home, as `place` takes them."""
        in_files, in_memory = (None, self.limits) if self.cache_bytes is None else (self.limits, self.beside)
        of_home = {Home.FILE: in_files, Home.DRAM: in_memory}
        return {home: limits for home, limits in of_home.items() if limits is not None}


_FIELDS: Final[dict[str, Check]] = {
    "ranks": integer(1, MAX_RANKS),
    "local_ranks": integer(1, MAX_RANKS),
    "cores": integer(1, 1 << 16),
    "memory": size("64GiB"),
    "file": size("64GiB"),
    "gbit": number("above 0", lambda value: value > 0),
}


def read_cluster(path: Path) -> Cluster:
    """A described cluster. Raises `ConfigError` that names file, field, value and what is allowed."""
    found = section(str(path), read_toml(path), _FIELDS)
    if "ranks" not in found:
        raise ConfigError(f"{path}: ranks is missing; allowed: 1 to {MAX_RANKS}")
    ranks = found["ranks"]
    local = found.get("local_ranks", ranks)
    if ranks % local:
        raise ConfigError(f"{path}: local_ranks {local} for {ranks} ranks; allowed: a divisor")
    memory, files = found.get("memory"), found.get("file")
    if files is not None and memory is None:
        raise ConfigError(f"{path}: file without memory, which is the cache; allowed: both, or memory alone")
    limit = memory if files is None else files
    return Cluster(
        ranks=ranks,
        local_ranks=local,
        cores=found.get("cores", local),
        limits=None if limit is None else [limit] * ranks,
        cache_bytes=None if files is None else memory,
        beside=None if files is None or memory is None else [memory] * ranks,
        gbit=found.get("gbit"),
        source=str(path),
    )
