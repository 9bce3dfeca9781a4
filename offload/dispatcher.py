# SPDX-License-Identifier: Apache-2.0
"""Several receivers at one interface, which takes one XDP program: ebpf/programs/dispatch.bpf.c is that program."""

from __future__ import annotations

import socket
import struct
from typing import Final

from sennit.closing import Closing
from sennit.ebpf.compiler import compile_program
from sennit.ebpf.links import Link, attach_xdp
from sennit.ebpf.loader import BpfObject

_NUMBER: Final = struct.Struct("<I")


class Dispatcher(Closing):
    """The dispatcher at an interface: UDP port `first_port + n` goes to receiver `n`, everything else to the host."""

    def __init__(self, *, first_port: int, receivers: int, fragments: bool = False) -> None:
        """`fragments` must be that of the receivers' programs: the kernel takes no others."""
        self.first_port, self.fragments = first_port, fragments
        self._object = BpfObject(
            compile_program("dispatch"),
            read_only={"first_port": first_port},
            max_entries={"receivers": receivers},
            xdp_fragments=fragments,
        )
        self._link: Link | None = None
        self.program = self._object.program("dispatch")

    def add(self, number: int, program_descriptor: int) -> None:
        self._object.map("receivers").write(number, _NUMBER.pack(program_descriptor))

    def remove(self, number: int) -> None:
        self._object.map("receivers").delete(number)

    def attach(self, interface: str) -> None:
        self._link = attach_xdp(self.program, socket.if_nametoindex(interface))

    @property
    def is_attached(self) -> bool:
        """Whether it is at an interface. It is not once that has gone, or somebody has detached it."""
        return self._link is not None and self._link.is_attached

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._object.close()
