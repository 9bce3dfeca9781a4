# SPDX-License-Identifier: Apache-2.0
"""`make ebpf`: compiles every program of the package for bpftool and for reading. Names what this kernel lacks."""

from __future__ import annotations

import sys
from pathlib import Path

from sennit import extras
from sennit.ebpf import kernel_features
from sennit.ebpf.compiler import PROGRAMS, CompileError, compile_program

try:
    from sennit.ebpf.elf import Elf
except ModuleNotFoundError as error:
    sys.exit(f"ebpf: error: {extras.explain(error) or error}")


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(PROGRAMS.glob("*.bpf.c")):
        name = source.name.removesuffix(".bpf.c")
        try:
            image = compile_program(name)
        except CompileError as error:
            print(f"ebpf: error: {error}", file=sys.stderr)
            return 1
        target = folder / f"{name}.bpf.o"
        target.write_bytes(image)
        functions = sorted(text for text in Elf(image).sections if text and not text.startswith("."))
        print(f"ebpf: {target} ({len(image)} bytes; {', '.join(functions)})")
    for feature in kernel_features.absent():
        print(f"ebpf: not here: {feature.name}: {feature.absent_because}; {feature.remedy}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/ebpf")))
