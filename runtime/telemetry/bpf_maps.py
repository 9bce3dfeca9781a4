# SPDX-License-Identifier: Apache-2.0
"""Counters as pinned BPF maps: the pages of live ranks, for bpftool and other readers of maps.

Each group of counters has a map, made from the names on the pages. Its BTF has the names, so no compiler is needed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from sennit.closing import Closing
from sennit.ebpf.library import BpfError
from sennit.ebpf.pins import BPFFS, PinFolder
from sennit.ebpf.typed_maps import TypedHash
from sennit.runtime.telemetry.samples import STANDARD_NAMES, UNUSED
from sennit.transport.counters import Block, Page

FOLDER_NAME: Final = "counters"
ENTRIES_MAX: Final = 1 << 16
# There are eight groups of counters. More may come, because any process may write pages.
MAPS_MAX: Final = 64
# The most entries and maps that pages of one other user may take.
FOREIGN_ENTRIES_MAX: Final = ENTRIES_MAX // 8
FOREIGN_MAPS_MAX: Final = MAPS_MAX // 4
KEY: Final = np.dtype(
    [("page", "<u8"), ("process", "<u4"), ("rank", "<u4"), ("peer", "<i4"), ("path", "<i4"), ("user", "<u4")]
)
"""The number of a page tells process groups of one process apart; peer and path are -1 if there is none; `user` owns
the page.
"""
NONE: Final = -1

Key = tuple[int, ...]


class Publisher(Closing):
    """The maps, pinned in the BPF file system until `close`."""

    def __init__(self, bpffs: Path = BPFFS) -> None:
        """Raises BpfError without the right to, or if another process already publishes there."""
        self._folder = PinFolder(FOLDER_NAME, bpffs)
        self.path = self._folder.path
        self._maps: dict[tuple[str, tuple[str, ...]], TypedHash] = {}
        self._keys: dict[tuple[str, tuple[str, ...]], set[Key]] = {}
        self._entries_of: Counter[int] = Counter()
        self._maps_of: Counter[int] = Counter()
        self.refused: dict[str, str] = {}
        """Group of counters -> why it has no map."""

    def publish(self, pages: Iterable[Page]) -> int:
        """Updates the maps to the pages of live ranks. Returns the number of entries."""
        before, self._keys = self._keys, {}
        self._entries_of.clear()
        for page in pages:
            if page.is_alive:
                for block in page.blocks:
                    self._write(page, block)
        for kind, keys in before.items():
            for key in keys - self._keys.get(kind, set()):
                del self._maps[kind][key]
        return sum(map(len, self._keys.values()))

    def _write(self, page: Page, block: Block) -> None:
        names = tuple(STANDARD_NAMES.get(name, name) for name in block.values if name != UNUSED)
        kind = block.group, names
        try:
            key = _key(page, block)
            self._entries_of[page.owner] += 1
            if page.owner != os.geteuid() and self._entries_of[page.owner] > FOREIGN_ENTRIES_MAX:
                raise ValueError(f"more than {FOREIGN_ENTRIES_MAX:,} entries of user {page.owner}")
            self._map(kind, page.owner)[key] = tuple(value for name, value in block.values.items() if name != UNUSED)
        except (BpfError, ValueError, OverflowError) as error:  # too many, or a malformed page
            self.refused[block.group] = f"{error}".splitlines()[0]
            return
        self._keys.setdefault(kind, set()).add(key)

    def _map(self, kind: tuple[str, tuple[str, ...]], owner: int) -> TypedHash:
        group, names = kind
        if kind not in self._maps:
            if not group.isidentifier() or not names:
                raise ValueError(f"{group!r} is no group of counters")
            most = MAPS_MAX if owner == os.geteuid() else FOREIGN_MAPS_MAX
            if len(self._maps) == MAPS_MAX or self._maps_of[owner] == most:
                raise ValueError(f"more than {most} groups of counters")
            self._maps_of[owner] += 1
            dtype = np.dtype([(name, "<u8") for name in names])
            made = TypedHash(group, key=KEY, value=dtype, entries=ENTRIES_MAX)
            # Ranks of two versions of sennit may have different counters in a group.
            versions = 1 + sum(known == group for known, _ in self._maps)
            try:
                self._folder.pin(made.map, group if versions == 1 else f"{group}-{versions}")
            except BpfError:
                made.close()
                raise
            self._maps[kind] = made
        return self._maps[kind]

    def close(self) -> None:
        self._folder.close()
        for made in self._maps.values():
            made.close()
        self._maps.clear()


def _key(page: Page, block: Block) -> Key:
    peer, path = (NONE if number is None else number for number in (block.peer, block.path))
    return int(page.number, 16), page.process, page.rank, peer, path, page.owner
