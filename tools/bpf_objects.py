# SPDX-License-Identifier: Apache-2.0
"""Compiles the BPF programs that depend on nothing but the package: `bpf_objects.py FOLDER ELFTOOLS LIBRARY…`.

CMake runs it when it builds a wheel, with `python -S`: pyelftools is named by its folder, and `sennit` is the tree that
this file is in. The libraries have the tracepoints for which tracing sessions have programs.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TRACEPOINT = re.compile(r"^TRACEPOINT\((\w+)", re.MULTILINE)


def main(folder: Path, libraries: list[Path]) -> None:
    from sennit.ebpf import compiler, usdt, usdt_entries

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    points = {point.name: point for library in libraries for point in usdt.read(library)}
    for source in sorted(compiler.PROGRAMS.glob("*.bpf.c")):
        name, wanted = source.name.removesuffix(".bpf.c"), _TRACEPOINT.findall(source.read_text(encoding="utf-8"))
        if not wanted:
            # A program with an arena takes a newer clang. Without it, the wheel lacks the object.
            with contextlib.suppress(*([compiler.ToolMissing] if name in compiler.ARENAS else [])):
                compiler.write_object(folder, name)
        elif all(tracepoint in points for tracepoint in wanted):  # else it was built without sys/sdt.h
            entries = usdt_entries.source(points[tracepoint] for tracepoint in wanted)
            compiler.write_object(folder, name, usdt_entries.HEADER, entries)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    sys.path.append(str(Path(sys.argv[2]).parent))
    import sennit

    sennit.__path__.append(str(ROOT))
    main(Path(sys.argv[1]), [Path(library) for library in sys.argv[3:]])
