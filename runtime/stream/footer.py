# SPDX-License-Identifier: Apache-2.0
"""Footers of binary files: what tells one Parquet or Arrow file from another without reading its rows.

Both formats end in a footer, its length as a little-endian int32, and a magic (Parquet format, "File Format"; Arrow
columnar format, "IPC File Format").
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.files import DataFile

_LENGTH_BYTES: Final = 4
_END_BYTES: Final = 1 << 16
"""Where row groups were written is in a footer, the last of them at its end. So a change in any moves these bytes."""


def read_tail(file: DataFile, stream: Any, magic: bytes, kind: str) -> bytes:
    """The footer of an open file with the length and the magic after it. Raises Incomplete for a file without one."""
    size = stream.size()
    tail = _read(stream, max(0, size - _LENGTH_BYTES - len(magic)))
    if not tail.endswith(magic) or len(tail) < _LENGTH_BYTES + len(magic):
        raise Incomplete(f"{file}: not a whole {kind} file: {size} bytes, and the last ones are not {magic.decode()}")
    length = int.from_bytes(tail[:_LENGTH_BYTES], "little")
    if length + len(tail) > size:
        raise Incomplete(f"{file}: not a whole {kind} file: {size} bytes, with a footer of {length}")
    return _read(stream, size - len(tail) - length)


def digest_of(stream: Any, tail: bytes) -> str:
    return hashlib.sha256(stream.size().to_bytes(8, "little") + tail).hexdigest()


def end_digest(stream: Any) -> str:
    """Size and last bytes of an open file: enough to notice, in no time, that a file was replaced or cut."""
    return digest_of(stream, _read(stream, max(0, stream.size() - _END_BYTES)))


def changed(file: DataFile) -> DataError:
    """What is raised where a file is not the one that the index was made of."""
    return DataError(
        f"{file}: changed since the run began; allowed: files that stay as they are while a run reads them"
    )


def _read(stream: Any, begin: int) -> bytes:
    stream.seek(begin)
    return bytes(stream.read())
