# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: its pictures match the sources, and everything that it names exists."""

import ast
import re
from pathlib import Path

import pytest

from sennit.testbed import import_graph

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
# A row of a walk: number, file, function or class, what happens.
HOP = re.compile(r"^\| \d+ \| `(?P<file>[^`]+)` \| `(?P<name>[^`]+)` \| .+ \|$", re.MULTILINE)
FILE = re.compile(r"`((?:ebpf|offload|runtime|sennit|testbed|tests|transport|docs)/[\w./*{},-]+)`")
HOPS = HOP.findall(PAGE.read_text())


def test_the_pictures_are_those_of_the_sources() -> None:
    text = PAGE.read_text()
    assert import_graph.with_pictures(text) == text, "make architecture draws them again"


def defined(path: Path) -> set[str]:
    """Names that a file defines: `function`, `Class`, `Class.method`; in C++ `function`, `Class`, `Class::method`."""
    text = path.read_text()
    if path.suffix == ".py":
        found = set()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        return found
    functions = set(re.findall(r"^\S[^;{}()]*?\b((?:\w+::)*\w+)\(", text, re.MULTILINE))
    return functions | set(re.findall(r"^(?:class|struct) (\w+)", text, re.MULTILINE))


@pytest.mark.parametrize(("file", "name"), HOPS, ids=lambda value: value)
def test_every_hop_of_the_walks_is_there(file: str, name: str) -> None:
    assert (ROOT / file).is_file(), file
    assert name in defined(ROOT / file)


def test_the_walks_are_long_enough_to_follow() -> None:
    assert len(HOPS) >= 30


@pytest.mark.parametrize("page", [PAGE, GLOSSARY], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [name for name in FILE.findall(page.read_text()) if not [*ROOT.glob(name.rstrip("/"))]]
    assert not missing


def test_a_page_without_places_for_pictures_is_refused() -> None:
    with pytest.raises(ValueError, match="make architecture"):
        import_graph.with_pictures("# A page\n")


def test_arrows_that_others_imply_are_left_out_and_circles_stay() -> None:
    assert import_graph.reduced({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}
    circle = {("a", "b"), ("b", "a"), ("a", "c")}
    assert import_graph.reduced(circle) == circle


def test_imports_are_found_wherever_they_stand() -> None:
    edges = import_graph.python_edges()
    assert ("offload", "ebpf") in edges
    assert ("runtime/backend", "transport") in edges
    assert not [edge for edge in edges if edge[0] in ("ebpf", "transport")]
    assert ("ports", "flow") in import_graph.native_edges()
