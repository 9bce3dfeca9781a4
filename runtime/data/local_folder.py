# SPDX-License-Identifier: Apache-2.0
"""Lists what is below a folder of this machine, or matches a pattern in it. Links to folders are followed.

fsspec does not follow them, and leaves out what it may not list, both without a word.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

_SKIPPED: Final = ("_", ".")
LOST_AND_FOUND: Final = "lost+found"
"""A folder of root's at the root of a disk with ext4, which nobody else may list."""

_ALL: Final = "**"

_Identity = tuple[int, int]
_Wanted = frozenset[tuple[str, ...]]


def is_hidden(path: str) -> bool:
    """Whether a part of the path hides what is below it."""
    return any(name.startswith(_SKIPPED) for name in path.split("/"))


def listed(folder: str, pattern: Sequence[str] = (_ALL,)) -> Iterator[tuple[str, str | None]]:
    """Yields (path, matched) of files below `folder`, in any order. A path may come twice.

    `matched`: the folder above the file that the pattern matches; None if the pattern matches the file itself.

    `pattern`: for each level one, as in a shell, so that a sign does not match the begin of a name that hides a file;
    `**` matches any number of levels. A link to a folder that it is in is not followed. Raises OSError for a folder
    that cannot be listed.
    """
    above = frozenset(_identity(str(one)) for one in PurePosixPath(os.path.realpath(folder)).parents)
    yield from _below(folder, frozenset([tuple(pattern)]), above, None)


def _below(
    folder: str, wanted: _Wanted, above: frozenset[_Identity], matched: str | None
) -> Iterator[tuple[str, str | None]]:
    try:
        # Once for all folders above, so that a link back to one of them ends.
        if (own := _identity(folder)) in above:
            return
        with os.scandir(folder) as found:
            entries = list(found)
    except (FileNotFoundError, NotADirectoryError):
        return  # writers remove folders of their own while others look
    except PermissionError:
        if PurePosixPath(folder).name == LOST_AND_FOUND:
            return
        raise
    inner = above | {own}
    wanted |= {one[1:] for one in wanted if one[0] == _ALL and len(one) > 1}
    for entry in entries:
        path = f"{folder.rstrip('/')}/{entry.name}"
        fitting = [one for one in wanted if _fits(entry.name, one[0])]
        if not _is_folder(entry):
            if any(len(one) == 1 for one in fitting):
                yield path, matched
            continue
        if any(len(one) == 1 and one[0] != _ALL for one in fitting):
            yield from _below(path, frozenset([(_ALL,)]), inner, path)
        if further := frozenset(one if one[0] == _ALL else one[1:] for one in fitting) - {()}:
            yield from _below(path, further, inner, matched)


def _fits(name: str, one: str) -> bool:
    if is_hidden(name):
        return one[:1] == name[0] and fnmatch.fnmatchcase(name, one)
    return fnmatch.fnmatchcase(name, one)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads nowhere; whoever wants the file is told so
        return False


def _identity(path: str) -> _Identity:
    found = os.stat(path)
    return found.st_dev, found.st_ino
