# SPDX-License-Identifier: Apache-2.0
"""What `sennit aggregate` runs: the daemon, and the XDP programs where there are some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from sennit.closing import Closing
from sennit.ebpf import kernel_features
from sennit.ebpf.compiler import CompileError
from sennit.ebpf.library import BpfError
from sennit.runtime.aggregate.page import AggregatorPage
from sennit.runtime.aggregate.xdp import XdpPrograms
from sennit.transport.aggregator import AggregatedJob, Aggregator

# What the programs need of kernel and process; `sennit doctor` says these, too.
NEEDS: Final = ("privileges", "libbpf", "arena", "xdp")


class Serving(Closing):
    """An aggregator at the work. Closing it detaches its programs; so does the end of the process."""

    def __init__(self, interface: str | None, *, addresses: Sequence[str], port: int, memory_bytes: int) -> None:
        """`interface`: where XDP programs take packets; None: UDP sockets alone.

        Raises ArgumentError, DeviceError, and BpfError if the interface has another program.
        """
        self.why_native = ""
        """Why there are no programs, though there is an interface."""

        self._page: AggregatorPage | None = None
        self._programs: XdpPrograms | None = None
        if interface is not None:
            self._programs = self._loaded(port, memory_bytes)
        try:
            if self._programs is not None and interface is not None:
                self._programs.attach(interface, addresses)
            arena = 0 if self._programs is None else self._programs.address
            self._daemon = Aggregator(addresses, port=port, memory_bytes=memory_bytes, arena=arena)
        except BaseException:
            self.close()
            raise
        self.port: Final = self._daemon.port
        self._page = AggregatorPage(self._look, memory_bytes)

    @property
    def mode(self) -> str:
        """Who sums: "native", or "xdp"; "xdp and sockets" if the daemon sends the sums, as at a driver without XDP."""
        if self._programs is None:
            return "native"
        return "xdp" if self._programs.answers_in_kernel else "xdp and sockets"

    @property
    def left_out(self) -> list[str]:
        """Addresses of the interface whose packets the programs do not take, but the daemon does."""
        return self._programs.left_out if self._programs else []

    def run(self, seconds: float) -> None:
        self._daemon.run(seconds)
        if self._page is not None:
            self._page.show()

    def report(self) -> dict[str, Any]:
        """Counters of programs and daemon together, those of the programs alone, and jobs."""
        counters, in_kernel, jobs = self._look()
        return {"counters": counters, "in_kernel": in_kernel, "jobs": [asdict(job) for job in jobs]}

    def _look(self) -> tuple[dict[str, int], dict[str, int], list[AggregatedJob]]:
        counters = self._daemon.counters()
        in_kernel = self._programs.counters() if self._programs else {}
        for name, number in in_kernel.items():
            counters[name] += number
        return counters, in_kernel, self._daemon.jobs()

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
        if self._programs is not None:
            self._programs.close()

    def _loaded(self, port: int, memory_bytes: int) -> XdpPrograms | None:
        for name in NEEDS:
            if not (feature := kernel_features.probe(name)).available:
                self.why_native = f"no XDP, {feature.name}: {feature.absent_because} ({feature.remedy})"
                return None
        try:
            return XdpPrograms(port=port, memory_bytes=memory_bytes)
        except CompileError as error:
            self.why_native = f"no XDP: {str(error).splitlines()[0]}"
        except BpfError as error:
            self.why_native = f"no XDP, the kernel refuses the programs: {str(error).splitlines()[0]}"
        return None
