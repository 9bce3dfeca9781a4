# SPDX-License-Identifier: Apache-2.0
"""Where the rows of each table lie: as the table says itself, or as its module has it. No home changes a bit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from sennit.runtime.sharded.tables import Home, Table
from sennit.transport.errors import ConfigError

_CPU: Final = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """What a module, or a run, has to keep tables in."""

    device_type: str = _CPU
    """Of the module: "cpu" or "cuda"."""

    has_store: bool = False
    """Whether there is a place for files."""

    @property
    def memory(self) -> Home:
        """That of the module's device."""
        return Home.DRAM if self.device_type == _CPU else Home.HBM

    def of(self, table: Table, *, is_replicated: bool = False) -> Home:
        """Where the table is. `is_replicated`: every rank has all of it, which is never in files.

        Raises `ConfigError` if the table names a home that cannot be.
        """
        if table.home is None:
            # Tensor trains are small.
            is_in_file = self.has_store and table.train_rank is None and not is_replicated
            return Home.FILE if is_in_file else self.memory
        reason = None
        if table.home is Home.FILE and not self.has_store:
            reason = "without a table store"
        elif table.home is Home.FILE and is_replicated:
            reason = "with a copy on every rank (data_parallel)"
        elif table.home is Home.HBM and self.memory is not Home.HBM:
            reason = f"with tables on {self.device_type}"
        if reason is not None:
            allowed = ", ".join(dict.fromkeys((Home.DRAM.value, self.memory.value)))
            raise ConfigError(f"table {table.name}: home {table.home.value} {reason}; allowed: {allowed}")
        return table.home

    def is_on_host(self, table: Table) -> bool:
        """Whether the table is in host memory beside tables on a device, and so needs an engine there."""
        return table.home is Home.DRAM and self.memory is not Home.DRAM

    def in_files(self, tables: Sequence[Table], replicated: Collection[int]) -> list[str]:
        """The names of tables in files. `replicated`: numbers of the tables of which every rank has a copy.

        Raises `ConfigError` if a home cannot be.
        """
        return [
            table.name
            for number, table in enumerate(tables)
            if self.of(table, is_replicated=number in replicated) is Home.FILE
        ]


IN_MEMORY: Final = Homes()
"""Those of a module on the CPU without a store."""
