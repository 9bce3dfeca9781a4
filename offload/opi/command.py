# SPDX-License-Identifier: Apache-2.0
"""The command line of `sennit opi`. Its modules are imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from sennit.command_line import fail, listen_address


def opi(
    listen: Annotated[str, typer.Option(help="ADDRESS:PORT of gRPC; whoever reaches it may use it")] = (
        "127.0.0.1:50051"
    ),
    volumes: Annotated[
        Path, typer.Option(metavar="FOLDER", help="with files, or links to disks, that clients may make volumes of")
    ] = Path("/var/lib/sennit/volumes"),
) -> None:
    """Say what this machine is, and lend its disks over NVMe/TCP, over OPI's gRPC interfaces.

    Lending needs root and the kernel's NVMe target. SIGTERM or Ctrl-C ends it, and nothing stays lent.
    """
    from sennit.errors import DeviceError
    from sennit.offload.opi.server import Server
    from sennit.offload.opi.storage import Storage

    address, _ = listen_address("--listen", listen, "127.0.0.1:50051")
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        server = Server(listen, Storage(volumes.absolute()))
    except DeviceError as error:
        fail(error)
    with server:
        typer.echo(f"sennit opi: ready at {address or '*'}:{server.port}, volumes below {volumes.absolute()}", err=True)
        ended.wait()
