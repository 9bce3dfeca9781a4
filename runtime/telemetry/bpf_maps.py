# SPDX-License-Identifier: Apache-2.0
"""Counters as pinned BPF maps: the pages of live ranks, for bpftool and other readers of maps.

Each group of counters has a map, made from the names on the pages. Its BTF has the names, so no compiler is needed.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Final

import numpy as np

from sennit.closing import Closing
from sennit.ebpf.library import BpfError
from sennit.ebpf.pins import BPFFS, PinFolder
from sennit.ebpf.typed_maps import TypedHash
from sennit.runtime.telemetry.samples import STANDARD_NAMES, UNUSED
from sennit.transport.counters import Block, Page, shares

FOLDER_NAME: Final = "counters"
ENTRIES_MAX: Final = 1 << 16
# There are a dozen groups of counters, and one for each dynamic table.
OWN_MAPS_MAX: Final = 64
# The most maps and entries that pages of all other users together may take, in equal shares.
FOREIGN_MAPS_MAX: Final = 32
FOREIGN_ENTRIES_MAX: Final = ENTRIES_MAX // 2
KEY: Final = np.dtype(
    [("page", "<u8"), ("process", "<u4"), ("rank", "<u4"), ("peer", "<i4"), ("path", "<i4"), ("user", "<u4")]
)
"""The number of a page tells process groups of one process apart; peer and path are -1 if there is none; `user` owns
the page.
"""
NONE: Final = -1
OWN: Final = -1
"""In place of the account: this user's pages."""

Key = tuple[int, ...]
Kind = tuple[str, tuple[str, ...]]
"""A group and the names of its counters. Ranks of two versions of sennit may have different ones."""
Entries = dict[Kind, dict[Key, tuple[int, ...]]]


class Publisher(Closing):
    """The maps, pinned in the BPF file system until `close`."""

    def __init__(self, bpffs: Path = BPFFS) -> None:
        """Raises BpfError without the right to, or if another process already publishes there."""
        self._folder = PinFolder(FOLDER_NAME, bpffs)
        self.path = self._folder.path
        self._maps: dict[Kind, TypedHash] = {}
        self._pins: dict[Kind, Path] = {}
        self._own: set[Kind] = set()
        """Kinds that a page of this user has had. Other maps end with their last entry."""

        self._keys: dict[Kind, set[Key]] = {}
        self.refused: dict[str, str] = {}
        """Group of counters, or another user -> why some of it is in no map, as of the last `publish`."""

    def publish(self, pages: Iterable[Page]) -> int:
        """Updates the maps to the pages of live ranks. Returns the number of entries."""
        reader = os.geteuid()
        self.refused = {}
        own: Entries = {}
        foreign: defaultdict[int, Entries] = defaultdict(dict)
        for page in pages:
            if page.is_alive:
                self._collect(own if page.owner == reader else foreign[page.account], page)
        chosen = [(kind, entries, OWN) for kind, entries in own.items()]
        chosen += self._share(foreign, own.keys() | self._own)
        wanted: defaultdict[Kind, set[Key]] = defaultdict(set)
        for kind, entries, _ in chosen:
            wanted[kind].update(entries)
        self._forget(wanted)
        for kind, entries, account in chosen:
            self._write(kind, entries, account)
        return sum(map(len, self._keys.values()))

    def _collect(self, into: Entries, page: Page) -> None:
        for block in page.blocks:
            shown = {STANDARD_NAMES.get(name, name): value for name, value in block.values.items() if name != UNUSED}
            try:
                into.setdefault((block.group, tuple(shown)), {})[_key(page, block)] = tuple(shown.values())
            except ValueError as error:
                self.refused[block.group] = f"{error}"

    def _share(
        self, foreign: Mapping[int, Entries], known: Set[Kind]
    ) -> list[tuple[Kind, dict[Key, tuple[int, ...]], int]]:
        """What other users get: new maps beside those that are `known`, and entries."""
        # A map is for all users who have its kind, so it counts once: for the one with the fewest kinds.
        payer: dict[Kind, int] = {}
        for account in sorted(foreign, key=lambda one: len(foreign[one])):
            for kind in foreign[account]:
                if kind not in known:
                    payer.setdefault(kind, account)
        counted = Counter(payer.values())
        maps = shares({account: counted[account] for account in foreign}, FOREIGN_MAPS_MAX)
        has_map = set(known)
        for kind, account in payer.items():
            if maps[account] > 0:
                maps[account] -= 1
                has_map.add(kind)
        left = {account: sum(map(len, entries.values())) for account, entries in foreign.items()}
        left = shares(left, FOREIGN_ENTRIES_MAX)
        found = []
        for account, kinds in foreign.items():
            for kind, entries in kinds.items():
                kept = dict(itertools.islice(entries.items(), left[account] if kind in has_map else 0))
                left[account] -= len(kept)
                if len(kept) < len(entries):
                    self.refused[f"user {account}"] = (
                        f"other users have {FOREIGN_MAPS_MAX} maps and {FOREIGN_ENTRIES_MAX:,} entries, in equal shares"
                    )
                if kept:
                    found.append((kind, kept, account))
        return found

    def _forget(self, wanted: Mapping[Kind, set[Key]]) -> None:
        """Before anything is written, because a full map takes no new entry."""
        for kind, keys in self._keys.items():
            for key in keys - wanted.get(kind, set()):
                del self._maps[kind][key]
            keys &= wanted.get(kind, set())
        for kind in self._maps.keys() - wanted.keys() - self._own:
            self._pins.pop(kind).unlink(missing_ok=True)
            self._maps.pop(kind).close()
            del self._keys[kind]

    def _write(self, kind: Kind, entries: Mapping[Key, tuple[int, ...]], account: int) -> None:
        try:
            into = self._map(kind, is_own=account == OWN)
        except (BpfError, ValueError) as error:
            self._refuse(kind, account, error)
            return
        for key, value in entries.items():
            try:
                into[key] = value
            except (BpfError, OverflowError) as error:  # the map is full, or a number of a page that lies
                self._refuse(kind, account, error)
            else:
                self._keys[kind].add(key)

    def _refuse(self, kind: Kind, account: int, error: Exception) -> None:
        self.refused[kind[0] if account == OWN else f"user {account}"] = f"{error}".splitlines()[0]

    def _map(self, kind: Kind, *, is_own: bool) -> TypedHash:
        group, names = kind
        if is_own and kind not in self._own:
            if len(self._own) == OWN_MAPS_MAX:
                raise ValueError(f"more than {OWN_MAPS_MAX} groups of counters")
            self._give_way(kind)
        if kind not in self._maps:
            if not group.isidentifier() or not names:
                raise ValueError(f"{group!r} is no group of counters")
            dtype = np.dtype([(name, "<u8") for name in names])
            made = TypedHash(group, key=KEY, value=dtype, entries=ENTRIES_MAX)
            try:
                self._pins[kind] = self._folder.pin(made.map, self._free_name(group))
            except BpfError:
                made.close()
                raise
            self._maps[kind], self._keys[kind] = made, set()
        if is_own:
            self._own.add(kind)
        return self._maps[kind]

    def _give_way(self, kind: Kind) -> None:
        """Renames a map of other users' pages that has the plain name of a group of this user's pages."""
        plain = self.path / kind[0]
        holder = next((one for one, pin in self._pins.items() if pin == plain), kind)
        if holder != kind and holder not in self._own:
            self._pins[holder] = self._folder.pin(self._maps[holder].map, self._free_name(kind[0]))
            plain.unlink(missing_ok=True)

    def _free_name(self, group: str) -> str:
        """The group, with a number if ranks of another version have that name."""
        taken = {pin.name for pin in self._pins.values()}
        names = itertools.chain([group], (f"{group}-{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def close(self) -> None:
        self._folder.close()
        for made in self._maps.values():
            made.close()
        self._maps.clear()


def _key(page: Page, block: Block) -> Key:
    peer, path = (NONE if number is None else number for number in (block.peer, block.path))
    return int(page.number, 16), page.process, page.rank, peer, path, page.owner
