# SPDX-License-Identifier: Apache-2.0
"""Counters as monitoring systems take them: name, labels, value. From ranks, and from RDMA devices.

Every name starts with `sennit_`. A counter that RDMA devices have too gets their name for it (`STANDARD_NAMES`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sennit.runtime.telemetry.rates import IDS
from sennit.transport import counters
from sennit.transport.meeting import devices

PREFIX: Final = "sennit_"
# Our names -> the names in mlx5 and rxe (drivers/infiniband/hw/mlx5/counters.c, sw/rxe/rxe_hw_counters.c).
STANDARD_NAMES: Final = {
    "data_bytes_sent": "rdma_tx_bytes",
    "data_bytes_received": "rdma_rx_bytes",
    "data_packets_sent": "rdma_tx_packets",
    "data_packets_received": "rdma_rx_packets",
    "duplicate_packets": "duplicate_request",
    "bad_icrc": "rx_icrc_encapsulated",
}
GAUGES: Final = frozenset(
    {
        "window_packets",
        "rtt_us",
        "rto_us",
        "state",
        "registered_bytes",
        "ingest_batches_ready",
        "ingest_feeders_connected",
        "ids_rows",
        "ids_used",
        "aggregator_jobs",
        "aggregator_slots",
        "aggregator_slots_open",
        "aggregator_job_bytes",
        "aggregator_memory_bytes",
        "pages_left_out",
    }
)
UNUSED: Final = "none"
"""The label of a reason that no refused packet has."""
DEVICE_GROUP: Final = "device"
LEFT_OUT: Final = PREFIX + "pages_left_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One counter of one rank, peer, path or device."""

    name: str
    is_gauge: bool
    """True for a momentary value, False for a counter that only grows."""
    labels: dict[str, str]
    value: int


def exported_name(name: str) -> str:
    return PREFIX + STANDARD_NAMES.get(name, name)


def of_pages(pages: Iterable[counters.Page]) -> Iterator[Sample]:
    """Pages of other users, which root reads, have the label `user`: they say what that user wants."""
    reader = os.geteuid()
    for page in pages:
        for block in page.blocks:
            labels = {"process": f"{page.process}", "page": page.number, "group": block.group}
            labels |= {"rank": f"{page.rank}"} if page.world else {}
            labels |= {"peer": f"{block.peer}"} if block.peer is not None else {}
            labels |= {"path": f"{block.path}"} if block.path is not None else {}
            labels |= {"user": f"{page.owner}"} if page.owner != reader else {}
            if block.group.startswith(IDS):
                labels |= {"group": IDS.rstrip("_"), "table": block.group.removeprefix(IDS)}
            for name, value in block.values.items():
                if name != UNUSED:
                    yield Sample(name=exported_name(name), is_gauge=name in GAUGES, labels=labels, value=value)


def of_devices(sysfs: Path = devices.SYSFS) -> Iterator[Sample]:
    """Counters of RDMA devices' ports (`hw_counters`), over all processes; nothing without devices."""
    for folder in sorted(sysfs.glob(f"*/ports/*/{devices.HW_COUNTERS}")):
        device, _, port, _ = folder.parts[-4:]
        labels = {"device": device, "port": port, "group": DEVICE_GROUP}
        for file in devices.counter_files(folder):
            try:
                value = int(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # the device went away, or its driver has no counters
                continue
            yield Sample(name=PREFIX + file.name, is_gauge=False, labels=labels, value=value)


def read() -> list[Sample]:
    """All counters of this machine, now. First come those in which other users have no part."""
    found = counters.look()
    left_out = Sample(name=LEFT_OUT, is_gauge=True, labels={}, value=sum(found.left_out.values()))
    return [left_out, *of_devices(), *of_pages(found.pages)]
