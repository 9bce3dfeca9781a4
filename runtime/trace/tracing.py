# SPDX-License-Identifier: Apache-2.0
"""Attaches our own programs to the tracepoints of a library, for the sessions that need no bcc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from sennit.closing import Closing
from sennit.ebpf import kernel_features, links, usdt, usdt_entries
from sennit.ebpf.compiler import CompileError, compile_with_header
from sennit.ebpf.library import BpfError
from sennit.ebpf.loader import BpfObject
from sennit.runtime.trace.target import SessionError, Target


def problem() -> str:
    """Why no such session can run on this machine, and what to do about it; empty if one can."""
    if os.geteuid() != 0:
        return "attaching to tracepoints needs root"
    for name in ("libbpf", "uprobe"):
        found = kernel_features.probe(name)
        if not found.available:
            return f"{found.absent_because}: {found.remedy}"
    return ""


class Tracing(Closing):
    """`programs/<name>.bpf.c`, attached while this is open."""

    def __init__(self, name: str, probes: Sequence[str], target: Target) -> None:
        """Attaches to these tracepoints of the library, in one process or in all that use it. Raises `SessionError`."""
        what = problem()
        if what:
            raise SessionError(what)
        try:
            points = {point.name: point for point in usdt.read(target.file)}
        except (OSError, ValueError) as error:
            raise SessionError(f"{target.path} of {target} cannot be read: {error}") from None
        missing = [probe for probe in probes if probe not in points]
        if missing:
            raise SessionError(f"{target.path} has no tracepoint {', '.join(missing)}: was it built with sys/sdt.h?")
        wanted = [points[probe] for probe in probes]
        # The kernel uses a call if there is room for one, and a trap otherwise.
        can_call = kernel_features.probe("uprobe-call").available
        self._held = contextlib.ExitStack()
        try:
            text = usdt_entries.source(wanted)
            self.object = self._held.enter_context(BpfObject(compile_with_header(name, usdt_entries.HEADER, text)))
            for point in wanted:
                for number, place in enumerate(point.places):
                    program = self.object.program(usdt_entries.program_name(point.name, number))
                    offset = place.offset + (can_call and place.has_call_nop)
                    of = links.EVERY_PROCESS if target.process is None else target.process
                    self._held.enter_context(links.attach_uprobe_at(program, target.file, offset, process=of))
        except (BpfError, CompileError, usdt_entries.UnknownOperand) as error:
            self.close()
            raise SessionError(f"{error}" + (f"; is there a {target}?" if target.process is not None else "")) from None

    def entries(self, name: str, key: str) -> list[tuple[Any, Any]]:
        """The entries of a hash map with keys of `struct key`: pairs of NumPy records."""
        found, dtype = self.object.map(name), self.object.btf.dtype(key)
        return [(np.frombuffer(raw, dtype)[0], found.values(raw)[0]) for raw in list(found.each_key())]

    def uncounted(self) -> dict[str, int]:
        """Hits missing in the session's figures, by reason (`struct uncounted` in tracepoint.h)."""
        counted = self.object.map("uncounted").values(0)[0]
        return {name: int(counted[name]) for name in counted.dtype.names}

    def close(self) -> None:
        self._held.close()
