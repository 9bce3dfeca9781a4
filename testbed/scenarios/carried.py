# SPDX-License-Identifier: Apache-2.0
"""Carries a folder from one host of a topology to another over one of its networks, as a storage server would."""

from __future__ import annotations

import filecmp
import socket
import tarfile
import threading
from pathlib import Path
from typing import Final

from sennit.testbed.topology import Planes

PORT: Final = 2049
CARRY_TIMEOUT_S: Final = 60.0


def carry(planes: Planes, folder: Path, target: Path, *, source: int, destination: int, address: str) -> int:
    """Sends `folder` from host `source` to host `destination`, which has `address`. Returns the bytes of its files.

    All hosts of a topology see the same disks, so that only sockets of both hosts make the bytes travel. Raises OSError
    if they do not arrive as they were.
    """
    with (
        planes.within(destination, socket.create_server, (address, PORT)) as server,
        planes.within(source, socket.create_connection, (address, PORT), CARRY_TIMEOUT_S) as sender,
    ):
        server.settimeout(CARRY_TIMEOUT_S)
        receiver, _ = server.accept()
        with receiver:
            receiver.settimeout(CARRY_TIMEOUT_S)
            thread = threading.Thread(target=_send, args=(folder, sender), name="carry", daemon=True)
            thread.start()
            with receiver.makefile("rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                # Python 3.11 before its fourth patch has no filters.
                archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                archive.extractall(target)
            thread.join(CARRY_TIMEOUT_S)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    _, different, missing = filecmp.cmpfiles(folder, target, names, shallow=False)
    if different or missing:
        raise OSError(f"{folder} did not arrive whole: {[*different, *missing]}")
    return sum((target / name).stat().st_size for name in names)


def _send(folder: Path, sender: socket.socket) -> None:
    with sender.makefile("wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        archive.add(folder, arcname=".")
    sender.shutdown(socket.SHUT_WR)
