# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/architecture.md: who imports whom, read from the sources.

`python -m sennit.testbed.import_graph docs/architecture.md` draws them again (`make architecture`). Python's imports
are read by ast, C++'s from `#include "…"`. An arrow that others imply is left out (transitive reduction; Aho, Garey
and Ullman 1972), so that the rest can be read.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from sennit.testbed.marked_page import with_part

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("ebpf", "offload", "transport", "runtime", "testbed", "sennit")
# What everything rests on, and what rests on everything.
FOUNDATIONS, COMMANDS = "sennit", "sennit/commands"
CORE: Final = "transport/csrc"
# Folders in the native core's tree that do not belong to the core.
NOT_CORE: Final = {"tests", "model", "fuzz", "fabric"}
INCLUDE: Final = re.compile(r'^\s*#include "([\w./]+)"', re.MULTILINE)

Edges = set[tuple[str, str]]


def modules() -> dict[str, Path]:
    """Import name -> file, of all Python modules of the package."""
    found = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names = parts[1:] if folder == "sennit" else parts
            found[".".join(["sennit", *names]).removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[Path]:
    """Files that a module imports, also inside functions. `from a import b` is b's file where b is a module."""
    parts = path.relative_to(ROOT).parent.parts
    package = ["sennit", *(parts[1:] if parts[0] == "sennit" else parts)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (known[alias.name] for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if name in known or module in known:
                    yield known[name if name in known else module]


def room(path: Path) -> str:
    """Returns the folder that stands for a file in the picture: two levels deep where a folder has rooms."""
    if path == ROOT / "sennit/__main__.py":
        return COMMANDS
    parts = path.relative_to(ROOT).parts
    is_room = len(parts) > 2 and (parts[0] in ("runtime", "sennit") or parts[:2] == ("offload", "ingest"))
    return "/".join(parts[:2]) if is_room else parts[0]


@functools.cache
def file_edges() -> dict[Path, set[Path]]:
    """Returns what each file imports, wherever the import stands. Imports of a whole package are no edges."""
    known = modules()
    files = {path: imports(path, known) for path in known.values() if path.name != "__init__.py"}
    return {path: {target for target in targets if target.name != "__init__.py"} for path, targets in files.items()}


def folder_edges() -> dict[str, set[str]]:
    """Returns which folders import which. A file that lies beside folders of modules stands for itself."""
    files = file_edges()
    folders = {path.parent for path in files}
    mixed = {folder for folder in folders if any(folder in other.parents for other in folders)}

    def place(path: Path) -> str:
        return str((path if path.parent in mixed else path.parent).relative_to(ROOT))

    found: dict[str, set[str]] = {place(path): set() for path in files}
    for path, targets in files.items():
        found[place(path)] |= {place(target) for target in targets} - {place(path)}
    return found


@functools.cache
def python_edges() -> Edges:
    """Returns the imports between rooms."""
    known = modules()
    edges = {(room(path), room(target)) for path in known.values() for target in imports(path, known)}
    return {(one, other) for one, other in edges if one != other and FOUNDATIONS not in (one, other)}


def native_edges() -> Edges:
    """Returns the includes between the folders of the native core."""
    core = ROOT / CORE
    edges = set()
    for path in [*core.rglob("*.hpp"), *core.rglob("*.cpp")]:
        here = path.relative_to(core).parts[0]
        for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
            there = include.partition("/")[0]
            # The C interface is in include/sennit/core.h.
            there = "include" if there == "sennit" else there
            # Not headers that BPF programs share, which are outside.
            if "/" in include and there not in (here, "..") and (core / there).is_dir():
                edges.add((here, there))
    return {(one, other) for one, other in edges if not {one, other} & NOT_CORE}


def reachable(start: str, edges: Edges) -> set[str]:
    """Returns everything that can be reached from `start`."""
    found: set[str] = set()
    open_ends = [start]
    while open_ends:
        here = open_ends.pop()
        for one, other in edges:
            if one == here and other not in found:
                found.add(other)
                open_ends.append(other)
    return found


def reduced(edges: Edges) -> Edges:
    """Removes the arrows that a longer way implies. Keeps all arrows of a cycle."""
    reach = {node: reachable(node, edges) for edge in edges for node in edge}

    def is_implied(one: str, other: str) -> bool:
        if one in reach[other]:
            return False
        ways = {middle for start, middle in edges if start == one and middle != other and one not in reach[middle]}
        return any(other in reach[middle] for middle in ways)

    return {edge for edge in edges if not is_implied(*edge)}


def mermaid(edges: Iterable[tuple[str, str]]) -> str:
    """Returns (importer, imported) pairs in a fixed order."""

    def node(name: str) -> str:
        return f'{re.sub(r"[^a-z0-9]+", "_", name)}["{name}"]'

    lines = [f"  {node(one)} --> {node(other)}" for one, other in sorted(edges)]
    return "\n".join(["```mermaid", "flowchart TB", *lines, "```"])


def pictures() -> dict[str, str]:
    """Returns the new text for each named place in the page."""
    return {"python": mermaid(reduced(python_edges())), "native": mermaid(reduced(native_edges()))}


def with_pictures(page: str) -> str:
    """Returns the page with new text between its markers. Raises ValueError for a page without them."""
    for name, picture in pictures().items():
        begin, end = f"<!-- {name}: make architecture -->", f"<!-- end of {name} -->"
        page = with_part(page, begin, end, f"\n{picture}\n", what="a picture")
    return page


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_pictures(target.read_text(encoding="utf-8")), encoding="utf-8")
