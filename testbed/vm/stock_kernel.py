# SPDX-License-Identifier: Apache-2.0
"""Debian's own kernel for QEMU: the image from its package, and the modules of soft-RoCE in loading order."""

from __future__ import annotations

import lzma
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from sennit import debian

# The meta-package depends on the newest kernel of the series.
META_PACKAGE: Final = "linux-image-amd64"
SERIES: Final = "6.12"
IMAGE: Final = "vmlinux"
MODULES: Final = "modules"
# rxe asks the crypto layer for "crc32" by name, so no file lists this dependency.
WANTED: Final = (
    "virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay", "veth", "dummy", "bridge",
    "sch_netem", "sch_tbf", "sch_prio", "sch_ingress", "cls_u32", "cls_flower", "cls_matchall", "act_gact",
    "act_mirred", "af_packet", "ib_uverbs", "ib_umad", "rdma_ucm", "crc32_generic", "rdma_rxe",
)  # fmt: skip
EXTRACT_TIMEOUT_S: Final = 120.0

# Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length
SETUP_SECTORS_AT: Final = 0x1F1
PAYLOAD_AT: Final = 0x248
SECTOR_BYTES: Final = 512
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def package_name() -> str:
    """Returns the package of the newest kernel of the series. Its name contains the version."""
    system = debian.system()
    if not debian.names(META_PACKAGE) and not system.startswith("Debian"):
        raise debian.Unavailable(
            f"the kind qemu runs Debian's own kernel, and {system} does not have it: take uml, or Debian 12 or 13"
        )
    debian.candidate(META_PACKAGE)  # or says that apt does not know the package
    pattern = rf"linux-image-{re.escape(SERIES)}\.\d+\+deb\d+-amd64"
    plain = [name for name in debian.names(f"linux-image-{SERIES}.") if re.fullmatch(pattern, name)]
    if not plain:
        raise debian.Unavailable(f"apt knows no kernel image of Linux {SERIES}: run 'apt-get update'")
    return max(plain, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def fetch(entry: Path, package: str, say: Callable[[str], None]) -> None:
    """Fills `entry` with the image and the modules, numbered in loading order."""
    unpacked = entry.parent / "package"
    version = debian.candidate(package)
    say(f"downloading {package} {version}")
    debian.unpack(package, version, unpacked)
    (image,) = (unpacked / "boot").glob("vmlinuz-*")
    (entry / IMAGE).write_bytes(_decompressed(image.read_bytes()))
    # Debian 13 has it below /usr.
    (modules,) = [path for path in (*unpacked.glob("lib/modules/*"), *unpacked.glob("usr/lib/modules/*"))]
    (entry / MODULES).mkdir()
    for number, path in enumerate(loading_order(modules, WANTED)):
        name = path.name.removesuffix(".xz")
        (entry / MODULES / f"{number:03}-{name}").write_bytes(_module_bytes(path))
    shutil.rmtree(unpacked)


def loading_order(modules: Path, wanted: tuple[str, ...]) -> Iterator[Path]:
    """Returns the files of the modules and of their dependencies, dependencies first, each once.

    The dependencies come from a module's own section .modinfo. modules.dep only exists once a kernel is installed.
    """
    files = {_module_name(path): path for path in modules.rglob("*.ko*")}
    built_in = {
        _module_name(Path(line)) for line in (modules / "modules.builtin").read_text(encoding="utf-8").splitlines()
    }
    seen = set(built_in)

    def visit(name: str) -> Iterator[Path]:
        if name in seen:
            return
        seen.add(name)
        if name not in files:
            raise debian.StepFailed(f"the kernel in {modules} has no module {name}")
        depends = re.search(rb"\0depends=([^\0]*)\0", _module_bytes(files[name]))
        for dependency in depends[1].decode().split(",") if depends and depends[1] else []:
            yield from visit(dependency.replace("-", "_"))
        yield files[name]

    for name in wanted:
        yield from visit(name.replace("-", "_"))


def _module_name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _decompressed(image: bytes) -> bytes:
    """Returns the ELF file inside a bzImage, or the bzImage if that fails. The ELF file boots a second sooner."""
    start = (image[SETUP_SECTORS_AT] + 1) * SECTOR_BYTES
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    payload = image[start + offset : start + offset + length]
    if not payload.startswith(ZSTD_MAGIC) or shutil.which("zstd") is None:
        return image
    # The payload ends with its unpacked size, which zstd takes for garbage after the frame.
    done = subprocess.run(
        ["zstd", "-dcq"], input=payload[:-4], capture_output=True, timeout=EXTRACT_TIMEOUT_S, check=False
    )
    return done.stdout if done.returncode == 0 else image
