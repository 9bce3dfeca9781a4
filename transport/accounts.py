# SPDX-License-Identifier: Apache-2.0
"""Who answers for the number of a user: with user namespaces, one user may have 65,536 numbers.

A file of its own, because it is about users, and not about what they count.
"""

from __future__ import annotations

import pwd
from bisect import bisect_right
from pathlib import Path
from typing import Final

SUBORDINATES: Final = Path("/etc/subuid")
"""Lines `user:first:count`, the user by name or by number (subuid(5))."""


class Accounts:
    """Users and the subordinate numbers that `/etc/subuid` gives them. Reads that file once, when it is first asked."""

    def __init__(self, subordinates: Path = SUBORDINATES) -> None:
        self._file = subordinates
        self._ranges: list[tuple[int, int, str]] | None = None
        """(first, end, user), in order."""

        self._known: dict[int, int] = {}

    def of(self, user: int) -> int:
        """The user who has `user` among its subordinate numbers, else `user`."""
        if user not in self._known:
            self._known[user] = self._found(user)
        return self._known[user]

    def _found(self, user: int) -> int:
        if self._ranges is None:
            self._ranges = self._read()
        at = bisect_right(self._ranges, user, key=lambda one: one[0]) - 1
        if at < 0 or user >= self._ranges[at][1]:
            return user
        first, _, name = self._ranges[at]
        try:
            return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
        except KeyError:  # of a user who is gone: the range has one account nevertheless
            return first

    def _read(self) -> list[tuple[int, int, str]]:
        try:
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            name, first, count = [*line.strip().split(":"), "", ""][:3]
            if name and first.isdecimal() and count.isdecimal():
                found.append((int(first), int(first) + int(count), name))
        return sorted(found)
