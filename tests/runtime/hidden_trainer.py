# SPDX-License-Identifier: Apache-2.0
"""`sennit train` whose ranks tell feeders a port where nobody listens: they are forks of this process."""

from __future__ import annotations

import socket
from typing import Any

from sennit.runtime.ingest.fed import Door
from sennit.runtime.training import run
from sennit.runtime.training.command import main


class Hidden(socket.socket):
    def getsockname(self) -> Any:
        return ("127.0.0.1", 9)


class HiddenDoor(Door):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.listener = Hidden(fileno=self.listener.detach())


run.Door = HiddenDoor  # type: ignore[assignment,attr-defined]

if __name__ == "__main__":
    main(forked=True)
