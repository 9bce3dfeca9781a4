# SPDX-License-Identifier: Apache-2.0
"""What a machine is, in the message `Inventory` of OPI. A field that the kernel does not tell stays empty."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pydpu.proto.v1 import inventory_pb2

SYS: Final = Path("/sys")
# Field of the message -> file of /sys/class/dmi/id, as the kernel has it from SMBIOS. Serial numbers are for root.
DMI: Final = {
    "bios": {"vendor": "bios_vendor", "version": "bios_version", "date": "bios_date"},
    "system": {
        "family": "product_family", "name": "product_name", "vendor": "sys_vendor", "serial_number": "product_serial",
        "uuid": "product_uuid", "sku": "product_sku", "version": "product_version",
    },
    "baseboard": {
        "asset_tag": "board_asset_tag", "serial_number": "board_serial", "vendor": "board_vendor",
        "version": "board_version", "product": "board_name",
    },
    "chassis": {
        "asset_tag": "chassis_asset_tag", "serial_number": "chassis_serial", "type": "chassis_type",
        "vendor": "chassis_vendor", "version": "chassis_version",
    },
}  # fmt: skip


def read(sys: Path = SYS) -> Any:
    """An `Inventory` of this machine."""
    found = inventory_pb2.Inventory()
    for part, fields in DMI.items():
        for field, file in fields.items():
            if value := _text(sys / "class/dmi/id" / file):
                setattr(getattr(found, part), field, value)
    cores, threads = _processors(sys)
    found.processor.total_cores, found.processor.total_threads = cores, threads
    found.memory.total_usable_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found.memory.total_physical_bytes = _memory_bytes(sys)
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        found.pci.append(_pci_device(device))
    return found


def _processors(sys: Path) -> tuple[int, int]:
    """Cores and threads that are online."""
    threads = [
        (_text(folder / "physical_package_id"), _text(folder / "core_id"))
        for folder in (sys / "devices/system/cpu").glob("cpu[0-9]*/topology")
    ]
    return len(set(threads)), len(threads)


def _memory_bytes(sys: Path) -> int:
    """Of the blocks of memory that are online, also what the kernel keeps for itself; 0 where it tells no blocks."""
    folder = sys / "devices/system/memory"
    block = int(_text(folder / "block_size_bytes") or "0", 16)
    return block * sum(_text(state) == "online" for state in folder.glob("memory[0-9]*/state"))


def _pci_device(device: Path) -> Any:
    """Numbers in place of names, as in the PCI ID database: the database is not part of sennit."""

    def number(file: str) -> str:
        return _text(device / file).removeprefix("0x")

    driver, kind = device / "driver", number("class")
    found = inventory_pb2.PCIeDeviceInfo(
        address=device.name,
        driver=driver.resolve().name if driver.exists() else "",
        vendor=number("vendor"),
        product=number("device"),
        revision=_text(device / "revision"),
        subsystem=f"{number('subsystem_vendor')}:{number('subsystem_device')}",
        subclass=kind[2:4],
    )
    setattr(found, "class", kind[:2])
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # is not there, or for root alone
        return ""
