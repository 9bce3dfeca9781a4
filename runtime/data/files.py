# SPDX-License-Identifier: Apache-2.0
"""Finds data files: on this machine, or behind any protocol that fsspec knows (s3://, gs://, memory://, …)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Final

from sennit import surroundings
from sennit.runtime.data.errors import DataError, MissingPackage
from sennit.runtime.data.packages import require

_PURPOSE = "a data set of files"
FORMATS: Final = {
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".txt": "TSV",
}
"""The format that the end of a file's name says. Text may be compressed: `.csv.gz`."""

COMPRESSED: Final = ".gz"
_SIGNS: Final = "*?["
_SKIPPED: Final = ("_", ".")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file. Messages show it as `str()`."""

    name: str
    filesystem: Any
    """An fsspec filesystem."""

    path: str
    """The path within the filesystem."""

    def __str__(self) -> str:
        return self.name

    @property
    def format(self) -> str | None:
        """As in `FORMATS`. None where the name does not say it."""
        return _format(self.path)

    @property
    def is_local(self) -> bool:
        return "file" in self.filesystem.protocol

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
    are skipped, as other tools do. Raises DataError for a path without files, and for a folder with two formats.
    """
    found: list[DataFile] = []
    for path in paths:
        files = _find(path)
        if not files:
            suffixes = ", ".join(f"*{suffix}" for suffix in FORMATS)
            raise DataError(
                f"data set {path!r}: no such file, and no folder or pattern with files ({suffixes}, also with "
                f"{COMPRESSED}); give a path that has them"
            )
        found += files
    return tuple(found)


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
        filesystem, root = _located(path)
        is_pattern = any(sign in root for sign in _SIGNS)
        while any(sign in root for sign in _SIGNS):
            root = str(PurePosixPath(root).parent)
        if not filesystem.isdir(root):
            what = "no such folder" if is_pattern or not filesystem.exists(root) else "is one file"
            raise DataError(f"data set {path!r}: {what}; allowed with --follow: a folder that there is, or a pattern")
        return GrowingFolder(path=path, filesystem=filesystem, root=root)

    def files(self) -> list[DataFile]:
        """The files that are there now, by name. Names that begin with `_` or `.` are skipped, in patterns, too."""
        self.filesystem.invalidate_cache()
        return [file for file in _find(self.path) if not PurePosixPath(file.path).name.startswith(_SKIPPED)]

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name now."""
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(f"{self.root.rstrip('/')}/{name}"))


def _located(path: str) -> tuple[Any, str]:
    """The filesystem, and the path within it."""
    core = require("fsspec.core", package="fsspec", purpose=_PURPOSE)
    try:
        filesystem, root = core.url_to_fs(path)
    except ImportError as error:  # fsspec says which package has the protocol
        raise MissingPackage(f"for {path.partition('://')[0]}://", _PURPOSE, install=str(error)) from error
    except Exception as error:  # filesystems have many authors, and errors of many types
        raise DataError(f"data set {path!r}: {_reason(error)}{_behind_proxy(path)}") from error
    return filesystem, str(root)


def _find(path: str) -> list[DataFile]:
    """The files of one path, by name; none if there are none."""
    filesystem, root = _located(path)
    is_folder = False
    try:
        if any(sign in root for sign in _SIGNS):
            # As in a shell, `*` is not the dot that hides a file.
            hidden = PurePosixPath(root).name.startswith(".")
            found = sorted(part for part in filesystem.glob(root) if hidden or not _is_hidden(part))
        elif is_folder := filesystem.isdir(root):
            found = sorted(part for part in filesystem.find(root) if _is_part(part.removeprefix(root)))
        else:
            found = [root] if filesystem.exists(root) else []
    except Exception as error:  # as above
        raise DataError(f"data set {path!r}: {_reason(error)}{_behind_proxy(path)}") from error
    if not found:
        return []
    first = found[0]
    if is_folder and (other := next((part for part in found if _format(part) != _format(first)), None)):
        raise DataError(
            f"data set {path!r}: has {_format(first)} files and {_format(other)} files ({_name(path, root, other)}); "
            f"allowed in a folder: one format; give a pattern of the files that you mean"
        )
    return [DataFile(name=_name(path, root, part), filesystem=filesystem, path=part) for part in found]


def _is_part(below: str) -> bool:
    return _format(below) is not None and not any(name.startswith(_SKIPPED) for name in below.split("/"))


def _is_hidden(path: str) -> bool:
    return PurePosixPath(path).name.startswith(".")


def _format(path: str) -> str | None:
    found = FORMATS.get(PurePosixPath(path.removesuffix(COMPRESSED)).suffix)
    return None if path.endswith(COMPRESSED) and found not in ("CSV", "TSV") else found


def _name(path: str, root: str, part: str) -> str:
    """The file's name as the user would write it."""
    if part == root:
        return path
    protocol, separator, _ = path.rpartition("://")
    return f"{protocol}{separator}{part}"


def _behind_proxy(name: str) -> str:
    """Advice for an object store that does not answer: a proxy may stand before it."""
    if name.rpartition("://")[0] in ("", "file", "local", "memory") or (found := surroundings.proxy()).fine:
        return ""
    return f" ({found.what}; {found.remedy})"


def _reason(error: Exception) -> str:
    text = str(error) or "failed"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
