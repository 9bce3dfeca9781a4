# SPDX-License-Identifier: Apache-2.0
"""Finds data files: on this machine, or behind any protocol that fsspec knows (s3://, gs://, memory://, …)."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Final

from sennit import surroundings
from sennit.runtime.data.errors import DataError, MissingPackage
from sennit.runtime.data.local_folder import is_hidden, listed
from sennit.runtime.data.packages import require
from sennit.transport import descriptors

_PURPOSE = "a data set of files"
FORMATS: Final = {
    ".parquet": "Parquet",
    ".parq": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".txt": "TSV",
}
"""The format that the end of a file's name says, in small letters or capitals. Text may be compressed: `.csv.gz`."""

CODECS: Final = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""How text is compressed, as pyarrow names it, by the end of a file's name."""

_OTHER_FORMATS: Final = (".orc", ".avro", ".jsonl", ".ndjson", ".tfrecord", ".tfrecords")
_OTHER_CODECS: Final = (".lz4", ".xz", ".zip", ".br", ".snappy", ".sz", ".lzma", ".7z")
"""Of data that nobody reads here. A folder with such a file is refused, so that its rows are not left out unseen."""

_SIGNS: Final = "*?["


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file. Messages show it as `str()`."""

    name: str
    filesystem: Any
    """An fsspec filesystem."""

    path: str
    """The path within the filesystem."""

    base: str = ""
    """The folder that was named, or the one of the file that was named, or what a pattern has before its first sign."""

    def __str__(self) -> str:
        return self.name

    @property
    def format(self) -> str | None:
        """As in `FORMATS`. None where the name does not say it."""
        return _format(self.path)

    @property
    def is_local(self) -> bool:
        return _is_local(self.filesystem)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The same for all names of one file, also for links to it."""
        if self.is_local:
            with suppress(OSError):  # it is gone, and whoever opens it is told so
                found = os.stat(self.path)
                return found.st_dev, found.st_ino
        return self.filesystem, self.path

    @property
    def size_bytes(self) -> int | None:
        """How large it is now; None if it cannot be told."""
        try:
            size = self.filesystem.info(self.path)["size"]
        except Exception:  # as in `open`, which says what is wrong
            return None
        return None if size is None else int(size)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Opens the file for reading.

        Errors of the filesystem, here or during reading, become a DataError with the file's name.
        """
        try:
            with self.filesystem.open(self.path, "rb") as stream:
                yield stream
        except DataError:
            raise
        except Exception as error:  # filesystems have many authors, and errors of many types
            raise DataError(f"{self.name}: {_reason(error)}{_behind_proxy(self.name)}") from error

    @contextmanager
    def open_native(self) -> Iterator[Any]:
        """Opens the file as a `pyarrow.NativeFile`. Arrow reads local files without Python, and in its own threads.

        Local files are not mapped into memory: a process that reads from a map of a file that is cut short is killed.
        Raises DataError as `open` does.
        """
        arrow = require("pyarrow", package="pyarrow", purpose="reading data files")
        if not self.is_local:
            with self.open() as stream, arrow.PythonFile(stream, mode="r") as native:
                yield native
            return
        try:
            with arrow.OSFile(self.path) as native:
                yield native
        except OSError as error:
            raise DataError(f"{self.name}: {_reason(error)}") from error


def find_files(paths: Iterable[str]) -> tuple[DataFile, ...]:
    """The files that these paths name, in this order: files, patterns (`*`), and folders, sorted by name.

    Of folders and their subfolders, the files whose names say their format are taken. Names that begin with `_` or `.`
    are skipped, as other tools do; a pattern may name them (`.*`). A folder that a pattern matches is read as a folder,
    and links are followed. A path that exists as it is written is no pattern. Raises DataError for a path without
    files, for a folder with two formats or with data of a format that is not read, for what is no regular file, and for
    a file that is found twice.
    """
    found: list[DataFile] = []
    for path in paths:
        files = _find(path)
        if not files:
            raise DataError(
                f"data set {path!r}: no such file, and no folder or pattern with files ({_endings()}); give a path "
                "that has them"
            )
        found += files
    check_once(found)
    return tuple(found)


def check_once(files: Iterable[DataFile]) -> None:
    """Raises DataError if a file is among these twice: its rows would count twice, or be trained on and evaluated."""
    seen: dict[tuple[Any, ...], DataFile] = {}
    for file in files:
        if (other := seen.setdefault(file.identity, file)) is not file:
            also = "" if other.path == file.path else f", also as {other}"
            raise DataError(f"{file}: given twice{also}; allowed: each file once, to train on or to evaluate")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingFolder:
    """A folder, or a pattern, that gets files."""

    path: str
    """As the user wrote it."""

    filesystem: Any
    root: str
    """The folder within the filesystem, or the last one of the pattern that has no sign of a pattern."""

    @staticmethod
    def of(path: str) -> GrowingFolder:
        """Raises DataError for a path that is neither a folder nor a pattern in one."""
        filesystem, place = _located(path)
        root, pattern = _cut(filesystem, place)
        if not filesystem.isdir(root):
            what = "no such folder" if pattern or not filesystem.exists(root) else "is one file"
            raise DataError(f"data set {path!r}: {what}; allowed with --follow: a folder that there is, or a pattern")
        return GrowingFolder(path=path, filesystem=filesystem, root=root)

    def files(self) -> list[DataFile]:
        """The files that are there now, by name. Names that begin with `_` or `.` are skipped, whatever the pattern."""
        self.filesystem.invalidate_cache()
        return [file for file in _find(self.path) if not is_hidden(file.path.removeprefix(self.root))]

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name now."""
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(f"{self.root.rstrip('/')}/{name}"))


def _located(path: str) -> tuple[Any, str]:
    """The filesystem, and the path within it."""
    core = require("fsspec.core", package="fsspec", purpose=_PURPOSE)
    if "::" in path and "://" not in path:  # to fsspec, filesystems in one another
        return core.filesystem("file"), os.path.abspath(os.path.expanduser(path))
    try:
        filesystem, root = core.url_to_fs(path)
    except ImportError as error:  # fsspec says which package has the protocol
        raise MissingPackage(f"for {path.partition('://')[0]}://", _PURPOSE, install=str(error)) from error
    except Exception as error:  # filesystems have many authors, and errors of many types
        raise DataError(f"data set {path!r}: {_reason(error)}{_behind_proxy(path)}") from error
    return filesystem, str(root)


def _cut(filesystem: Any, path: str) -> tuple[str, list[str]]:
    """The path up to its first name with a sign of a pattern, and the names from there on. What exists is no pattern,
    whatever signs it has.
    """
    names = path.split("/")
    for number, name in enumerate(names):
        if any(sign in name for sign in _SIGNS) and not filesystem.exists("/".join(names[: number + 1])):
            root = "/" if path.startswith("/") else ""
            return "/".join(names[:number]) or root, [name for name in names[number:] if name]
    return path, []


def _find(path: str) -> list[DataFile]:
    """The files of one path, by name; none if there are none."""
    filesystem, place = _located(path)
    try:
        base, pattern = _cut(filesystem, place)
        if pattern:
            found = _matching(path, filesystem, place, base, pattern)
        elif filesystem.isdir(place):
            found = _parts(path, place, _below(filesystem, place))
        else:
            base = str(PurePosixPath(place).parent)
            found = {place} if filesystem.exists(place) else set()
        names = {part: path if part == place else _name(path, part) for part in sorted(found)}
        files = [DataFile(name=name, filesystem=filesystem, path=part, base=base) for part, name in names.items()]
        for file in files:
            # Opening a FIFO waits for whoever writes to it, and what has been read does not come again.
            if file.is_local and not stat.S_ISREG(os.stat(file.path).st_mode):
                raise DataError(f"{file}: a FIFO, a socket or a device; allowed: files, which are read more than once")
    except DataError:
        raise
    except Exception as error:  # as above
        raise DataError(f"data set {path!r}: {_reason(error)}{_behind_proxy(path)}") from error
    return files


def _matching(path: str, filesystem: Any, place: str, base: str, pattern: list[str]) -> set[str]:
    """What matches `pattern` below the folder `base`, which is `place`. Of a folder that does, its files."""
    by_folder: dict[str | None, list[str]] = {}
    if _is_local(filesystem):
        for part, folder in listed(base, pattern):
            by_folder.setdefault(folder, []).append(part)
    else:
        for part, about in filesystem.glob(place, detail=True).items():
            # As in a shell, a sign does not match the begin of a name that hides a file.
            hidden = [name for name in part.removeprefix(base).split("/") if is_hidden(name)]
            if not all(any(one[:1] == name[0] and fnmatch.fnmatch(name, one) for one in pattern) for name in hidden):
                continue
            if about["type"] != "file" and filesystem.isdir(part):
                by_folder[part] = _below(filesystem, part)
            else:
                by_folder.setdefault(None, []).append(part)
    found = set(by_folder.pop(None, []))
    for folder, every in by_folder.items():
        found |= _parts(path, str(folder), every)
    return found


def _below(filesystem: Any, folder: str) -> list[str]:
    """All files below a folder, and perhaps hidden ones."""
    if _is_local(filesystem):
        return [part for part, _ in listed(folder)]
    return list(filesystem.find(folder))


def _parts(path: str, folder: str, every: Iterable[str]) -> set[str]:
    """Of the files below a folder, those whose names say their format."""
    shown = sorted(part for part in every if not is_hidden(part.removeprefix(folder)))
    _check_read(path, shown)
    found = [part for part in shown if _format(part) is not None]
    first = next(iter(found), "")
    if other := next((part for part in found if _format(part) != _format(first)), None):
        raise DataError(
            f"data set {path!r}: has {_format(first)} files and {_format(other)} files ({_name(path, other)}); "
            f"allowed in a folder: one format; give a pattern of the files that you mean"
        )
    return set(found)


def _check_read(path: str, parts: Iterable[str]) -> None:
    """Raises DataError for the first of a folder's files that is data by its name, but not in a format that is read."""
    for part in parts:
        suffixes = [suffix.lower() for suffix in PurePosixPath(part).suffixes[-2:]]
        if suffixes and suffixes[-1] in (*CODECS, *_OTHER_CODECS):
            suffixes.pop()
        if suffixes and suffixes[-1] in (*FORMATS, *_OTHER_FORMATS) and _format(part) is None:
            raise DataError(
                f"data set {path!r}: has {_name(path, part)}, which cannot be read; allowed in a folder: "
                f"{_endings()}; give a pattern of the files that you mean"
            )


def _endings() -> str:
    """What the names of files end in."""
    return f"{', '.join(f'*{suffix}' for suffix in FORMATS)}, text also with {', '.join(CODECS)}"


def _is_local(filesystem: Any) -> bool:
    return "file" in filesystem.protocol


def _format(path: str) -> str | None:
    name = PurePosixPath(path.lower())
    if name.suffix not in CODECS:
        return FORMATS.get(name.suffix)
    found = FORMATS.get(name.with_suffix("").suffix)
    return found if found in ("CSV", "TSV") else None


def _name(path: str, part: str) -> str:
    """The file's name as the user would write it."""
    protocol, separator, _ = path.rpartition("://")
    return f"{protocol}{separator}{part}"


def _behind_proxy(name: str) -> str:
    """Advice for an object store that does not answer: a proxy may stand before it."""
    if name.rpartition("://")[0] in ("", "file", "local", "memory") or (found := surroundings.proxy()).fine:
        return ""
    return f" ({found.what}; {found.remedy})"


def _reason(error: Exception) -> str:
    text = str(error) or "failed"
    if limit := descriptors.limit(error):
        text += (
            f". {limit}. A shuffled stream has a file open for each slice of a rank: --slices by the number of ranks"
        )
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
