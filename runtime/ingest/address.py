# SPDX-License-Identifier: Apache-2.0
"""Where a run's store listens: what feeders and joining ranks are told."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from sennit.transport.errors import ConfigError

CONNECT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address of a run's store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
            raise ConfigError(f"address {text!r}; allowed: HOST:PORT, port 1 to 65535")
        return cls(host=host.strip("[]"), port=int(port))

    def answers(self) -> bool:
        """Whether something listens at the address."""
        try:
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except OSError:
            return False
        return True

    def check(self) -> None:
        """Raises ConfigError if nothing answers.

        The store's own client would retry for the whole deadline of a collective.
        """
        try:
            socket.create_connection((self.host, self.port), CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                f"no run at {self}: {error.strerror or error}; start it first with --elastic, and give the address "
                "that it prints"
            ) from error
