# SPDX-License-Identifier: Apache-2.0
"""Captures what passes an interface into a pcap file, by dumpcap."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from pathlib import Path
from typing import Final

SNAP_BYTES: Final = 256  # all our headers
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
_DROPPED: Final = re.compile(r"received/dropped on interface .*?: (\d+)/(\d+)")


class Capture:
    """A running capture; `stop` ends it. Packets that arrive at the very end may be missing."""

    def __init__(self, entry: list[str], interface: str, path: Path, snap_bytes: int) -> None:
        """`entry`: a command prefix that enters the interface's namespace."""
        self.path = path
        self.packets = 0
        """Packets in the file; known after `stop`."""
        self.dropped = 0
        """Packets that dumpcap was too slow for; known after `stop`."""
        command = [*entry, "dumpcap", "-q", "-P", "-i", interface, "-s", f"{snap_bytes}", "-w", f"{path}"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self._log = b""
        assert self._process.stderr is not None
        # dumpcap names its output file as soon as it listens.
        while b"File:" not in self._log:
            ready, _, _ = select.select([self._process.stderr], [], [], START_TIMEOUT_S)
            piece = os.read(self._process.stderr.fileno(), 65_536) if ready else b""
            self._log += piece
            if not piece:
                self._process.kill()
                self._end()
                raise RuntimeError(f"dumpcap did not start on {interface}:\n{self._log.decode()}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._end()
        match = _DROPPED.search(self._log.decode())
        if match:
            self.packets, self.dropped = int(match[1]), int(match[2])

    def _end(self) -> None:
        try:
            _, rest = self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, rest = self._process.communicate()
        self._log += rest
